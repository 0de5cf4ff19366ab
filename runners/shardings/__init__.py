"""Division of the work among ranks: DDP, FSDP and ZeRO, on GPUs, on CPUs and on fake tensors.

In: a Trial, a model. Out: the model with this rank's part, or arguments of a library that divides it.
It must not decide what is valid: harness/spec does, and names these modules.
"""
