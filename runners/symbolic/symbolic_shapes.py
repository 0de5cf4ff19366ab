"""A trace by symbolic shapes: the runner's own code, run once on batches whose length and size are symbols.

Sizes come out as expressions of the two. Every branch that the code takes on a size becomes a guard; where all guards
hold, the code takes the same branches. No guard notices when code uses a plain number of the trial instead of a
tensor's size. So a symbolic trace is only a `Candidate` until `verified` has compared it with direct traces of other
points. It must equal them event for event and size for size. symbolic_trace.py evaluates the formulas.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import sympy
import torch
import torch._refs
from torch._dynamo.source import ConstantSource
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only
from torch.utils._sympy import functions
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils.data.dataloader import _BaseDataLoaderIter

from vramsweep.harness.hardware.gpu_lookup import Gpu
from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.runner_table import TARGETED
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.model import build
from vramsweep.runners.predict import make_trace
from vramsweep.runners.rank import process_end
from vramsweep.runners.symbolic.symbolic_candidate import Candidate, Refused
from vramsweep.runners.trace.alike_layers import Layered, find_layers
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.storage_log import MemoryLog, hint
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace, compiled
from vramsweep.runners.trace.trace_data import Trace

LARGEST = 1 << 24  # most of a length or batch, so that every size is certainly below 2**63
# Columns that are multiples of the batch. Runners pass it to libraries that take only plain numbers, so no symbol.
BATCHES = ("train_micro_batch_size_per_gpu", "train_batch_size", "per_device_train_batch_size")


def trace(trial: Trial, card: Gpu, folder: Path, runner: make_trace.Runner) -> Candidate | Refused:
    """Trace the trial with symbols in place of its length and batch; a 1 stays a plain 1.

    It leaves the process as a direct trace does: DeepSpeed needs a process of its own.
    """
    synthetic = trial.data == "synthetic" or length_distribution.has_varying_lengths(trial)
    if not synthetic or trial.padding:
        return Refused("the padding of a batch has no formula")
    try:
        found = _trace_few(trial, card, folder, runner)
        if found is not None:
            return found
        symbols = _Symbols(trial)
        tracer, details = _trace_whole(trial, card, folder, runner, symbols)
        collected = (tuple(sorted(book.collected)) for book in tracer.books)
        return Candidate(symbols.symbolic(tracer.trace, details), *collected)
    except Exception as error:  # any kind: a direct trace succeeds where this failed, or reports it better
        if process_end.may_pass(error):  # a transient failure must not be cached
            raise
        first = str(error).strip().partition("\n")[0]
        return Refused(first if isinstance(error, NotSerializable) else f"{type(error).__name__}: {first}")


def _trace_few(trial: Trial, card: Gpu, folder: Path, runner: make_trace.Runner) -> Candidate | None:
    """Trace a model of alike layers from few of them. Return None if layers differ or one more layer adds guards."""
    symbols, traced = _Symbols(trial), list[tuple[Tracer, int]]()

    def trace(few: Trial) -> Layered:
        tracer, details = _trace_whole(few, card, folder, runner, symbols)
        traced.append((tracer, len(symbols.env.guards)))
        return find_layers(tracer, details)

    found = make_trace.trace_alike(trial, trace)
    if found is None or len({guards for _, guards in traced}) > 1:
        return None
    pairs = zip(found.was, traced[0][0].books, strict=True)
    collected = (tuple(number for number, old in enumerate(was) if old in book.collected) for was, book in pairs)
    return Candidate(symbols.symbolic(found.trace, found.details), *collected)


def _trace_whole(
    trial: Trial, card: Gpu, folder: Path, runner: make_trace.Runner, symbols: _Symbols
) -> tuple[Tracer, dict[str, Any]]:
    tracer = Tracer(card.capability, symbols.fake)
    with _collections(tracer.books), _inputs(trial, symbols):
        given = symbols.put_in(trial)  # which the runner runs in place of the trial
        asked = SimpleNamespace(run=lambda _, *others: runner.run(given, *others))
        _, details = make_trace.trace_trial(trial, card, folder, cast(make_trace.Runner, asked), tracer)
    return tracer, details


class NotSerializable(Exception):
    """A size or guard that no formula expresses."""


class _Symbols:
    """The symbols of length and batch, each unless it is 1, and the symbolic trace made with them."""

    def __init__(self, trial: Trial) -> None:
        self.env = ShapeEnv(
            duck_shape=False, specialize_zero_one=True, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )
        self.fake = _Fake(shape_env=self.env, static_shapes=True, allow_non_fake_inputs=True)
        self._trial, self._point = trial, Point(trial.seq_len, trial.micro_batch)
        self._hints = {"seq_len": trial.seq_len, "micro_batch": trial.micro_batch}
        self._names: dict[sympy.Symbol, str] = {}
        self._values = [self._symbol(name, value) for name, value in self._hints.items()]

    def _symbol(self, name: str, value: int) -> Any:
        if value == 1:
            return 1
        source = ConstantSource(name)
        symbol: Any = self.env.create_symbol(value, source, DimDynamic.DYNAMIC, constraint_dim=None)
        self.env.var_to_range[symbol] = ValueRanges(2, LARGEST)  # the guards state this range
        self._names[symbol] = name
        return self.env.create_symintnode(symbol, hint=value, source=source)

    def put_in(self, trial: Trial) -> Trial:
        """Return the trial as a target gets it: a number that the target computes from it becomes a formula too."""
        given = self._values if self._trial.runner.name in TARGETED else [self._values[0], self._trial.micro_batch]
        return trial.model_copy(update=dict(zip(self._hints, given, strict=True)))

    def batch(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of shape (micro_batch, seq_len) on the host."""
        length, samples = self._values
        with _disable_current_modes(), self.fake:
            made = torch.empty_strided((samples, length), (length, 1), dtype=dtype)
        made.copied = lambda: None  # type: ignore[attr-defined]
        return made

    def symbolic(self, traced: Trace, details: Mapping[str, Any]) -> SymbolicTrace:
        """Return the trace with formulas. Raises NotSerializable if a size or guard has none."""
        if self.env.replacements or self.env.deferred_runtime_asserts:
            raise NotSerializable("the code uses a length or batch as a plain number, so formulas are impossible")
        formulas: dict[str, int] = {}
        texts: dict[Any, str] = {}

        def number(value: Any) -> int:
            expression = value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
            if expression not in texts:
                texts[expression] = self._checked(sympy.expand(expression), value)
            return formulas.setdefault(texts[expression], len(formulas))

        sizes, host = tuple(map(number, traced.sizes)), tuple(map(number, traced.host.sizes))
        kernels = tuple(
            (work.kind, number(work.flops), number(work.nbytes), number(work.launches), count)
            for work, count in traced.kernels
        )
        collectives = tuple((called.kind, number(called.nbytes), count) for called, count in traced.collectives)
        stepwise = tuple((storage, text, number(of)) for storage, text, of in traced.stepwise)
        given = details.get("runner_config") or {}
        batches = [(name, self._of_batch(given[name])) for name in BATCHES if name in given]
        varying = tuple((("runner_config", name), number(value)) for name, value in batches)
        return SymbolicTrace(
            replace(traced, sizes=[], kernels=[], collectives=[], stepwise=[], host=replace(traced.host, sizes=[])),
            tuple(formulas), sizes, host, kernels, collectives, details, varying, self._guards(), "unconfirmed",
            stepwise,
        )  # fmt: skip

    def _of_batch(self, value: int) -> Any:
        times, rest = divmod(value, self._point.micro_batch)
        return value if rest else times * self._values[1]

    def _checked(self, expression: Any, value: Any) -> str:
        text = written(expression, self._names)
        if compiled(text)(self._point) != hint(value):
            raise NotSerializable(f"{expression} is not {text}")
        return text

    def _guards(self) -> tuple[str, ...]:
        texts = []
        for name, value in self._hints.items():
            texts += [f"{name} == 1"] if value == 1 else [f"{name} >= 2", f"{name} <= {LARGEST}"]
        if self._trial.packing == "documents":  # their number is a plain value, from the trial's own samples
            documents = f"-(-seq_len // -(-seq_len // {build.DOCUMENTS}))"
            texts.append(f"{documents} == {compiled(documents)(self._point)}")
        for guard in self.env.guards:
            if isinstance(guard.expr, sympy.Eq) and not guard.expr.has(functions.Mod, functions.FloorDiv):
                raise NotSerializable(f"the code uses a size as a plain number: {written(guard.expr, self._names)}")
            texts.append(self._checked(guard.expr, True))
        return tuple(dict.fromkeys(texts))


