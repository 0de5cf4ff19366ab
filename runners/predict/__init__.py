"""A trace through the allocator to a row, a timeline, an explanation.

In: a trace, a GPU's limit, settings of the allocator. Out: predicted columns, marked as such.
It must not touch a GPU.
"""
