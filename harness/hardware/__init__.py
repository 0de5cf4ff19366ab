"""Published facts of GPUs and links, and times from them: the roofline, and steps by measured speeds.

In: names of GPUs, counts of FLOPs and bytes. Out: capacities, rates, estimated seconds.
It must not ask this machine for anything: harness/machine does.
"""
