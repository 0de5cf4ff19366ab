"""Models of memory and speed over rows: fits, limits of what fits in a GPU, the points to measure next.

In: a frame. Out: fits with their errors.
It must not word or draw them for a page.
"""
