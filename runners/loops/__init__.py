"""Runners, which drive the training loop: a plain loop, the Trainer, DeepSpeed, a user's function.

In: a Trial, a device, a meter. Out: columns of the row.
It must not read counters itself: the meter does.
"""
