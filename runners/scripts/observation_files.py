"""Files of an attempt by which a watched script's processes and their worker speak."""

WATCH = "watch.json"  # what is asked of the observer
SEEN = "seen-{}.json"  # what the process of a number has seen
