"""One rank's process: its group, its result file, how it ends, and modules by the names of entries.

In: what a rank found. Out: one result of all ranks.
It must not know what is measured.
"""
