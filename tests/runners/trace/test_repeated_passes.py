"""Accumulated passes that are noted again give the trace that running every one of them gives."""

import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny
from traces import A100, SIMULATED

from vramsweep.harness.spec import runner_table, trial_parser
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import make_trace
from vramsweep.runners.rank.entry_modules import import_entry
from vramsweep.runners.symbolic import symbolic_shapes
from vramsweep.runners.symbolic.symbolic_candidate import Candidate, verified
from vramsweep.runners.trace.repeated_passes import RepeatedPasses
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic


def trial(**over: Any) -> Trial:
    return trial_parser.parse(tiny(**({"device": SIMULATED, "grad_accum": 5} | over)))


def traced(asked: Trial, folder: Path, monkeypatch: pytest.MonkeyPatch, every: bool) -> tuple[Trace, Any, int]:
    """The trace, its details, and how many passes ran."""
    ran = itertools.count()

    def run(self: RepeatedPasses, one: Callable[[], torch.Tensor]) -> torch.Tensor:
        def counted() -> torch.Tensor:
            next(ran)
            return one()

        return counted() if every else original(self, counted)

    original = RepeatedPasses.run
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedPasses, "run", run)
        trace, details = make_trace.trace_trial(asked, A100, folder)
    return trace, details, next(ran)


LORA = {"adapter": "lora", "lora_r": 8}
TRAINER = {"runner": {"name": "trainer"}}
EMPTIED = {"runner": {"name": "trainer", "options": {"torch_empty_cache_steps": 2}}}


@pytest.mark.parametrize(
    ("over", "ran"),
    [
        ({}, 8),
        ({"grad_accum": 2}, 0),
        ({"grad_accum": 3}, 7),
        ({"grad_accum": 16}, 8),
        ({"precision": "fp16"}, 8),
        ({"checkpointing": "full"}, 8),
        pytest.param(LORA, 8, marks=pytest.mark.slow),
        pytest.param(LORA | {"checkpointing": "full"}, 8, marks=pytest.mark.slow),
        pytest.param(LORA | {"checkpointing": "full"} | TRAINER, 8, marks=pytest.mark.slow),
        pytest.param(TRAINER, 8, marks=pytest.mark.slow),
        pytest.param(TRAINER | {"precision": "bf16", "checkpointing": "full"}, 8, marks=pytest.mark.slow),
        pytest.param({"activation_offload": True}, 8, marks=pytest.mark.slow),
        pytest.param(LORA | {"quantization": "nf4", "precision": "bf16"}, 8, marks=pytest.mark.slow),
        pytest.param(EMPTIED, 8, marks=pytest.mark.slow),
        pytest.param({"sharding": "ddp", "world_size": 2}, 10, marks=pytest.mark.slow),
        pytest.param({"sharding": "ddp", "world_size": 2, "no_sync": False}, 11, marks=pytest.mark.slow),
        pytest.param({"sharding": "fsdp2", "world_size": 2}, 10, marks=pytest.mark.slow),
        pytest.param({"sharding": "fsdp1", "world_size": 2}, 15, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_the_trace_is_that_of_every_pass(
    over: dict[str, Any], ran: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = trial(**over)
    direct, details, passes = traced(asked, tmp_path / "all", monkeypatch, every=True)
    found, same, fewer = traced(asked, tmp_path / "few", monkeypatch, every=False)
    assert passes in (0, 3 * asked.grad_accum) and fewer == ran
    assert same == details
    for name, value in asdict(direct).items():
        assert asdict(found)[name] == value, name


@pytest.mark.slow
def test_passes_that_differ_in_kernels_alone_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in two has an operator that works in place: what it asks for and frees is what the others do."""
    original = make_trace.TraceMeter.run_pass

    def scaled(self: make_trace.TraceMeter, one: Callable[[], torch.Tensor]) -> torch.Tensor:
        def run() -> torch.Tensor:
            loss = one()
            if next(number) % 2:
                loss.detach().mul_(1.0)
            return loss

        return original(self, run)

    monkeypatch.setattr(make_trace.TraceMeter, "run_pass", scaled)
    found = []
    for every in (True, False):
        number = itertools.count()
        found.append(traced(trial(), tmp_path / str(every), monkeypatch, every))
    assert found[1] == found[0]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["torch", "trainer"])
def test_a_symbolic_trace_has_them_too(runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is confirmed by direct traces of every pass."""
    points = {
        Point(length, 3): traced(
            trial(runner={"name": runner}, seq_len=length, micro_batch=3),
            tmp_path / str(length),
            monkeypatch,
            every=True,
        )[:2]
        for length in (24, 40)
    }
    asked = trial(runner={"name": runner}, seq_len=24, micro_batch=3)
    found = symbolic_shapes.trace(asked, A100, tmp_path / "symbols", import_entry(runner_table.module(asked)))
    assert isinstance(found, Candidate), found
    assert isinstance(verified(found, points), SymbolicTrace)
