"""A trace whose sizes are formulas of length and batch, so that one trace of a configuration serves many points.

Everything else is the template's: events, streams, phases, categories, notes. A formula is text in Python's integer
arithmetic over the names of a point, as "64 * seq_len * micro_batch" or "-(-seq_len // 8) * 16". Formulas come from
symbolic shapes (symbolic_shapes.py) or from a few traced points (piecewise_templates.py).
"""

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
    """The numbers that sizes depend on; the fields are the names in a formula.

    `kept` is the number of tokens in each sample that are not padding; None if that is not one number, or all of them.
    """

    seq_len: int
    micro_batch: int
    kept: int | None = None


@dataclass(frozen=True)
class SymbolicTrace:
    """A trace with formulas for sizes; `sizes[i]` is storage i's index in `formulas`, `host[i]` that of host storage i.

    `kernels` are (kind, flops, nbytes, launches, runs), `collectives` (kind, nbytes, runs). All but kind and runs are
    indices of formulas. `details` are the columns about what was built. `varying` has each of their whole numbers that
    differs between points: its path, as ("runner_config", "train_batch_size"), and the index of its formula.
    `stepwise` are the trace's, each with the index of the formula of what its size follows. The trace is valid at the
    points at which all `guards` hold, which are formulas too. `basis` is what a row says of it.
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
        """Return whether the trace is valid at this point; it is not if a guard has no value there."""
        try:
            return all(compiled(guard)(point) for guard in self.guards)
        except ValueError:
            return False

    def sizes_at(self, point: Point) -> list[int]:
        """Return only the sizes of the storages in GPU memory at this point, in bytes."""
        values = [compiled(formula)(point) for formula in self.formulas]
        return [values[n] for n in self.sizes]

    def at(self, point: Point) -> tuple[Trace, dict[str, Any]]:
        """Return the trace and the details at this point. Events, marks and notes are the template's own lists."""
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
        """Count the runs of each different kernel once, because layers are alike and `at` is called for many points."""
        counts: Counter[tuple[str, int, int, int]] = Counter()
        for kind, flops, nbytes, launches, count in self.kernels:
            counts[kind, flops, nbytes, launches] += count
        return list(counts.items())


def plain(one: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and of dataclasses in it, by name; unlike asdict it copies no values."""
    named = {each.name: getattr(one, each.name) for each in fields(one)}
    return {name: plain(value) if is_dataclass(value) else value for name, value in named.items()}


def difference(one: tuple[Trace, dict[str, Any]], other: tuple[Trace, dict[str, Any]]) -> str | None:
    """Return the name of what differs between two traces with their details, or None if nothing does.

    Kernels and collectives may be in any order."""
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
LONGEST = 20_000  # characters of a formula, which bounds its nesting and its numbers too
Function = Callable[[Sequence[Any]], Any]  # takes values of a point's fields


@cache
def compiled(formula: str) -> Callable[[Point], int]:
    """Return a formula's function, which raises ValueError where it has no value.

    Raises ValueError if the text is no formula, because it may come from a file."""
    value = function(formula)

    def at(point: Point) -> int:
        try:
            return int(value(point))
        except (ArithmeticError, TypeError, RecursionError) as error:  # by 0; a number the point lacks; depth
            raise ValueError(f"{shorten(formula)} has no value at {tuple(point)}: {error}") from None

    return at


@cache
def function(formula: str) -> Function:
    """Return a formula's function of anything in place of a point's numbers, such as a column of each.

    The text is parsed, not run as code; what it may contain is listed above. Raises ValueError for anything else."""
    if len(formula) > LONGEST:
        raise ValueError(f"no formula: {shorten(formula)} has {len(formula):,} characters; allowed are {LONGEST:,}")
    try:
        return _made(ast.parse(formula, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise ValueError(f"no formula: {shorten(formula)}; {shorten(str(error))}") from None


def columns(formula: str, points: Sequence[Point]) -> npt.NDArray[np.object_]:
    """Return a formula's exact value at each point, shape (points,). Raises ValueError where it has no value."""
    given = [np.array([point[n] for point in points], dtype=object) for n in range(len(Point._fields))]
    try:
        return np.full(len(points), function(formula)(given), dtype=object)
    except (ArithmeticError, TypeError, ValueError):  # max of columns, a number that points lack
        return np.array([compiled(formula)(point) for point in points], dtype=object)


def following(text: str, formula: str) -> str:
    """Return the formula of a size that follows a number: `text`, with that number's formula in place of {}.

    Raises ValueError if it would be longer than a formula may be."""
    if len(text) + text.count("{}") * len(formula) > LONGEST:
        raise ValueError(f"no formula: {shorten(text)} would have more than {LONGEST:,} characters")
    return text.replace("{}", formula if formula.isidentifier() or formula.isdigit() else f"({formula})")


def shorten(text: str) -> str:
    """Return the beginning of a text from any source, on one line."""
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
    raise ValueError(f"a {type(node).__name__} is not allowed")


def _between(act: Callable[[Any, Any], Any], left: ast.expr, right: ast.expr) -> Function:
    """Return a binary operator's function; a constant on one side, which most have, takes no call."""
    if isinstance(left, ast.Constant) and type(left.value) is int:
        number, of = left.value, _made(right)
        return lambda point: act(number, of(point))
    if isinstance(right, ast.Constant) and type(right.value) is int:
        number, of = right.value, _made(left)
        return lambda point: act(of(point), number)
    one, other = _made(left), _made(right)
    return lambda point: act(one(point), other(point))


def put(values: Mapping[str, Any], path: tuple[str, ...], number: int) -> dict[str, Any]:
    """Return the values with another number at the end of the path.

    Raises KeyError, TypeError or ValueError if the path leads nowhere."""
    first, *rest = path
    return {**values, first: put(values[first], tuple(rest), number) if rest else number}
