"""One attempt: its worker process, started cold or by a fork server, is watched and ended, and its evidence collected.

In: a trial's spec file, an environment, a deadline. Out: evidence of how the attempt ended.
This room must not know sweeps, retries or the journal, and must not end other processes than its own.
"""
