"""One row per attempt: its columns, outcome and flags, the journal, and rows of earlier versions.

In: evidence of an attempt, lines of a journal. Out: rows, appended and read back.
It must not start processes, and never changes a line that was written.
"""
