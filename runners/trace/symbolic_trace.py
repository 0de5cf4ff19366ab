"""A trace whose sizes are formulas of length and batch: one trace of a configuration for many points.

What does not depend on them is the template's: events, streams, phases, categories, notes. A formula is a text of
Python's integer arithmetic over the names of a point, as "64 * seq_len * micro_batch" or "-(-seq_len // 8) * 16".

Not covered: where the formulas come from (symbolic shapes: symbolic_shapes.py; a few traced points:
piecewise_templates.py).
"""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vramsweep.harness.hardware.interconnects import Collective
from vramsweep.harness.hardware.roofline import Work, merge_work
from vramsweep.runners.trace.trace_data import AS_WRITTEN, HostStorages, Number, Trace


class Point(NamedTuple):
    """What sizes are functions of; the fields are the names in a formula.

    `kept` is how many tokens of each sample are not padding; None where that is not one number, or all of them.
    """

    seq_len: int
    micro_batch: int
    kept: int | None = None


@dataclass(frozen=True)
class SymbolicTrace:
    """`sizes[i]` is the number of storage i's formula in `formulas`, `host[i]` that of the host's storage i.

    `kernels` are (kind, flops, nbytes, launches, how often), `collectives` (kind, nbytes, how often), each with the
    numbers of formulas in place of numbers. `details` are the columns about what was built; `varying` gives, for those
    of their whole numbers that are not the same at every point, the path to it (as ("runner_config",
    "train_batch_size")) and the number of its formula; `stepwise` are the trace's, each with the number of the formula
    of what its size follows. It is true of the points at which all `guards` hold, which are
    formulas too. `basis` is what a row says of it.
    """

    __pydantic_config__ = AS_WRITTEN
    template: Trace
    formulas: tuple[str, ...]
    sizes: tuple[Number, ...]
    host: tuple[Number, ...]
    kernels: tuple[tuple[str, Number, Number, Number, Number], ...]
    collectives: tuple[tuple[str, Number, Number], ...]
    details: Mapping[str, Any]
    varying: tuple[tuple[tuple[str, ...], Number], ...]
    guards: tuple[str, ...]
    basis: str
    stepwise: tuple[tuple[Number, str, Number], ...] = ()

    def holds(self, point: Point) -> bool:
        """Whether it is true of this point; it is not where a guard has no value."""
        try:
            return all(compiled(guard)(point) for guard in self.guards)
        except ValueError:
            return False

    def sizes_at(self, point: Point) -> list[int]:
        """The sizes of the storages alone."""
        values = [compiled(formula)(point) for formula in self.formulas]
        return [values[n] for n in self.sizes]

    def at(self, point: Point) -> tuple[Trace, dict[str, Any]]:
        """The trace and the details at this point. Events, marks and notes are the template's own lists."""
        values = [compiled(formula)(point) for formula in self.formulas]
        works = [(Work(kind, values[f], values[b], values[n]), count) for (kind, f, b, n), count in self._different]
        host = self.template.host
        trace = replace(
            self.template,
            sizes=[values[n] for n in self.sizes],
            kernels=works,
            collectives=[(Collective(kind, values[b]), count) for kind, b, count in self.collectives],
            stepwise=[(storage, text, values[n]) for storage, text, n in self.stepwise],
            host=HostStorages(
                [values[n] for n in self.host], host.categories, host.events, host.marks, pinned=host.pinned
            ),
        )
        details = dict(self.details)
        for path, n in self.varying:
            details = put(details, path, values[n])
        return trace, details

    @cached_property
    def _different(self) -> list[tuple[tuple[str, int, int, int], int]]:
        """The different kernels, each with how often it runs: layers are alike, and many points are asked for."""
        counts: Counter[tuple[str, int, int, int]] = Counter()
        for kind, flops, nbytes, launches, count in self.kernels:
            counts[kind, flops, nbytes, launches] += count
        return list(counts.items())


def plain(one: Any) -> dict[str, Any]:
    """The fields of a dataclass, and of those in it, by name: unlike asdict it copies no values."""
    named = {each.name: getattr(one, each.name) for each in fields(one)}
    return {name: plain(value) if is_dataclass(value) else value for name, value in named.items()}


def difference(one: tuple[Trace, dict[str, Any]], other: tuple[Trace, dict[str, Any]]) -> str | None:
    """What is not the same in two traces with their details; kernels and collectives in whatever order. None: nothing
    is."""
    (trace, details), (other_trace, other_details) = one, other
    for name in (field.name for field in fields(Trace)):
        a, b = getattr(trace, name), getattr(other_trace, name)
        if (merge_work(a) != merge_work(b)) if name in ("kernels", "collectives") else (a != b):
            return name
    names = details | other_details
    return next((f"details: {name}" for name in names if details.get(name) != other_details.get(name)), None)


