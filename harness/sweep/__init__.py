"""From planned trials to rows in the journal: order, slots, retries, budget, shards, progress.

In: trials and the sweep's settings. Out: a row per attempt, in the journal, and counts on the terminal.
It must not parse the command line.
"""
