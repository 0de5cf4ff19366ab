"""The kinds of curve and their least squares: line, parabola, and maximum of two or three lines (hinge).

A curve is a few numbers with units: its parameters are those of `predict`, in the unit of y per unit of x. Choosing
between kinds, intervals and censoring are fit.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import linalg

Array = np.ndarray[Any, np.dtype[np.float64]]

# Fewest different x for each kind: its parameters and one more, so that residuals mean something.
NEEDS = {"linear": 3, "quadratic": 4, "hinge": 6, "hinge2": 9}
NAMES = {
    "linear": "straight line",
    "quadratic": "quadratic",
    "hinge": "hinge (two lines)",
    "hinge2": "hinge (three lines)",
}


@dataclass(frozen=True)
class Curve:
    """`y = a + b x`, `a + b x + c x²`, or `a + b x + Σ c_i max(0, x − k_i)` with all c_i > 0: a maximum of lines.

    `coefficients` are a, b, c... and `knots` the k_i (unit of x), ascending.
    """

    kind: str
    coefficients: tuple[float, ...]
    knots: tuple[float, ...] = ()

    @property
    def parameters(self) -> tuple[float, ...]:
        """Coefficients, then knots."""
        return self.coefficients + self.knots

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `parameters`, in order."""
        letters = ("a", "b", *(f"c{i}" for i in range(1, len(self.coefficients) - 1)))
        if self.kind == "quadratic":
            letters = ("a", "b", "c")
        return letters + tuple(f"k{i}" for i in range(1, len(self.knots) + 1))

    def predict(self, x: Array) -> Array:
        """y at x, both of shape (n,)."""
        return np.asarray(_design(self.kind, x, self.knots) @ np.array(self.coefficients))

    def jacobian(self, x: Array) -> Array:
        """Derivatives of y by each of `parameters`, shape (n, parameters).

        A knot's column is −c where x lies beyond it (Muggeo 2003, "Estimating regression models with unknown
        break-points").
        """
        columns = [_design(self.kind, x, self.knots)]
        for knot, change in zip(self.knots, self.coefficients[2 : 2 + len(self.knots)], strict=True):
            columns.append(-change * (x > knot)[:, None].astype(float))
        return np.hstack(columns)

    def lines(self) -> list[tuple[float, float, float, float]]:
        """The pieces of a line or hinge as (from, to, fixed part, slope); a parabola has none."""
        if self.kind == "quadratic":
            return []
        edges = [-np.inf, *self.knots, np.inf]
        fixed, slope = self.coefficients[0], self.coefficients[1]
        pieces = []
        for i, (start, stop) in enumerate(pairwise(edges)):
            if i:
                slope += self.coefficients[1 + i]
                fixed -= self.coefficients[1 + i] * self.knots[i - 1]
            pieces.append((start, stop, fixed, slope))
        return pieces


def fit_curve(kind: str, x: Array, y: Array, weights: Array | None = None) -> Curve | None:
    """The least-squares curve of a kind, weighted by `weights` if given.

    None when there are too few different x, or when no maximum of that many lines fits
    better than one of fewer: the data then has no such knot.
    """
    if len(np.unique(x)) < NEEDS[kind]:
        return None
    root = np.ones_like(x) if weights is None else np.sqrt(weights)
    knots: tuple[float, ...] = ()
    if kind.startswith("hinge"):
        found = _knots(x, y, root, 2 if kind == "hinge2" else 1)
        if found is None:
            return None
        knots = found
    design = _design(kind, x, knots) * root[:, None]
    size = linalg.norm(design, axis=0)
    if not np.all(size > 0):
        return None
    solution = linalg.lstsq(design / size, y * root, check_finite=False)[0] / size
    if knots and np.any(solution[2:] <= 0):
        return None
    return _polished(Curve(kind, tuple(float(v) for v in solution), knots), x, y, root)


