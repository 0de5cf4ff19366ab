"""This machine as it is now: GPUs, their state and users, host memory, packages.

In: NVML, /proc, installed packages. Out: readings; None for a reading that the machine does not give.
It must not know sweeps; harness/hardware has the published facts of GPUs.
"""
