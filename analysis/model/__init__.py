"""Curves over rows: fits of memory and speed, what fits in a GPU, what to measure next.

In: a frame. Out: fits with their errors.
It must not word or draw them for a page.
"""