def _polished(curve: Curve, x: Array, y: Array, root: Array) -> Curve:
    """The curve after Gauss-Newton steps over all parameters, knots included, as long as they lessen the error."""
    for _ in range(3 if curve.knots else 0):
        residuals = (y - curve.predict(x)) * root
        jacobian = curve.jacobian(x) * root[:, None]
        size = np.maximum(linalg.norm(jacobian, axis=0), 1e-300)
        step = linalg.lstsq(jacobian / size, residuals, check_finite=False)[0] / size
        after = np.array(curve.parameters) + step
        coefficients, knots = after[: len(curve.coefficients)], after[len(curve.coefficients) :]
        better = Curve(curve.kind, tuple(map(float, coefficients)), tuple(map(float, knots)))
        inside = np.all(np.diff([x.min(), *knots, x.max()]) > 0) and np.all(coefficients[2:] > 0)
        if not inside or linalg.norm((y - better.predict(x)) * root) >= linalg.norm(residuals):
            break
        curve = better
    return curve


def huber(fit: Callable[[Array], Curve | None], x: Array, y: Array, rounds: int = 30) -> Curve | None:
    """The curve of `fit(weights)` under Huber's loss, by iteratively reweighted least squares.

    Weights and scale are statsmodels' (Huber 1981, tuned for 95 % efficiency; scale from the median
    absolute deviation).
    """
    from statsmodels.robust import norms, scale

    curve = fit(np.ones_like(x))
    norm = norms.HuberT()
    for _ in range(rounds):
        if curve is None:
            return None
        residuals = y - curve.predict(x)
        spread = float(scale.mad(residuals, center=0))
        if spread <= 1e-12 * float(np.abs(y).max(initial=1.0)):
            return curve
        before, curve = curve, fit(np.asarray(norm.weights(residuals / spread), dtype=float))
        if curve is not None and np.allclose(curve.parameters, before.parameters, rtol=1e-9):
            return curve
    return curve


def evaluate(kind: str, parameters: Array, x: Array) -> Array:
    """y of many curves of one kind: parameters (draws, parameters), x (n,), result (draws, n)."""
    y = parameters[:, :1] + parameters[:, 1:2] * x
    if kind == "quadratic":
        return np.asarray(y + parameters[:, 2:3] * x**2)
    knots = (parameters.shape[1] - 2) // 2
    for i in range(2, 2 + knots):
        y += parameters[:, i : i + 1] * np.maximum(0.0, x - parameters[:, i + knots : i + knots + 1])
    return np.asarray(y)


def refit(curve: Curve, x: Array, ys: Array, spread: float) -> Array:
    """Parameters (draws, parameters) of the curve's kind, fitted to each column of ys (n, draws).

    For the bootstrap: knots are searched on one grid for all draws, fine around the curve's own knots (in steps of a
    fraction of their standard error at residual standard deviation `spread`) and coarse elsewhere.
    """
    if not curve.knots:
        design = _design(curve.kind, x, ())
        size = linalg.norm(design, axis=0)
        return np.asarray((linalg.lstsq(design / size, ys, check_finite=False)[0].T) / size)
    knots = _grid(curve, x, spread)
    plain = _design("linear", x, ())
    line, _ = linalg.qr(plain, mode="economic")
    hinges = np.maximum(0.0, x[:, None] - knots)
    columns = hinges - line @ (line.T @ hinges)
    gram = columns.T @ columns
    slope = columns.T @ ys
    diagonal = np.maximum(np.diag(gram), 1e-300)
    if len(curve.knots) == 1:
        at = np.argmax(slope**2 / diagonal[:, None], axis=0)[None, :]
        changes = np.take_along_axis(slope, at, 0) / diagonal[at]
    else:
        i, j = np.triu_indices(len(knots), 1)
        determinant = diagonal[i] * diagonal[j] - gram[i, j] ** 2
        keep = determinant > 1e-6 * diagonal[i] * diagonal[j]
        i, j, determinant = i[keep], j[keep], determinant[keep, None]
        first = (diagonal[j, None] * slope[i] - gram[i, j, None] * slope[j]) / determinant
        second = (diagonal[i, None] * slope[j] - gram[i, j, None] * slope[i]) / determinant
        best = np.argmax(first * slope[i] + second * slope[j], axis=0)
        at = np.stack([i[best], j[best]])
        changes = np.stack([np.take_along_axis(part, best[None, :], 0)[0] for part in (first, second)])
    rest = ys.copy()
    for change, index in zip(changes, at, strict=True):
        rest -= change * hinges[:, index]
    straight = linalg.lstsq(plain, rest, check_finite=False)[0]
    return np.asarray(np.vstack([straight, changes, knots[at]]).T)


