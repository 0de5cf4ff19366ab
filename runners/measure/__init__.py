"""Measurement of one rank: the step meter, memory counters, FLOPs, and the hooks in torch.

In: a step to run. Out: peaks in bytes, times in seconds, FLOPs.
It must not know who drives the loop, and must not predict.
"""
