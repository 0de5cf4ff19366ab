"""Questions about predictions and rows: does it fit, what is the largest value, what to change, what holds the memory.

In: trials and the sweep's settings, or published readings. Out: answers as data.
It must not parse a verb's options; it prints progress, and a sweeper's largest values (edge_search.py).
"""
