"""A training step on fake tensors: what it allocates and frees, in order.

In: a step. Out: a trace of allocations, frees and work, of a GPU that need not be there.
It must not know what memory a GPU has: runners/predict replays the trace.
"""
