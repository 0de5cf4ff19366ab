"""Trials: their settings, their ids, and which combinations are valid, with the reason.

In: plain values. Out: a Trial, or InvalidTrial. Tables of runners, shardings, techniques and known differences name
modules of the runners by names that begin with a dot. It must not know how a trial is run or what its result is.
"""
