"""`vramsweep.estimate`: the memory of a user's own objects, predicted in their own process, which stays as it was.

In: a model, a batch, an optimizer, a loss. Out: an `Estimate`.
It must not copy weights, run an operator on them, or change anything of the user's.
"""
