"""Pure searches: the largest value that fits, what follows from points that were tried, changes that make a trial fit.

In: what came of points, or functions that say it. Out: points to try next, and what was found.
It must not predict, run or print anything itself.
"""
