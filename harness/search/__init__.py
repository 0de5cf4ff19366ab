"""Pure searches: the largest value that fits, what follows from tried points, changes that make a trial fit.

In: results of points, or functions that return them. Out: points to try next, and what was found.
It must not predict, run or print anything itself.
"""
