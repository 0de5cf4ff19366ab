"""What a rank is read with: the meter of steps, counters of memory, FLOPs, the hooks of torch.

In: a step to run. Out: peaks in bytes, times in seconds, FLOPs.
It must not know who drives the loop, nor predict.
"""
