"""Techniques applied to a model, an optimizer or a step, a module each.

In: a Trial and what it is applied to. Out: the same, changed, or a context manager around the run.
It must not decide what is valid: harness/spec/techniques does, and names these modules.
"""
