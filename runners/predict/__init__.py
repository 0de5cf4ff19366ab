"""Predictions: traces, made or kept, and their replay through the allocator to a row, a timeline or an explanation.

In: a trace, a GPU's limit, settings of the allocator. Out: predicted columns, marked as such.
It must not touch a GPU.
"""
