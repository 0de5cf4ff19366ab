"""Techniques for a model, an optimizer or a step, one module each.

In: a Trial and the object to change. Out: the changed object, or a context manager around the run.
It must not decide what is valid: harness/spec/techniques does, and names these modules.
"""
