"""One rank's process: its process group, its result file, how it ends, and import of modules that tables name.

In: the columns or the error of each rank. Out: one result of all ranks.
It must not know what is measured.
"""
