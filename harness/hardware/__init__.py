"""Published facts of GPUs and links, and the roofline that is built on them.

In: names of GPUs, counts of FLOPs and bytes. Out: capacities, rates, estimated seconds.
It must not ask this machine for anything: harness/machine does.
"""
