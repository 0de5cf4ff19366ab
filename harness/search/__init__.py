"""Pure searches: the largest value that fits, and the changes that make a trial fit.

In: functions that say what a point needs. Out: points to try next, and what was found.
It must not predict, run or print anything itself.
"""
