"""Exact functions through whole numbers: the formula of length and batch behind values at a few points.

A formula is a sum of terms with rational coefficients: a polynomial (`POLYNOMIAL`) and at most two other terms.
The other terms are what kernels make of a length: rounded up to a power of two, times another, squared. Linear
algebra in floating point finds a formula, and arithmetic in whole numbers proves it. It goes through every point, and
there are at least `SPARE` more points than coefficients. If several formulas fit and differ at a wanted point, that
point must be traced next. piecewise_templates.py finds where formulas end, as at a length from which other kernels run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

from vramsweep.runners.trace.symbolic_trace import Point, function

ROUNDINGS = (2, 4, 8, 16, 32, 64, 128, 256)
SPARE = 2
_TOKENS = "seq_len * micro_batch"
POLYNOMIAL = ("1", "seq_len", "micro_batch", _TOKENS, "seq_len * seq_len", f"seq_len * {_TOKENS}")
LINE = ("1", _TOKENS)
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Unknown:
    """No formula yet. `ask` are numbers of points that would decide; if empty, no formula goes through these values."""

    ask: tuple[int, ...] = ()


def rounded(value: str, multiple: int) -> str:
    """Return the formula text of `value`, one name or in parentheses, rounded up to a multiple."""
    return f"-(-{value} // {multiple}) * {multiple}"


def other_terms(names: Sequence[str]) -> Iterator[str]:
    """Yield the terms other than the polynomial's, simple ones first."""
    tokens = "(seq_len * micro_batch)"
    for multiple in ROUNDINGS:
        yield f"{rounded('seq_len', multiple)} * micro_batch"
    for multiple in ROUNDINGS:
        yield rounded(tokens, multiple)
        yield rounded("seq_len", multiple)
        yield f"seq_len * micro_batch * {rounded('seq_len', multiple)}"
        yield f"seq_len * {rounded('seq_len', multiple)}"
        yield f"{rounded('seq_len', multiple)} * {rounded('seq_len', multiple)} * micro_batch"
        yield f"{rounded('seq_len', multiple)} * {rounded('seq_len', multiple)}"
        yield rounded("micro_batch", multiple)
        yield f"{rounded('micro_batch', multiple)} * seq_len"
    yield from ("micro_batch * micro_batch", f"{tokens} * micro_batch", f"{tokens} * {tokens}")
    if "kept" in names:
        yield from ("kept", "kept * micro_batch", "kept * kept", "kept * kept * micro_batch", "kept * seq_len")
        for multiple in ROUNDINGS:
            yield f"{rounded('kept', multiple)} * micro_batch"
            yield rounded("(kept * micro_batch)", multiple)