class _Fake(FakeTensorMode):
    """The fake mode of a symbolic trace. In a direct trace a batch on the host is a real tensor, so here each operator
    gets its own fake copy of it. While a view of an earlier copy lives, operators share that copy's memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._copied, (args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if not hasattr(tensor, "copied"):
            return tensor
        storage = tensor.copied()
        with self, mock.patch.object(self, "cache_enabled", False):  # it would keep the storage
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            if storage is not None:
                copy.set_(storage, 0, tensor.shape, tensor.stride())
        tensor.copied = weakref.ref(copy.untyped_storage())
        return copy


def _inputs(trial: Trial, symbols: _Symbols) -> contextlib.AbstractContextManager[None]:
    """Return a context in which batches are symbolic and operators do not require plain numbers."""
    data, load = build.data, _BaseDataLoaderIter.__next__

    def batch(self: build.Data, index: int, size: int) -> dict[str, torch.Tensor]:
        rows = {key: symbols.batch(value.dtype) for key, value in self.samples[0].items()}
        return {key: torch.stack([value])[0] for key, value in rows.items()}  # stacked, as real samples are

    def loaded(self: Any) -> Any:
        return {key: symbols.batch(value.dtype) for key, value in load(self).items()}

    def padded(fake: Any, func: Any, tensor: torch.Tensor, pad: list[int], value: float = 0) -> torch.Tensor:
        with fake:
            return torch._refs.constant_pad_nd(tensor, pad, value)

    replaced: list[Replacement] = [(build, "data", lambda asked: data(trial))]
    if trial.runner.name == "trainer":
        from transformers import Trainer  # takes a second, and other runners do not need it

        replaced += [(_BaseDataLoaderIter, "__next__", loaded)]
        replaced += [(Trainer, "floating_point_ops", lambda self, inputs: 0)]  # a number for its log
    else:
        replaced += [(build.Data, "batch", batch)]
    return patched([*replaced, (fake_impls.op_implementations_dict, torch.ops.aten.constant_pad_nd.default, padded)])


@contextlib.contextmanager
def _collections(books: Sequence[MemoryLog]) -> Iterator[None]:
    """Record which storages the garbage collector frees, on the GPU and on the host."""
    starts: dict[int, int] = {}

    def collects(phase: str, info: Any) -> None:
        for at, book in enumerate(books):
            if phase == "start":
                starts[at] = len(book.kept.events)
            else:
                book.collected.update(-event - 1 for event in book.kept.events[starts.get(at, 0) :] if event < 0)

    gc.callbacks.append(collects)
    try:
        yield
    finally:
        gc.callbacks.remove(collects)


_BETWEEN = {
    sympy.Add: " + ", sympy.Mul: " * ", sympy.And: " and ", sympy.Or: " or ", sympy.Mod: " % ",
    functions.FloorDiv: " // ", functions.CleanDiv: " // ", functions.Mod: " % ", functions.PythonMod: " % ",
    sympy.Eq: " == ", sympy.Ne: " != ", sympy.Lt: " < ", sympy.Le: " <= ", sympy.Gt: " > ", sympy.Ge: " >= ",
}  # fmt: skip
_CALLED = {functions.Max: "max", functions.Min: "min", sympy.Max: "max", sympy.Min: "min"}


def written(expression: Any, names: Mapping[Any, str]) -> str:
    """Return the formula text of an expression (symbolic_trace.py). Raises NotSerializable if there is none."""
    if isinstance(expression, sympy.Integer):
        return str(int(expression))
    if expression in names:
        return names[expression]
    if isinstance(expression, functions.CeilToInt | functions.FloorToInt):
        (quotient,) = expression.args  # of math.ceil or math.floor: a true division, else nothing expresses it
        if not isinstance(quotient, functions.IntTrueDiv):
            raise NotSerializable(f"no formula expresses {expression}")
        over, by = quotient.args
        down = isinstance(expression, functions.FloorToInt)
        return written(functions.FloorDiv(over, by) if down else -functions.FloorDiv(-over, by), names)
    kind, parts = type(expression), [written(part, names) for part in expression.args]
    if kind in _CALLED:
        return f"{_CALLED[kind]}({', '.join(parts)})"
    parts = [part if part.isidentifier() or part.isdigit() else f"({part})" for part in parts]
    if kind is sympy.Pow and parts[1].isdigit():
        return " * ".join([parts[0]] * int(parts[1]))
    if kind is sympy.Not:
        return f"not {parts[0]}"
    if kind in _BETWEEN:
        return _BETWEEN[kind].join(parts)
    raise NotSerializable(f"no formula expresses {expression}")
