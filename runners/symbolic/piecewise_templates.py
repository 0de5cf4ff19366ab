"""A few traces for many points: pieces that share one template, with formulas of its sizes through traced points.

Rules (at most so long, divisible by 8) divide the points into pieces. In a piece, all traced points have equal events,
and formulas go through all their numbers. For each piece we trace its extreme points (shortest, longest, smallest,
largest batch) and locate its edges to the point. A piece is accepted only if further points agree in everything. They
are traced after its rules and formulas were settled: `CHECKS` of them, and some more in a piece of hundreds. Points
that no accepted piece covers are left to be traced one by one. Only wanted points are ever traced, so there are never
more traces than points.

A few points cannot show a size that differs at one length alone, amid others that follow one rule.
"""

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vramsweep.runners.symbolic.exact_formulas import ROUNDINGS, Candidates, Ints, Unknown
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace, following, function
from vramsweep.runners.trace.trace_data import Trace

CHECKS = 2
FEW = 10  # points: so few are as quickly traced one by one
MOST = 96  # most traces made; further points are left
TRIES = 6  # further points, beyond those a formula needs, in a piece whose numbers follow no formula yet
QUANTITIES = ("seq_len", "micro_batch", "(seq_len * micro_batch)", "kept")
Mask = NDArray[np.bool_]


class Traced(NamedTuple):
    """One point's trace and its columns about what was built."""

    trace: Trace
    details: dict[str, Any]


Ask = Callable[[Sequence[Point]], Mapping[Point, Traced]]
Known = Callable[[Point], dict[str, Any]]


@dataclass(frozen=True)
class Cover:
    """Traces and pieces that cover the wanted points. `left` are the others: each needs a trace of its own."""

    traced: Mapping[Point, Traced]
    pieces: tuple[SymbolicTrace, ...]
    left: frozenset[Point]
    known: Known
    _piece: Mapping[Point, int]

    def formulas(self, point: Point) -> SymbolicTrace | None:
        """Return the formulas that hold at a point; None if it was traced itself or no piece covers it."""
        return None if point in self.traced or point not in self._piece else self.pieces[self._piece[point]]

    def at(self, point: Point) -> tuple[Trace, dict[str, Any], str] | None:
        """Return the trace at a point, its details and its basis: "traced" or "checked at N points". Return None if
        nothing covers the point, or if it cannot be traced."""
        if (found := self.traced.get(point)) is not None:
            return found.trace, found.details, "traced"
        piece = self.formulas(point)
        if piece is None:
            return None
        trace, details = piece.at(point)
        return trace, details | self.known(point), piece.basis


def cover(wanted: Collection[Point], ask: Ask, known: Known = lambda point: {}, most: int = MOST) -> Cover:
    """Trace some of the points and return the cover of all of them.

    `ask` traces several points at once; one that it leaves out cannot be traced. `known` gives details that need no
    trace, as those of the samples; a point whose trace has other values is left alone. `most` bounds the traces.
    """
    points = sorted(set(wanted))
    search = _Search(points, ask, known)
    if len(points) <= FEW:
        search.trace(range(len(points)))
        return search.cover([])
    search.trace(search.first())
    while True:
        leaves = list(search.grow())
        asked = sorted({index for leaf in leaves for index in leaf.ask} - search.seen.keys())
        if not asked or len(search.seen) + len(asked) > most:
            return search.cover(leaves)
        search.trace(asked)


@dataclass(frozen=True)
class _Seen:
    """A traced point: `kind`, equal in all points of a piece (None: no piece can have this point), and its numbers."""

    kind: str | None
    numbers: Ints


@dataclass(frozen=True)
class _Rule:
    """A condition on a quantity as a guard, its opposite, and the mask of wanted points at which it is true."""

    quantity: str
    text: str
    opposite: str
    true: Mask = field(repr=False)


@dataclass(frozen=True)
class _Leaf:
    """Points that no rule divides further. `formulas` has one for each different column of numbers, or is None.
    `column[i]` is the column of number i. `ask` are points to trace before the leaf is accepted."""

    inside: Mask
    guards: tuple[str, ...]
    at: tuple[int, ...]
    ask: tuple[int, ...] = ()
    formulas: tuple[str, ...] | None = None
    column: Sequence[int] = ()


