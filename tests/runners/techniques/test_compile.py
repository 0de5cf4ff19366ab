"""torch.compile: real steps on a CPU, compiled once, and rows that say what was compiled and what could not be seen."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Run, merged, tiny

from vramsweep.harness.spec import trial_parser
from vramsweep.runners.measure import rank_instruments, step_meter
from vramsweep.runners.measure.compile_events import Compiler
from vramsweep.runners.measure.flop_step import COUNTED_EAGERLY

COMPILED = {"compile": "default"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_steps(run_sweep: Run) -> None:
    short = {"seq_len": 32, "model": {"config": {"num_hidden_layers": 1}}}
    ways: dict[str, dict[str, Any]] = {
        "torch": {},
        "trainer": {"runner": {"name": "trainer"}},
        "recomputed": {"checkpointing": "full"},
        "chunked": {"loss": "chunked"},
    }
    trials = [tiny(**merged(short, {**way, **over})) for way in ways.values() for over in ({}, COMPILED)]
    rows = run_sweep(*trials, timeout_s=400)
    for name, eager, compiled in zip(ways, rows[::2], rows[1::2], strict=True):
        assert eager["outcome"] == compiled["outcome"] == "ok", (name, eager["reason"], compiled["reason"])
        assert compiled["loss_first"] == pytest.approx(eager["loss_first"], rel=1e-5), name
        assert compiled["loss_last"] == pytest.approx(eager["loss_last"], rel=1e-4), name
        assert eager["compile_s"] is None and eager["notes"] is None
        (first, *_) = compiled["warmup_step_times_s"]
        assert 0.5 < compiled["compile_s"] <= first  # all of it in the first step
        assert max(compiled["step_times_s"]) < compiled["compile_s"]
        for column in ("model_flops_per_token", "hardware_flops_per_token"):
            assert compiled[column] == eager[column]
        assert compiled["notes"] == [step_meter.COMPILED_UNSEEN, COUNTED_EAGERLY]
        assert eager["peak_allocated_bytes"] and compiled["peak_allocated_bytes"] is None
        assert compiled["peak_reserved_bytes"] > 0


class Squares(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) ** 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_is_compiled_in_the_measured_steps_is_noticed(tmp_path: Path) -> None:
    """Once the first length is another one, torch compiles a graph for any length."""
    chosen = trial_parser.parse(tiny())
    meter = step_meter.Meter(step_meter.meter_spec(chosen), tmp_path, rank_instruments.Gauges(torch.device("cpu")), 0)
    net = Squares()
    net.compile()
    meter.built(dict, lambda: 0)
    for length in (3, 3, 5, 5, 5):  # warm-up, probe, two measured, count
        meter.step_begin()
        loss = net(torch.ones(length, 4)).sum()
        loss.backward()
        meter.step_end(loss)
    row = meter.columns()
    assert row["compile_s"] > 0
    assert step_meter.RECOMPILED.format(1) in row["notes"]


def test_nothing_compiled_is_null() -> None:
    compiler = Compiler()
    assert compiler.graphs() == 0
    assert compiler.seconds() is None


@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_on_a_card(run_sweep: Run, mode: str) -> None:
    size: dict[str, Any] = {"device": {"name": "cuda"}, "precision": "bf16", "seq_len": 256, "micro_batch": 8}
    size["protocol"] = {"name": "quick", "warmup_steps": 3, "measured_steps": 5}
    eager, compiled = run_sweep(tiny(**size), tiny(**size, compile=mode), timeout_s=900)
    assert eager["outcome"] == compiled["outcome"] == "ok", compiled["reason"]
    assert compiled["loss_last"] == pytest.approx(eager["loss_last"], rel=1e-2)
    assert compiled["compile_s"] > 1
    graphs = mode != "default"
    assert compiled["notes"] == [*[step_meter.REPLAYED] * graphs, COUNTED_EAGERLY]
    assert (compiled["step_peak_allocated_bytes"] is None) == graphs
    assert compiled["model_flops_per_token"] == eager["model_flops_per_token"]
    assert compiled["peak_allocated_bytes"] > 0
