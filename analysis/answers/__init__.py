"""Tables that answer a preset's question.

In: a frame of that preset's rows. Out: a table with the claim, what was found, and from which rows.
It must not fit anything itself.
"""
