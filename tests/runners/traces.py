"""Helpers of the tests of traces: a trial's trace, made in this process, and counts of its contents."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from conftest import ROOT, Run, merged, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from vramsweep.harness.allocator.config import AllocatorConfig, parse
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.roofline import Work
from vramsweep.harness.machine import machine
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import runner_table, trial_parser
from vramsweep.runners.predict import make_trace
from vramsweep.runners.predict.replay_trace import Prediction, replay
from vramsweep.runners.rank.entry_modules import import_entry
from vramsweep.runners.trace.operator_cost import work
from vramsweep.runners.trace.trace_data import Trace

A100 = gpu_lookup.gpu_named("a100-80gb")
SIMULATED: dict[str, Any] = {"name": "simulated", "gpu": "a100-80gb"}


def gpt2() -> dict[str, Any]:
    """GPT-2 with dropout, Conv1D layers and little else."""
    model: dict[str, Any] = yaml.safe_load((ROOT / "conf/model/gpt2.yaml").read_text())
    model["config"] |= {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512}
    return model


def small(**over: Any) -> dict[str, Any]:
    """The tiny trial, simulated, of two steps, and of one layer where nothing happens between layers."""
    layers = 2 if {"sharding", "checkpointing"} & over.keys() else 1
    base = {"model": {"config": {"num_hidden_layers": layers}}, "protocol": {"measured_steps": 1}}
    return tiny(**merged({"device": SIMULATED} | base, over))


def trace_trial(values: dict[str, Any], folder: Path) -> tuple[Trace, dict[str, Any]]:
    """The trace for the trial's own card, and its details."""
    chosen = trial_parser.parse(values)
    runner = import_entry(runner_table.runner(chosen.runner.name).module)
    return make_trace.trace_trial(chosen, chosen.device.card, folder, runner)


def trace_tiny(folder: Path, **over: Any) -> tuple[Trace, dict[str, Any]]:
    return trace_trial(tiny(**{"device": SIMULATED} | over), folder)


def traced(folder: Path, **over: Any) -> Trace:
    return trace_tiny(folder, **over)[0]


@cache
def _traced_once(settings: str) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        return traced(Path(folder), **json.loads(settings))


def traced_once(**over: Any) -> Trace:
    """A trace that tests read and do not change, made once in this process."""
    return _traced_once(json.dumps(over))


def predicted(values: dict[str, Any], folder: Path) -> tuple[Trace, Prediction]:
    found, _ = trace_trial(values, folder)
    return found, replay(found, AllocatorConfig(), None)


def total(trace: Trace, category: str) -> int:
    """Bytes of all storages that there ever were of a category."""
    return sum(size for size, name in zip(trace.sizes, trace.categories, strict=True) if name == category)


def alive(events: Iterable[int]) -> set[int]:
    """The storages (their indices) that these events make and do not free."""
    found: set[int] = set()
    for event in events:
        found.add(event - 1) if event > 0 else found.discard(-event - 1)
    return found


def kept(trace: Trace, category: str) -> int:
    """Bytes of a category that are there when the last step ends."""
    left = alive(trace.events[: trace.marks[-1].end])
    return sum(trace.sizes[n] for n in left if trace.categories[n] == category)


def left_by_forward(trace: Trace) -> int:
    """Bytes that the last forward pass made and left behind."""
    number = max(n for n, mark in enumerate(trace.marks) if mark.phase == "forward")
    left = alive(trace.events[trace.marks[number - 1].end : trace.marks[number].end])
    return sum(trace.sizes[n] for n in left)


def most_held(trace: Trace) -> Counter[str]:
    """The most bytes of each category at any moment."""
    held, most = Counter[str](), Counter[str]()
    for event in filter(None, trace.events):
        held[trace.categories[abs(event) - 1]] += trace.sizes[abs(event) - 1] * (1 if event > 0 else -1)
        most |= held
    return most


def signed(trace: Trace, first: int = 0, last: int | None = None) -> list[int]:
    """Sizes asked for, and given back (negative), in order."""
    return [trace.sizes[abs(event) - 1] * (1 if event > 0 else -1) for event in trace.events[first:last] if event]


def peak(trace: Trace, conf: str = "") -> dict[str, int]:
    """The peaks of a replay on a GPU of any size."""
    return replay(trace, parse(conf), None).peak


def sizes(trace: Trace) -> list[tuple[int, bool]]:
    """The bytes of each allocation and each free, in order; a scalar's are left out."""
    return [(abs(size), size > 0) for size in signed(trace) if abs(size) > 8]


class Unpredicted(Row):
    """The row in place of a prediction for a GPU that is not in our table: a test that compares with it is skipped."""

    def __missing__(self, column: str) -> NoReturn:
        pytest.skip(f"{column} is not compared with a prediction: this GPU is not in the table")


def on_this_gpu(
    run_sweep: Run, *values: dict[str, Any], may_be_refused: bool = False, **settings: Any
) -> list[tuple[Row, Row]]:
    """Each trial's row as measured on this machine's GPU, and as predicted for it; all are ok.

    Where a package `may_be_refused` on a GPU, a trial that is invalid when it is measured skips the test.
    """
    gpu = gpu_lookup.find_gpu(str(machine.gpus()[0].name))
    known: list[dict[str, Any]] = [{"name": "simulated", "gpu": gpu.name}] if gpu else []
    rows: list[list[Row]] = []
    for device in [{"name": "cuda"}, *known]:
        rows.append(run_sweep(*(one | {"device": device} for one in values), **settings))
        reasons = {row["outcome"]: row["reason"] for row in rows[-1]}
        if may_be_refused and device["name"] == "cuda" and "invalid" in reasons:
            pytest.skip(reasons["invalid"])
        assert set(reasons) == {"ok"}, reasons
    return list(zip(rows[0], rows[1] if known else [Unpredicted() for _ in values], strict=True))


class Works(TorchDispatchMode):
    """Records the work of each operator, with its name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Work]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (asked := work(func, args, kwargs or {}, out, A100.capability)) is not None:
            self.seen.append((func._schema.name.removeprefix("aten::"), asked))
        return out