class Candidates:
    """The terms that differ over the wanted `points`; a point is named by its number there."""

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)
        columns = zip(Point._fields, zip(*points, strict=True), strict=True)
        self.names = {name: np.array(values, np.int64) for name, values in columns if None not in values}
        self._known: dict[str, Ints] = {}
        self.polynomial, self._directions = list[str](), list[Floats]()
        for term in POLYNOMIAL:
            if (residue := _residue(self._floats(term), self._directions)) is not None:
                self._directions.append(residue)
                self.polynomial.append(term)
        self.others, self._residues = list[str](), list[Floats]()
        for term in other_terms(list(self.names)):
            residue = _residue(self._floats(term), self._directions)
            if residue is not None and not any(abs(residue @ known) > 1 - 1e-12 for known in self._residues):
                self._residues.append(residue)
                self.others.append(term)

    @property
    def enough(self) -> int:
        """Return the least number of points that determine a polynomial."""
        return len(self.polynomial) + SPARE

    def fit(self, at: Sequence[int], values: Ints) -> list[str | Unknown]:
        """Return the formula of each column of `values`; its rows are the points numbered `at`."""
        base = np.stack([self._of(term)[list(at)] for term in self.polynomial], 1)
        if len(at) < self.enough or np.linalg.matrix_rank(_scaled(base)) < base.shape[1]:
            return [Unknown(tuple(self.choose(at, max(1, self.enough - len(at)))))] * values.shape[1]
        fitting = _Fitting(self, list(at), base)
        if fitting.blurred is not None:
            return [Unknown((fitting.blurred,))] * values.shape[1]
        return fitting.formulas(values)

    def plausible(self, at: Ints, values: Ints) -> bool:
        """Guess whether a polynomial and one more term may go through each column, with `SPARE` points to spare."""
        base = np.stack([self._floats(term)[at] for term in self.polynomial], 1)
        u, s, _ = np.linalg.svd(base / np.abs(base).max(0))
        rank = int((s > 1e-9 * s[0]).sum())
        if len(at) < rank + SPARE:
            return False
        complement = u[:, rank:].T
        rest = complement @ values.astype(np.float64)
        sizes, whole = np.linalg.norm(rest, axis=0), np.abs(values).max(0)
        simple = sizes <= 1e-9 * whole
        if simple.all() or len(at) < rank + 1 + SPARE or not self.others:
            return bool(simple.all())
        terms = complement @ np.stack([self._floats(term)[at] for term in self.others], 1)
        terms = terms / np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
        alike = np.abs(terms.T @ rest).max(0) >= (1 - 1e-9) * sizes
        return bool((simple | alike).all())

    def alone(self, terms: Sequence[str], at: list[int]) -> int | None:
        """Return a further point to trace if a coefficient depends on a single point of `at`; None otherwise.

        A rounded length may be a step with one point before it, and any jump at that point would fit that step.
        """
        columns = np.stack([self._floats(term) for term in terms], 1)
        columns /= np.abs(columns[at]).max(0)
        directions, _ = np.linalg.qr(columns[at])
        for place in np.flatnonzero((directions * directions).sum(1) > 1 - 1e-9):
            others = np.delete(columns[at], place, 0)
            unsaid = np.linalg.svd(others)[2][-1]  # the coefficients that the other points leave open
            effect = np.abs(columns @ unsaid)
            effect[at] = 0
            if effect.max() > 1e-6:
                return int(np.argmax(effect))
        return None

    def choose(self, chosen: Sequence[int], count: int) -> list[int]:
        """Return `count` more points at which terms differ most from what those already `chosen` allow."""
        rows = self._differences.copy()
        for index in chosen:
            _remove(rows, index)
        found: list[int] = []
        taken = np.zeros(len(rows), bool)
        taken[list(chosen)] = True
        while len(found) < min(count, len(rows) - len(chosen)):
            lengths = np.where(taken, -1.0, (rows * rows).sum(1))
            index = int(np.argmax(lengths))
            if lengths[index] < 1e-9:  # no term is open: take the point farthest, in their order, from any taken one
                free, here = np.flatnonzero(~taken), np.flatnonzero(taken)
                index = int(free[np.argmax(np.abs(free[:, None] - here).min(1) if len(here) else free)])
            _remove(rows, index)
            taken[index] = True
            found.append(index)
        return found

    def exact(self, terms: Sequence[str], at: list[int], values: list[int]) -> Formula | None:
        """Return the one formula of these terms through these values. Return None if there is none, or if it is no
        whole number at some point."""
        found = _solved([[int(self._of(term)[i]) for term in terms] for i in at], values)
        if found is None:
            return None
        divisor = math.lcm(*(c.denominator for c in found))
        pairs = [(int(c * divisor), term) for c, term in zip(found, terms, strict=True) if c]
        total = self._sum(pairs)
        if (total % divisor).any():
            return None
        return Formula(_text(pairs, divisor), total // divisor)

    def _sum(self, pairs: list[tuple[int, str]]) -> Ints:
        largest = sum(abs(c) * int(np.abs(self._of(term)).max()) for c, term in pairs)
        kind = np.int64 if largest < 1 << 62 else object
        return sum((c * self._of(term).astype(kind) for c, term in pairs), np.zeros(len(self.points), kind))

    def _of(self, term: str) -> Ints:
        if term not in self._known:
            value = function(term)([self.names.get(name) for name in Point._fields])
            self._known[term] = np.broadcast_to(np.asarray(value, np.int64), len(self.points))
        return self._known[term]

    def _floats(self, term: str) -> Floats:
        return self._of(term).astype(np.float64)

    @cached_property
    def _differences(self) -> Floats:
        """Return each term's part (column) that earlier polynomial terms lack, per point (row); scale columns alike."""
        columns = np.stack([*self._directions, *self._residues], 1)
        columns = columns / np.abs(columns).max(0)
        return cast(Floats, columns / np.linalg.norm(columns, axis=1)[:, None])  # else only the longest would be chosen


@dataclass(frozen=True)
class Formula:
    """A formula: its text and its value at every wanted point."""

    text: str
    values: Ints


class _Fitting:
    """Fits of columns of values at some of the points, by the part of them that is no polynomial."""

    def __init__(self, candidates: Candidates, at: list[int], base: Ints) -> None:
        self.candidates, self.at = candidates, at
        whole, _ = np.linalg.qr(_scaled(base), mode="complete")
        self.complement = whole[:, base.shape[1] :].T
        terms = [candidates._of(term)[at].astype(np.float64) for term in candidates.others]
        columns = np.stack(terms, 1) if terms else np.zeros((len(at), 0))
        beyond = self.complement @ columns
        sizes = np.linalg.norm(beyond, axis=0)
        alike = sizes <= 1e-10 * np.linalg.norm(columns, axis=0)
        # a term that looks like a polynomial at these points and is none: more points must decide
        self.blurred: int | None = None
        if alike.any():
            residue = np.abs(candidates._residues[int(np.flatnonzero(alike)[0])])
            residue[at] = -1
            self.blurred = int(np.argmax(residue))
        self.beyond = beyond / np.where(sizes > 0, sizes, 1)

    def formulas(self, values: Ints) -> list[str | Unknown]:
        """Return one formula for each column of `values`."""
        rest = self.complement @ values.astype(np.float64)
        return [self._formula([int(v) for v in values[:, i]], rest[:, i]) for i in range(values.shape[1])]

    def _formula(self, values: list[int], rest: Floats) -> str | Unknown:
        noise = 1e-13 * max(map(abs, values))
        fits: list[Formula] = []
        for terms in self._levels(rest, noise):
            if len(self.at) < len(self.candidates.polynomial) + len(terms[0]) + SPARE:
                return Unknown(tuple(self.candidates.choose(self.at, 2)))
            for chosen in terms:
                names = [*self.candidates.polynomial, *(self.candidates.others[i] for i in chosen)]
                formula = self.candidates.exact(names, self.at, values)
                if formula is None:
                    continue
                if (more := self.candidates.alone(names, self.at)) is not None:
                    return Unknown((more,))
                fits.append(formula)
            if fits:
                return self._only(fits, min(values))
        return self._bent(values)

    def _bent(self, values: list[int]) -> str | Unknown:
        """Return the minimum or maximum of two lines in tokens; the points next to where they meet must be traced.

        Such formulas occur because a kernel reads at most the whole of a table.
        """
        candidates, at = self.candidates, self.at
        tokens = candidates._of(_TOKENS)
        ordered = sorted(range(len(at)), key=lambda n: int(tokens[at[n]]))
        fits: list[Formula] = []
        for cut in range(len(LINE) + SPARE, len(at) - len(LINE) - SPARE + 1):
            sides = ordered[:cut], ordered[cut:]
            parts = [candidates.exact(LINE, [at[n] for n in side], [values[n] for n in side]) for side in sides]
            if None in parts or parts[0] == parts[1]:
                continue
            first, second = (part for part in parts if part is not None)
            for name, which in (("min", np.minimum), ("max", np.maximum)):
                both = which(first.values, second.values)
                if [int(v) for v in both[at]] == values:
                    fits.append(Formula(f"{name}({first.text}, {second.text})", both))
                    near = _points_beside(tokens, first.values < second.values)
                    if missing := tuple(i for i in near if i not in at):
                        return Unknown(missing)
        return self._only(fits, min(values)) if fits else Unknown()

    def _levels(self, rest: Floats, noise: float) -> Iterator[Sequence[tuple[int, ...]]]:
        """Yield the sets of other terms that may make up the rest: no term, then single ones, then pairs."""
        size = float(np.linalg.norm(rest))
        if size <= 1e4 * noise:
            yield [()]
        allowed = 1e-5 * size + 10 * noise
        single = np.linalg.norm(rest[:, None] - self.beyond * (self.beyond.T @ rest), axis=0)
        ones = [(int(i),) for i in np.flatnonzero(single <= allowed)]
        if ones:
            yield ones
        first, second, left = self._pairs
        made = rest[:, None] - first * (first.T @ rest) - second * (second.T @ rest)
        pairs = [left[i] for i in np.flatnonzero(np.linalg.norm(made, axis=0) <= allowed)]
        if pairs:
            yield pairs

    @cached_property
    def _pairs(self) -> tuple[Floats, Floats, list[tuple[int, int]]]:
        """Return pairs of terms as orthogonal directions, and their numbers; leave out pairs alike at these points."""
        both = list(itertools.combinations(range(self.beyond.shape[1]), 2))
        first, other = (self.beyond[:, [pair[k] for pair in both]] for k in (0, 1))
        second = other - first * (first * other).sum(0)
        size = np.linalg.norm(second, axis=0)
        apart = size > 1e-9
        kept = [pair for pair, well in zip(both, apart, strict=True) if well]
        directions: Floats = second[:, apart] / size[apart]
        return first[:, apart], directions, kept

    def _only(self, fits: list[Formula], least: int) -> str | Unknown:
        """Return the first formula if all agree at every point and none gives an impossible size, as 0 among others.

        Otherwise name the point that must be traced to decide."""
        first, *rest = fits
        for other in rest:
            if (gap := np.abs(other.values - first.values)).any():
                return Unknown((int(np.argmax(gap)),))
        if int(first.values.min()) < min(least, 1):
            return Unknown((int(np.argmin(first.values)),))
        return first.text


def _residue(column: Floats, spanned: Sequence[Floats]) -> Floats | None:
    """Return the part of a column outside the span, normalised to length 1; None if nothing is left."""
    whole = float(np.linalg.norm(column))
    for _ in range(2):  # twice, for the sake of rounding
        for direction in spanned:
            column = column - direction * (direction @ column)
    size = float(np.linalg.norm(column))
    return None if size <= 1e-9 * whole else column / size


def _points_beside(tokens: Ints, less: NDArray[np.bool_]) -> list[int]:
    """Return the last point before two lines meet and the first after it."""
    below = tokens[less == less[np.argmin(tokens)]].max()
    after = np.where(tokens > below, tokens, np.iinfo(np.int64).max)
    return [int(np.argmax(tokens == below)), int(np.argmin(after))]


def _remove(rows: Floats, index: int) -> None:
    """Remove the direction of one row from all rows."""
    size = np.linalg.norm(rows[index])
    if size > 1e-9:
        direction = rows[index] / size
        rows -= np.outer(rows @ direction, direction)


def _scaled(columns: Ints) -> Floats:
    return cast(Floats, columns / np.abs(columns).max(0))


def _solved(rows: list[list[int]], values: list[int]) -> list[Fraction] | None:
    """Return the coefficients of the columns that give these values in every row; None if not exactly one list does.

    It eliminates in whole numbers, which is exact and quick (Bareiss, "Sylvester's identity and multistep
    integer-preserving Gaussian elimination", 1968).
    """
    matrix = [[*row, value] for row, value in zip(rows, values, strict=True)]
    count, before = len(rows[0]), 1
    for column in range(count):
        pivot = next((r for r in range(column, len(matrix)) if matrix[r][column]), None)
        if pivot is None:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        head = matrix[column]
        for r in range(column + 1, len(matrix)):
            first = matrix[r][column]
            matrix[r] = [(head[column] * a - first * b) // before for a, b in zip(matrix[r], head, strict=True)]
        before = head[column]
    if any(row[-1] for row in matrix[count:]):
        return None
    found: list[Fraction] = []  # last coefficient first
    for column in reversed(range(count)):
        row = matrix[column]
        known = sum(a * b for a, b in zip(row[column + 1 : count], reversed(found), strict=True))
        found.append((row[-1] - known) / Fraction(row[column]))
    return found[::-1]


def _text(pairs: list[tuple[int, str]], divisor: int) -> str:
    parts = [str(c) if term == "1" else term if c == 1 else f"{c} * {term}" for c, term in pairs]
    total = " + ".join(parts) or "0"
    return total if divisor == 1 else f"({total}) // {divisor}"