_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.Not: operator.not_}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"max": max, "min": min}
LONGEST = 20_000  # characters of a formula; how deep it can be nested and how large its numbers get follow from it
Function = Callable[[Sequence[Any]], Any]  # of what the fields of a point are


@cache
def compiled(formula: str) -> Callable[[Point], int]:
    """The function that a formula stands for. Raises ValueError for anything else, since it may come from a file; the
    function does so where it has no value."""
    value = function(formula)

    def at(point: Point) -> int:
        try:
            return int(value(point))
        except (ArithmeticError, TypeError, RecursionError) as error:  # by 0; a number that the point lacks; depth
            raise ValueError(f"{shorten(formula)} has no value at {tuple(point)}: {error}") from None

    return at


@cache
def function(formula: str) -> Function:
    """The same of anything in the place of a point's numbers, as of a column of each. No code is made of the text: it
    is taken apart, and what it may say is listed above. Raises ValueError."""
    if len(formula) > LONGEST:
        raise ValueError(f"no formula: {shorten(formula)} has {len(formula):,} characters, more than {LONGEST:,}")
    try:
        return _made(ast.parse(formula, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"no formula: {shorten(formula)}; {shorten(str(error))}") from None


def columns(formula: str, points: Sequence[Point]) -> npt.NDArray[np.object_]:
    """What a formula is at each of the points, exact. Raises ValueError where it has no value."""
    given = [np.array([point[n] for point in points], dtype=object) for n in range(len(Point._fields))]
    try:
        return np.full(len(points), function(formula)(given), dtype=object)
    except (ArithmeticError, TypeError, ValueError):  # max of columns, a number that points lack
        return np.array([compiled(formula)(point) for point in points], dtype=object)


def following(text: str, formula: str) -> str:
    """The formula of a size that follows a number, with that number's formula in the place of {}. Raises ValueError
    where it would be longer than a formula may be."""
    if len(text) + text.count("{}") * len(formula) > LONGEST:
        raise ValueError(f"no formula: {shorten(text)} would have more than {LONGEST:,} characters")
    return text.replace("{}", formula if formula.isidentifier() or formula.isdigit() else f"({formula})")


def shorten(text: str) -> str:
    """The beginning of a text from anywhere, on one line."""
    return repr(text[:200])[1:-1]


def _made(node: ast.expr) -> Function:
    match node:
        case ast.Constant(value) if type(value) is int:
            return lambda point: value
        case ast.Name(name):
            return operator.itemgetter(Point._fields.index(name))
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) is int:
            return lambda point: -value
        case ast.UnaryOp(kind, inner) if type(kind) in _UNARY:
            negate, of = _UNARY[type(kind)], _made(inner)
            return lambda point: negate(of(point))
        case ast.BinOp(left, kind, right) | ast.Compare(left, [kind], [right]) if type(kind) in _OPERATORS:
            return _between(_OPERATORS[type(kind)], left, right)
        case ast.BoolOp(kind, parts):
            join, each = all if isinstance(kind, ast.And) else any, [_made(part) for part in parts]
            return lambda point: join(part(point) for part in each)
        case ast.Call(ast.Name(name), [_, *_] as parts, []) if name in _FUNCTIONS:
            call, arguments = _FUNCTIONS[name], [_made(part) for part in parts]
            return lambda point: call([part(point) for part in arguments])
    raise ValueError(f"a {type(node).__name__} is no part of one")


def _between(act: Callable[[Any, Any], Any], left: ast.expr, right: ast.expr) -> Function:
    """With a constant on one side, which most have, without a call for it."""
    if isinstance(left, ast.Constant) and type(left.value) is int:
        number, of = left.value, _made(right)
        return lambda point: act(number, of(point))
    if isinstance(right, ast.Constant) and type(right.value) is int:
        number, of = right.value, _made(left)
        return lambda point: act(of(point), number)
    one, other = _made(left), _made(right)
    return lambda point: act(one(point), other(point))


def put(values: Mapping[str, Any], path: tuple[str, ...], number: int) -> dict[str, Any]:
    """The values with another number at the end of the path. Raises KeyError, TypeError or ValueError where it leads
    nowhere."""
    first, *rest = path
    return {**values, first: put(values[first], tuple(rest), number) if rest else number}