class _Search:
    """The search for a cover: the wanted points, the traced ones among them, and the checks of settled pieces."""

    def __init__(self, points: list[Point], ask: Ask, known: Known) -> None:
        self.points, self.ask, self.known = points, ask, known
        self.seen: dict[int, _Seen] = {}
        self.traced: dict[int, Traced] = {}
        self.checks: dict[tuple[Any, ...], set[int]] = {}  # by settled piece: points traced after it was settled
        self.everything = np.ones(len(points), bool)
        self._candidates: dict[bytes, Candidates] = {}
        self.quantities = {
            name: np.array([function(name)(p) for p in points])
            for name in QUANTITIES
            if name != "kept" or all(p.kept is not None for p in points)
        }

    def trace(self, numbers: Iterable[int]) -> None:
        """Trace the points of these numbers and keep what came of each."""
        asked = list(numbers)
        found = self.ask([self.points[i] for i in asked])
        for index in asked:
            one = found.get(self.points[index])
            if one is None:
                self.seen[index] = _Seen(None, np.zeros(0, np.int64))
            else:
                self.traced[index] = one
                self.seen[index] = _seen(one, self.known(self.points[index]))

    def first(self) -> list[int]:
        """Return the extreme points, the one after the first, and points at which formulas differ most."""
        extremes = self._extremes(self.everything)
        second = [i for i in (extremes[0] + 1,) if i not in extremes]  # as length 1 usually behaves differently
        candidates = self.candidates(self.everything)
        wanted = candidates.enough + 3
        return [*extremes, *second, *candidates.choose([*extremes, *second], wanted - len(extremes) - len(second))]

    def candidates(self, inside: Mask) -> Candidates:
        key = inside.tobytes()
        if key not in self._candidates:
            self._candidates[key] = Candidates([self.points[i] for i in np.flatnonzero(inside)])
        return self._candidates[key]

    def grow(self, inside: Mask | None = None, guards: tuple[str, ...] = ()) -> Iterator[_Leaf]:
        """Divide the points inside as far as the traced points decide; yield the leaves."""
        inside = self.everything if inside is None else inside
        at = [i for i in sorted(self.seen) if inside[i]]
        kinds = {self.seen[i].kind for i in at}
        rule: _Rule | None = None
        ask: tuple[int, ...] = ()
        if len(kinds) > 1:
            rule, ask = self._dividing(inside, at)
        elif kinds != {None}:
            leaf, unknown = self._settled(inside, guards, at)
            if not unknown.size:
                yield leaf
                return
            rule, ask = self._breaking(inside, at, unknown)
        if rule is None or ask:  # the edge must be located before its two sides
            yield _Leaf(inside, guards, tuple(at), ask)
            return
        yield from self.grow(inside & rule.true, (*guards, rule.text))
        yield from self.grow(inside & ~rule.true, (*guards, rule.opposite))

    def cover(self, leaves: Sequence[_Leaf]) -> Cover:
        """Return the cover by the traced points and the accepted leaves."""
        believed = [leaf for leaf in leaves if leaf.formulas is not None and not leaf.ask]
        pieces = tuple(self._piece(leaf) for leaf in believed)
        of = {self.points[i]: n for n, leaf in enumerate(believed) for i in np.flatnonzero(leaf.inside).tolist()}
        traced = {self.points[i]: one for i, one in self.traced.items()}
        left = frozenset(set(self.points) - of.keys() - traced.keys())
        return Cover(traced, pieces, left, self.known, of)

    def _settled(self, inside: Mask, guards: tuple[str, ...], at: list[int]) -> tuple[_Leaf, Ints]:
        """Return the leaf of these points of one kind, with its formulas or the points to trace for them. Also return
        the columns through which no formula goes."""
        leaf, nothing = _Leaf(inside, guards, tuple(at)), np.zeros((len(at), 0), np.int64)
        free = [i for i in np.flatnonzero(inside).tolist() if i not in self.seen]
        if not free:
            return leaf, nothing
        candidates = self.candidates(inside)
        missing = [i for i in self._extremes(inside) if i not in self.seen]
        if missing or len(free) <= CHECKS:
            return replace(leaf, ask=tuple(missing or free)), nothing
        rows = np.stack([self.seen[i].numbers for i in at])
        columns, column = np.unique(rows, axis=1, return_inverse=True)
        found = candidates.fit(np.searchsorted(np.flatnonzero(inside), at).tolist(), columns)
        ask = Counter(i for one in found if isinstance(one, Unknown) for i in one.ask)
        if ask:
            most = max(CHECKS, candidates.enough - len(at))
            return replace(leaf, ask=tuple(self._global(inside, [i for i, _ in ask.most_common(most)]))), nothing
        texts = tuple(one for one in found if isinstance(one, str))
        if len(texts) < len(found):
            return leaf, columns[:, [isinstance(one, Unknown) for one in found]]
        key = (guards, self.seen[at[0]].kind, texts)
        checks = self.checks.setdefault(key, set())
        enough = min(max(CHECKS, int(np.count_nonzero(inside)).bit_length() // 2), len(free))
        if len(checks & self.seen.keys()) < CHECKS:
            ask_for = _drawn(key, free, enough)
            checks.update(ask_for)
            return replace(leaf, ask=tuple(ask_for)), nothing
        return replace(leaf, formulas=texts, column=column.ravel().tolist()), nothing

    def _dividing(self, inside: Mask, at: list[int]) -> tuple[_Rule | None, tuple[int, ...]]:
        """Return the rule that best separates kinds, and the points to trace to be sure of the rule."""
        kinds = [self.seen[i].kind for i in at]

        def gain(side: Mask) -> float:
            parts = ([kind for kind, into in zip(kinds, part, strict=True) if into] for part in (side, ~side))
            return -sum(len(part) * _entropy(part) for part in parts)

        return self._best(inside, at, gain)

    def _breaking(self, inside: Mask, at: list[int], values: Ints) -> tuple[_Rule | None, tuple[int, ...]]:
        """Return the rule on whose sides formulas may go through most points of these columns; else more points."""
        candidates = self.candidates(inside)
        places = np.searchsorted(np.flatnonzero(inside), at)

        def explained(side: Mask) -> float:
            parts = (side, ~side)
            return sum(int(part.sum()) for part in parts if candidates.plausible(places[part], values[part]))

        rule, ask = self._best(inside, at, explained, more_than=0)
        if rule is None and len(at) < candidates.enough + TRIES:
            return None, tuple(self._global(inside, candidates.choose(places.tolist(), CHECKS)))
        return rule, ask

    def _best(
        self, inside: Mask, at: list[int], worth: Callable[[Mask], float], more_than: float = -math.inf
    ) -> tuple[_Rule | None, tuple[int, ...]]:
        """Return the rule worth most at the traced points. If another rule divides those alike, but not all points,
        also return points to trace that decide between the two."""
        by_side: dict[bytes, list[_Rule]] = {}
        for rule in self._rules_for(inside, at):
            side = rule.true[at]
            if side.any() and not side.all():
                by_side.setdefault((side if side[0] else ~side).tobytes(), []).append(rule)
        best: list[_Rule] = []
        for rules in by_side.values():
            value = worth(rules[0].true[at])
            if value > more_than:
                best, more_than = rules, value
        if not best:
            return None, ()
        first = best[0]
        for other in best[1:]:
            apart = (first.true == other.true)[inside] != (first.true == other.true)[at[0]]
            between = [i for i in np.flatnonzero(inside)[apart].tolist() if i not in self.seen]
            if between:
                return first, self._amid(between, first)
        return first, ()

    def _rules_for(self, inside: Mask, at: list[int]) -> Iterator[_Rule]:
        """Yield every rule that may divide these points: an edge at either end of the gap between two traced values, or
        divisibility by a size."""
        for name, all_values in self.quantities.items():
            traced = np.unique(all_values[at])
            values = np.unique(all_values[inside])
            for low, high in itertools.pairwise(traced):
                last = values[values < high][-1]
                for edge in dict.fromkeys((int(low), int(last))):
                    yield _Rule(name, f"{name} <= {edge}", f"{name} > {edge}", all_values <= edge)
        for name, all_values in self.quantities.items():
            for multiple in ROUNDINGS:
                of = f"{name} % {multiple}"
                yield _Rule(name, f"{of} == 0", f"{of} != 0", all_values % multiple == 0)

    def _global(self, inside: Mask, local: Iterable[int]) -> list[int]:
        return [int(number) for number in np.flatnonzero(inside)[list(local)]]

    def _amid(self, numbers: list[int], rule: _Rule) -> tuple[int, ...]:
        """Return two points, a third and two thirds of the way through these, because both are traced at once."""
        ordered = sorted(numbers, key=lambda i: int(self.quantities[rule.quantity][i]))
        return tuple(dict.fromkeys((ordered[len(ordered) // 3], ordered[2 * len(ordered) // 3])))

    def _extremes(self, inside: Mask) -> list[int]:
        """Return the shortest points and the longest, each with the smallest batch and the largest."""
        points = [(i, self.points[i]) for i in np.flatnonzero(inside).tolist()]
        signs = itertools.product((1, -1), repeat=2)
        found = (min(points, key=lambda one: (a * one[1].seq_len, b * one[1].micro_batch)) for a, b in signs)
        return list(dict.fromkeys(i for i, _ in found))

    def _piece(self, leaf: _Leaf) -> SymbolicTrace:
        """Return the leaf as a symbolic trace: its first trace as the template, formulas in place of numbers."""
        assert leaf.formulas is not None
        trace, details = self.traced[leaf.at[0]]
        column = iter(leaf.column)
        rest = _without(details, self.known(self.points[leaf.at[0]]))
        sizes, host = (tuple(itertools.islice(column, len(s.sizes))) for s in (trace, trace.host))
        kernels = tuple((k.kind, next(column), next(column), next(column), count) for k, count in trace.kernels)
        collectives = tuple((call.kind, next(column), count) for call, count in trace.collectives)
        stepwise = tuple((storage, text, next(column)) for storage, text, _ in trace.stepwise)
        paths = tuple(path for path, _ in _whole_numbers(rest))
        same = {n for n, text in enumerate(leaf.formulas) if text.lstrip("-").isdigit()}
        varying = tuple((path, n) for path, n in zip(paths, column, strict=True) if n not in same)
        followed = {storage: following(text, leaf.formulas[n]) for storage, text, n in stepwise}
        more = {text: len(leaf.formulas) + n for n, text in enumerate(dict.fromkeys(followed.values()))}
        return SymbolicTrace(
            template=trace,
            formulas=(*leaf.formulas, *more),
            sizes=tuple(more[followed[s]] if s in followed else n for s, n in enumerate(sizes)),
            host=host,
            kernels=kernels,
            collectives=collectives,
            details=rest,
            varying=varying,
            guards=leaf.guards,
            basis=f"checked at {len(leaf.at)} points",
            stepwise=stepwise,
        )


def _seen(traced: Traced, known: Mapping[str, Any]) -> _Seen:
    trace, details = traced
    if any(key not in details or details[key] != value for key, value in known.items()):
        return _Seen(None, np.zeros(0, np.int64))
    rest = _without(details, known)
    host = trace.host
    kind = repr(
        (
            [(s.events, s.categories, s.marks) for s in (trace, host)],
            (trace.streams, trace.notes, trace.origins, trace.makers, host.pinned),
            [(work.kind, count) for work, count in trace.kernels],
            [(call.kind, count) for call, count in trace.collectives],
            [(storage, text) for storage, text, _ in trace.stepwise],
            _shape(rest),
        )
    )
    sizes = trace.sizes.copy()
    for storage, _, _ in trace.stepwise:  # a size that follows another number is 0; that number has the formula
        sizes[storage] = 0
    numbers = [*sizes, *host.sizes]
    numbers += [number for work, _ in trace.kernels for number in (work.flops, work.nbytes, work.launches)]
    numbers += [call.nbytes for call, _ in trace.collectives]
    numbers += [of for _, _, of in trace.stepwise]
    numbers += [number for _, number in _whole_numbers(rest)]
    return _Seen(hashlib.sha256(kind.encode()).hexdigest(), np.array(numbers, np.int64))


def _without(details: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in details.items() if key not in known}


def _whole_numbers(details: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the whole numbers of nested mappings, with their paths."""
    for key, value in details.items():
        if isinstance(value, Mapping):
            yield from _whole_numbers(value, (*path, key))
        elif type(value) is int:
            yield (*path, key), value


def _shape(value: Any) -> Any:
    """Return the nested value with `int` in place of each whole number."""
    if isinstance(value, Mapping):
        return [(key, _shape(inner)) for key, inner in value.items()]
    return int if type(value) is int else value


def _entropy(kinds: Sequence[Any]) -> float:
    shares = [count / len(kinds) for count in Counter(kinds).values()]
    return -sum(share * math.log2(share) for share in shares)


def _drawn(seed: Any, numbers: list[int], count: int) -> list[int]:
    """Draw `count` of the numbers at random, one from each part of their order; the same seed draws the same."""
    draw = random.Random(hashlib.sha256(repr(seed).encode()).digest())
    edges = [len(numbers) * n // count for n in range(count + 1)]
    return [draw.choice(numbers[a:b]) for a, b in itertools.pairwise(edges)]
