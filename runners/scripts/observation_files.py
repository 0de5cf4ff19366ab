"""Names of an attempt's files by which a watched script's processes and their worker communicate."""

WATCH = "watch.json"  # the request to the observer, over the one here
UNASKED = {"measured_steps": None, "record": False, "stop": False, "job": False, "precision": None}
SEEN = "seen-{}.json"  # the report of the process with this id
