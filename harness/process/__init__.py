"""One attempt: a worker process started cold or by a fork server, watched, ended, its evidence collected.

In: a trial's spec file, an environment, a deadline. Out: evidence of how it ended.
It must not know sweeps, retries or the journal, and ends no process that is not its own.
"""
