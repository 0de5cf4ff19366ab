"""Test that memory leaked by a step is found with its operator, and that healthy steps leak nothing."""

from pathlib import Path
from typing import Any

import pytest
from conftest import TARGETS, tiny
from traces import SIMULATED, trace_trial

from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.trace.allocation_program import growth
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic


def row(folder: Path, **over: Any) -> dict[str, Any]:
    values = tiny(device=SIMULATED, **over)
    return predicted_row.predict(trial_parser.parse(values), *trace_trial(values, folder)).columns


def on_cuda(function: str) -> dict[str, Any]:
    return {"runner": {"name": "custom", "target": f"{TARGETS / 'on_cuda.py'}:{function}"}}


def test_a_leak_is_found_with_its_operator(tmp_path: Path) -> None:
    size = 4 * 1000 * 256 * 4  # of what the target keeps: 4 rows, a thousand times, of 256 in fp32
    found = row(tmp_path, **on_cuda("leaks"))
    assert found["step_growth_bytes"] == size
    assert found["plateau"] is False
    notes = str(found["notes"])
    assert "memory leaks: each step leaves 3.9 MiB more allocated than the one before, most by" in notes
    assert "aten.repeat (forward)" in notes or "aten.clone (forward)" in notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "over",
    [
        {"grad_accum": 2, "precision": "bf16", "checkpointing": "full"},
        {"runner": {"name": "trainer"}},
        on_cuda("documented"),
    ],
    ids=["recomputed", "trainer", "target"],
)
def test_healthy_steps_leave_nothing(tmp_path: Path, over: dict[str, Any]) -> None:
    found = row(tmp_path, **over)
    assert found["step_growth_bytes"] == 0 and found["plateau"] is True
    assert "leak" not in str(found["notes"])


def test_of_too_few_steps_nothing_is_known() -> None:
    assert growth(Trace()) is None