def _grid(curve: Curve, x: Array, spread: float) -> Array:
    """Candidate knots for `refit`."""
    jacobian = curve.jacobian(x)
    size = np.maximum(linalg.norm(jacobian, axis=0), 1e-300)
    covariance = linalg.pinvh((jacobian / size).T @ (jacobian / size))
    errors = spread * np.sqrt(np.maximum(np.diag(covariance), 0)) / size
    inner = _inner(x)
    grid = [np.quantile(inner, np.linspace(0, 1, 24))]
    for knot, error in zip(curve.knots, errors[-len(curve.knots) :], strict=True):
        grid.append(knot + error * np.linspace(-4, 4, 97 if len(curve.knots) == 1 else 17))
    return np.unique(np.clip(np.concatenate([*grid, curve.knots]), inner[0], inner[-1]))


def _inner(x: Array) -> Array:
    """Where a knot may lie: a knot next to an end would fit that end's last points, not the data."""
    different = np.unique(x)
    edge = max(1, round(0.02 * len(different)))
    return np.asarray(different[edge:-edge])


def _design(kind: str, x: Array, knots: tuple[float, ...]) -> Array:
    columns = [np.ones_like(x), x]
    if kind == "quadratic":
        columns.append(x * x)
    columns += [np.maximum(0.0, x - knot) for knot in knots]
    return np.column_stack(columns)


def _knots(x: Array, y: Array, root: Array, count: int) -> tuple[float, ...] | None:
    """The knots with the least squared error: all candidates at once, then ever finer around the best.

    For given knots the model is linear, so each candidate's error follows from the parts of the hinge columns and of
    y that a straight line leaves (Frisch, Waugh and Lovell).
    """
    inner = _inner(x)
    low, high = float(inner[0]), float(inner[-1])
    line, _ = linalg.qr(np.column_stack([root, x * root]), mode="economic")
    rest = y * root - line @ (line.T @ (y * root))
    candidates = np.unique(np.quantile(inner, np.linspace(0, 1, 48)))
    best: tuple[float, ...] | None = None
    for _ in range(4):
        columns = np.maximum(0.0, x[:, None] - candidates) * root[:, None]
        columns -= line @ (line.T @ columns)
        chosen = _best(columns.T @ columns, columns.T @ rest, candidates, count, (high - low) / len(inner))
        if chosen is None:
            return best
        best = chosen
        near = []
        for knot in best:
            at = int(np.searchsorted(candidates, knot))
            near.append(np.linspace(candidates[max(at - 1, 0)], candidates[min(at + 1, len(candidates) - 1)], 13))
        candidates = np.unique(np.concatenate([*near, best]))
    return best


def _best(gram: Array, slope: Array, candidates: Array, count: int, apart: float) -> tuple[float, ...] | None:
    """The candidate (or pair, at least `apart`) that removes most squared error with every coefficient positive."""
    diagonal = np.diag(gram).copy()
    usable = diagonal > 1e-12 * max(float(diagonal.max(initial=0.0)), 1e-300)
    if count == 1:
        gain = np.where(usable & (slope > 0), slope**2 / np.where(usable, diagonal, 1.0), -np.inf)
        at = int(np.argmax(gain))
        return (float(candidates[at]),) if np.isfinite(gain[at]) else None
    determinant = np.outer(diagonal, diagonal) - gram**2
    solvable = (determinant > 1e-9 * np.outer(diagonal, diagonal)) & np.outer(usable, usable)
    solvable &= np.subtract.outer(-candidates, -candidates) >= apart
    safe = np.where(solvable, determinant, 1.0)
    first = (diagonal[None, :] * slope[:, None] - gram * slope[None, :]) / safe
    second = (diagonal[:, None] * slope[None, :] - gram * slope[:, None]) / safe
    gains = np.where(solvable & (first > 0) & (second > 0), first * slope[:, None] + second * slope[None, :], -np.inf)
    i, j = np.unravel_index(int(np.argmax(gains)), gains.shape)
    return (float(candidates[i]), float(candidates[j])) if np.isfinite(gains[i, j]) else None
