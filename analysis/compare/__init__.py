"""Comparisons of sweeps, versions and predictions, with intervals and verdicts.

In: two frames, or measured and predicted rows. Out: differences and how certain they are.
It must not draw.
"""
