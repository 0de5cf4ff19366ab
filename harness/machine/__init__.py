"""This machine as it is now: GPUs, their state and who uses them, host memory, packages.

In: NVML, /proc, installed packages. Out: readings; None for what the machine does not give.
It must not know sweeps; what is published of a GPU is in harness/hardware.
"""
