"""What a step leaves behind is found with its operator; healthy steps leave nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import TARGETS, tiny

from vramsweep.harness import gpus, trial
from vramsweep.runners import custom, simulated, torch_loop, tracing
from vramsweep.runners import trainer as hf_trainer
from vramsweep.runners.leak import growth
from vramsweep.runners.trace import Trace

DEVICE = {"name": "simulated", "gpu": "a100-80gb"}


def traced(folder: Path, module: ModuleType, **over: Any) -> tuple[trial.Trial, Trace, dict[str, Any]]:
    chosen = trial.parse(tiny(device=DEVICE, **over))
    return (chosen, *tracing.trace_trial(chosen, gpus.named("a100-80gb"), folder, module))


def test_a_leak_is_found_with_its_operator(tmp_path: Path) -> None:
    target = {"name": "custom", "target": f"{TARGETS / 'on_cuda.py'}:leaks"}
    chosen, trace, details = traced(tmp_path, custom, runner=target)
    size = 4 * 1000 * 256 * 4  # of what the target keeps: 4 rows, a thousand times, of 256 in fp32
    row = simulated.predict(chosen, trace, details).columns
    assert row["step_growth_bytes"] == size
    assert row["plateau"] is False
    assert "memory leaks: each step leaves 3.9 MiB more allocated than the one before, most by" in str(row["notes"])
    assert "aten.repeat (forward)" in str(row["notes"]) or "aten.clone (forward)" in str(row["notes"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "over"),
    [
        (torch_loop, {}),
        (torch_loop, {"grad_accum": 2, "precision": "bf16", "checkpointing": "full"}),
        (hf_trainer, {"runner": {"name": "trainer"}}),
        (custom, {"runner": {"name": "custom", "target": f"{TARGETS / 'on_cuda.py'}:documented"}}),
    ],
)
def test_healthy_steps_leave_nothing(tmp_path: Path, module: ModuleType, over: dict[str, Any]) -> None:
    chosen, trace, details = traced(tmp_path, module, **over)
    row = simulated.predict(chosen, trace, details).columns
    assert row["step_growth_bytes"] == 0 and row["plateau"] is True
    assert "leak" not in str(row["notes"])


def test_of_too_few_steps_nothing_is_known() -> None:
    assert growth(Trace()) is None
