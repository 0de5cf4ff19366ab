"""How sure a fitted model is: parameters and residuals drawn again, from which all intervals come."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import linalg, stats

from vramsweep.analysis.data.metrics import Metric
from vramsweep.analysis.model.curves import Array, refit
from vramsweep.analysis.model.observe import Model, Points

DRAWS = 999
SEED = 20_240_917
LEVEL = 0.95


def draw(model: Model, points: Points, metric: Metric) -> tuple[dict[bool, Array], dict[bool, Array]]:
    """Draws of each curve's parameters (DRAWS, parameters) and residuals for new observations.

    Residuals, scaled up for leverage and for degrees of freedom, are drawn anew from all of them (Efron 1979). Where
    their size changes with x or neighbours are alike, they stay in place and get random signs instead, shared within
    runs of n^(1/3) neighbours if those are alike: the wild bootstrap (Wu 1986; Liu 1988; Shao 2010). Repeats of
    memory, which tell nothing new, count once.
    """
    random = np.random.default_rng(SEED)
    draws: dict[bool, Array] = {}
    noise: dict[bool, Array] = {}
    for key, at in model.members(points.x).items():
        curve = model.curves[key]
        x: Array = points.x[at]
        y: Array = points.y[at]
        if metric.memory:
            once = pd.Series(y).groupby(x).mean()
            x, y = np.asarray(once.index, dtype=float), np.asarray(once, dtype=float)
        residuals: Array = y - curve.predict(x)
        jacobian = curve.jacobian(x)
        q, _ = linalg.qr(jacobian / np.maximum(linalg.norm(jacobian, axis=0), 1e-300), mode="economic")
        leverage: Array = np.minimum(np.sum(q**2, axis=1), 0.95)
        freedom = max(len(x) - jacobian.shape[1], 1)
        small = float(stats.t.ppf(0.5 + LEVEL / 2, freedom) / stats.norm.ppf(0.5 + LEVEL / 2))
        alike, uneven = _structure(x, residuals)
        if alike or uneven:
            run = np.arange(len(x)) // (max(round(len(x) ** (1 / 3)), 1) if alike else 1)
            signs = random.choice([-1.0, 1.0], size=(DRAWS, int(run[-1]) + 1))[:, run]
            errors: Array = signs * (residuals / (1 - leverage))
        else:
            pool = residuals / np.sqrt(1 - leverage)
            errors = random.choice(pool - pool.mean(), size=(DRAWS, len(x)))
        ys = curve.predict(x)[:, None] + errors.T * small
        spread = float(np.sqrt(np.sum(residuals**2) / freedom))
        draws[key] = refit(curve, x, ys, spread)
        noise[key] = residuals * np.sqrt(len(x) / freedom) * small
    return draws, noise


def _structure(x: Array, residuals: Array) -> tuple[bool, bool]:
    """Whether residuals of neighbours are alike, and whether their size changes with x; needs thirty to say so."""
    if len(x) < 30 or float(residuals.std()) == 0:
        return False, False
    alike = float(np.corrcoef(residuals[1:], residuals[:-1])[0, 1]) > 0.3
    return alike, bool(stats.spearmanr(x, np.abs(residuals)).pvalue < 0.01)
