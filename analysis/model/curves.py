"""Kinds of curve along one axis, and a curve: the maximum of a few lines or parabolas.

A peak of memory is the largest of several moments. Each is a level, a line, or a parabola if attention stores its
scores. estimate.py finds them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_name("kinds.json").read_text("utf-8"))
NAMES: dict[str, str] = _TABLES["names"]
BASES: dict[str, str] = _TABLES["bases"]  # what values between and beyond the points are based on
PLAIN = ("linear", "quadratic")  # always shown
FEWEST = 3  # different x, below which nothing is fitted


@dataclass(frozen=True)
class Kind:
    """A kind of curve, by the numbers of the features that each piece has (along one axis: 1, x, x²).

    `joined`: the value is the largest piece, else that of the run that x lies in. `rising` are features whose
    coefficient in the last piece is at least 0. `weight` is the prior odds. `fixed` is a feature that is added to the
    last piece with a coefficient of 1. `share` is the least share of all x, and 3, that each piece must have. Several
    kinds may share a name, if words do not distinguish them.
    """

    name: str
    pieces: tuple[tuple[int, ...], ...]
    weight: float
    joined: bool = True
    rising: tuple[int, ...] = ()
    fixed: int | None = None
    share: float = 0.0


def read_kinds(table: str) -> tuple[Kind, ...]:
    """Return the kinds of a table of kinds.json."""
    lines: list[dict[str, Any]] = _TABLES[table]
    return tuple(
        Kind(**one | {"pieces": tuple(map(tuple, one["pieces"])), "rising": tuple(one.get("rising", ()))})
        for one in lines
    )


# Prior odds: where lengths span both, a peak is a level (weights and gradients), then a line (activations). A line
# alone is one side of it. The likelihood itself counts against needless pieces.
KINDS, STEP = read_kinds("peak"), read_kinds("limited")


def powers(x: Array) -> Array:
    """Return the features along one axis, 1, x and x², (n, 3)."""
    return np.column_stack([np.ones_like(x), x, x * x])


@dataclass(frozen=True)
class Curve:
    """The largest of `pieces` at x, each (a, b, c) of a + b x + c x²; with `edges` the piece between them instead."""

    kind: str
    pieces: tuple[tuple[float, float, float], ...]
    edges: tuple[float, ...] = ()

    def predict(self, x: Array) -> Array:
        """Return y at x, both (n,)."""
        each = [a + b * x + c * x * x for a, b, c in self.pieces]
        if self.edges:
            return np.asarray(np.choose(np.searchsorted(np.array(self.edges), x, side="right"), each))
        return np.asarray(np.maximum.reduce(each))

    @property
    def knots(self) -> tuple[float, ...]:
        """Values of x where one piece ends and the next begins, ascending."""
        return self.edges or tuple(meet(one, other) for one, other in pairwise(self.pieces))

    @property
    def parameters(self) -> dict[str, float]:
        """Numbers of each piece by name (a1, b1, c1 only if not 0, ...), then the knots."""
        named = {
            f"{letter}{i}": value
            for i, piece in enumerate(self.pieces, 1)
            for letter, value in zip("abc", piece, strict=True)
            if letter != "c" or value
        }
        return named | {f"k{i}": knot for i, knot in enumerate(self.knots, 1)}

    def lines(self) -> list[tuple[float, float, float, float, float]]:
        """Return the pieces as (from, to, a, b, c)."""
        edges = [-np.inf, *self.knots, np.inf]
        return [(start, stop, *piece) for (start, stop), piece in zip(pairwise(edges), self.pieces, strict=True)]


def meet(one: Sequence[float], other: Sequence[float]) -> float:
    """Return where `other` overtakes `one` with growing x; NaN if it never does."""
    a, b, c = (float(q - p) for p, q in zip(one, other, strict=True))
    if c == 0:
        return -a / b if b > 0 else float("nan")
    inside = b * b - 4 * a * c
    return float((-b + np.sqrt(inside)) / (2 * c)) if inside >= 0 else float("nan")
