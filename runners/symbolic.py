"""A trace whose sizes are formulas of length and batch: one trace of a configuration for many points.

What does not depend on them is the template's: events, streams, phases, categories, notes. A formula is a text of
Python's integer arithmetic over the names of a point, as "64 * seq_len * micro_batch" or "-(-seq_len // 8) * 16".

Not covered: where the formulas come from (symbolic shapes: shapes.py; a few traced points: pieces.py).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from vramsweep.harness.links import Collective
from vramsweep.harness.roofline import Work, merged
from vramsweep.runners.trace import HostStorages, Trace


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
    "train_batch_size")) and the number of its formula. It is true of the points at which all `guards` hold, which are
    formulas too. `basis` is what a row says of it.
    """

    template: Trace
    formulas: tuple[str, ...]
    sizes: tuple[int, ...]
    host: tuple[int, ...]
    kernels: tuple[tuple[str, int, int, int, int], ...]
    collectives: tuple[tuple[str, int, int], ...]
    details: Mapping[str, Any]
    varying: tuple[tuple[tuple[str, ...], int], ...]
    guards: tuple[str, ...]
    basis: str

    def holds(self, point: Point) -> bool:
        """Whether it is true of this point."""
        return all(compiled(guard)(point) for guard in self.guards)

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
            host=HostStorages(
                [values[n] for n in self.host], host.categories, host.events, host.marks, pinned=host.pinned
            ),
        )
        details = dict(self.details)
        for path, n in self.varying:
            details = _put(details, path, values[n])
        return trace, details

    @cached_property
    def _different(self) -> list[tuple[tuple[str, int, int, int], int]]:
        """The different kernels, each with how often it runs: layers are alike, and many points are asked for."""
        counts: Counter[tuple[str, int, int, int]] = Counter()
        for kind, flops, nbytes, launches, count in self.kernels:
            counts[kind, flops, nbytes, launches] += count
        return list(counts.items())


def difference(one: tuple[Trace, dict[str, Any]], other: tuple[Trace, dict[str, Any]]) -> str | None:
    """What is not the same in two traces with their details; kernels and collectives in whatever order. None: nothing
    is."""
    (trace, details), (other_trace, other_details) = one, other
    for name in (field.name for field in fields(Trace)):
        a, b = getattr(trace, name), getattr(other_trace, name)
        if (merged(a) != merged(b)) if name in ("kernels", "collectives") else (a != b):
            return name
    names = details | other_details
    return next((f"details: {name}" for name in names if details.get(name) != other_details.get(name)), None)


_ALLOWED = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.operator, ast.unaryop)
_GUARDS = (ast.Compare, ast.BoolOp, ast.cmpop, ast.boolop)
_FUNCTIONS: dict[str, Callable[..., int]] = {"max": max, "min": min}


@cache
def compiled(formula: str) -> Callable[[Point], int]:
    """The function that a formula stands for. Raises ValueError for anything else: it may come from a file."""
    tree = ast.parse(formula, mode="eval")
    for node in ast.walk(tree):
        call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        if not (call or isinstance(node, _ALLOWED + _GUARDS)):
            raise ValueError(f"no formula: {formula}")
        if isinstance(node, ast.Name) and node.id not in {*Point._fields, *_FUNCTIONS}:
            raise ValueError(f"no formula: {formula}; {node.id} is no name of a point")
        if isinstance(node, ast.Constant) and type(node.value) is not int:
            raise ValueError(f"no formula: {formula}; {node.value!r} is no whole number")
    code = compile(tree, "<formula>", "eval")
    return lambda point: int(eval(code, {"__builtins__": {}, **_FUNCTIONS}, point._asdict()))


def _put(values: dict[str, Any], path: tuple[str, ...], number: int) -> dict[str, Any]:
    first, *rest = path
    return values | {first: _put(values[first], tuple(rest), number) if rest else number}
