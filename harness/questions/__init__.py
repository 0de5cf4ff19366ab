"""What is asked of predictions and rows: does it fit, how far does it go, what to change, what holds the memory.

In: trials and the sweep's settings, or published readings. Out: answers as data.
It must not parse a verb's options; it prints progress, and a sweeper's edges (edge_search.py).
"""
