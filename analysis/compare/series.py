"""Values along an axis: repeats as one, and how many neighbours that are alike count as."""

from __future__ import annotations

import numpy as np

from vramsweep.analysis.model.curves import Array

FEWEST_SINGLE = 30  # pairs of single runs from which their own scatter tells what noise is
FEWEST_ALIKE = 12  # values of the axis that tell how much neighbours are alike; fewer lie far apart as a rule


def once(x: Array, y: Array) -> tuple[Array, Array]:
    """The median of y at each x, sorted by x."""
    values, codes = np.unique(x, return_inverse=True)
    if len(values) == len(x):
        order = np.argsort(x)
        return x[order], y[order]
    return values, np.array([np.median(y[codes == code]) for code in range(len(values))])


def inflation(residuals: Array, parameters: int = 1) -> float:
    """How many neighbours count as one: (1 + r) / (1 − r) of their autocorrelation r at lag 1, at least 1.

    That of a first-order autoregression (Bayley and Hammersley 1946), with r corrected for its bias in short series
    (Marriott and Pope 1954) and for the parameters taken out. Fewer than `FEWEST_ALIKE` do not tell.
    """
    n = len(residuals)
    centred = residuals - residuals.mean()
    total = float(centred @ centred)
    if n < FEWEST_ALIKE or total == 0:
        return 1.0
    r = float(centred[1:] @ centred[:-1]) / total
    r = min((n * r + 1) / (n - 3 - parameters), 0.95)
    return (1 + r) / (1 - r) if r > 0 else 1.0
