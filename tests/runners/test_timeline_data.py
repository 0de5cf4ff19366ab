"""A step's timeline against the replay that makes the row: its sums, its peak and the storages that hold it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import TARGETS
from traces import traced

from vramsweep.harness.allocator.config import AllocatorConfig, parse
from vramsweep.runners import timeline
from vramsweep.runners.predict import replay
from vramsweep.runners.timeline import Timeline
from vramsweep.runners.trace import Trace


def of(trace: Trace, conf: str = "", limit: int | None = None) -> Timeline:
    found = timeline.timeline(trace, parse(conf), limit)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:128"])
def test_every_point_sums_and_the_peaks_are_the_row_s(tmp_path: Path, conf: str) -> None:
    trace = traced(tmp_path, grad_accum=2)
    found, row = of(trace, conf), replay(trace, parse(conf), None)
    for i, allocated in enumerate(found.allocated):
        assert sum(part[i] for part in found.parts.values()) == allocated <= found.active[i] <= found.reserved[i]
    own = [peaks for mark, peaks in row.phases if mark.step == 2]
    assert found.step == 2
    assert found.peak.allocated == max(found.allocated) == max(peaks["allocated"] for peaks in own)
    assert found.peak_reserved == max(found.reserved) == max(peaks["reserved"] for peaks in own)
    assert [phase.phase for phase in found.phases] == ["forward", "backward", "forward", "backward", "optimizer"]
    assert [phase.begin for phase in found.phases[1:]] == [phase.end for phase in found.phases[:-1]]
    assert found.phases[-1].end == found.events == found.event[-1]
    for phase, peaks in zip(found.phases, own, strict=True):
        here = [a for e, a in zip(found.event, found.allocated, strict=True) if phase.begin <= e <= phase.end]
        assert max(here) == peaks["allocated"]
    assert json.loads(json.dumps(asdict(found)))["peak"]["allocated"] == found.peak.allocated


@pytest.mark.slow
def test_the_largest_are_those_alive_at_the_peak(tmp_path: Path) -> None:
    trace = traced(tmp_path, seq_len=512)
    peak = of(trace).peak
    first = next(mark.end for mark in reversed(trace.marks) if mark.step == 1)
    alive: set[int] = set()
    for event in trace.events[: first + peak.event]:
        alive ^= {abs(event) - 1}
    assert [held.bytes for held in peak.largest] == sorted((trace.sizes[n] for n in alive), reverse=True)[:10]
    assert sum(held.bytes for held in peak.largest) + peak.rest + peak.rounding == peak.allocated
    assert len(alive) == 10 + peak.rest_count
    assert peak.phase == "backward"
    workspaces = [held for held in peak.largest if held.category == "workspaces"]
    assert {held.operator for held in workspaces} == {"cuBLAS workspace", "cuBLAS workspace (backward)"}
    assert {(held.step, held.phase) for held in workspaces} == {(0, "forward"), (0, "backward")}
    logits = [held for held in peak.largest if held.category == "activations"]
    assert ("model.layers.0.mlp.act_fn", "aten.silu", 2) in {(held.module, held.operator, held.step) for held in logits}


@pytest.mark.slow
def test_layers_can_count_as_one(tmp_path: Path) -> None:
    trace = traced(tmp_path, seq_len=512)
    peak = of(trace).peak
    assert len(peak.alike) == 10
    kinds = {(one.held.bytes, one.held.operator) for one in peak.alike}
    assert {(held.bytes, held.operator) for held in peak.largest} <= kinds
    assert [one.held.bytes for one in peak.alike] == sorted((one.held.bytes for one in peak.alike), reverse=True)
    both = [one for one in peak.alike if one.held.module.startswith("model.layers.*.")]
    assert both and {one.count for one in both} == {2}
    single = next(one for one in peak.alike if one.held.operator == "cuBLAS workspace")
    assert (single.held.module, single.count) == ("model.layers.0.self_attn.q_proj", 1)


@pytest.mark.slow
def test_where_memory_runs_out_the_rest_goes_on_without_the_limit(tmp_path: Path) -> None:
    trace = traced(tmp_path, seq_len=512)
    whole = of(trace)
    limit = whole.peak.allocated - (1 << 20)  # of less reserved memory, a retry can still make enough
    found, row = of(trace, limit=limit), replay(trace, AllocatorConfig(), limit)
    assert row.refused is not None and found.failure is not None
    failed = row.refused.mark
    assert (found.step, found.failure.phase) == (failed.step, failed.phase)
    assert found.failure.request == row.refused.request
    begin = max((mark.end for mark in trace.marks if (-1 if mark.step is None else mark.step) < failed.step), default=0)
    event = trace.events[begin + found.failure.event - 1]
    assert event > 0 and trace.sizes[event - 1] == row.refused.request
    assert found.limit == limit < max(found.reserved)
    assert whole.failure is None and whole.limit is None


@pytest.mark.slow
def test_memory_that_is_too_small_for_the_model_shows_loading(tmp_path: Path) -> None:
    found = of(traced(tmp_path), limit=1 << 20)
    assert found.step is None
    assert found.failure is not None and found.failure.phase == "load"
    assert [phase.phase for phase in found.phases] == ["load"]


@pytest.mark.slow
def test_a_long_step_keeps_its_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(tmp_path)
    every = of(trace)
    monkeypatch.setattr(timeline, "POINTS", 80)
    few = of(trace)
    assert len(every.event) == every.events + 1 > 400
    assert 40 < len(few.event) <= 82
    assert few.peak == every.peak
    for name in ("allocated", "active", "reserved"):
        assert max(getattr(few, name)) == max(getattr(every, name))
    at = {event: i for i, event in enumerate(every.event)}
    for i, event in enumerate(few.event):
        assert {n: p[i] for n, p in few.parts.items()} == {n: p[at[event]] for n, p in every.parts.items()}


def test_a_step_whose_backward_pass_is_not_seen_is_one_phase(tmp_path: Path) -> None:
    runner = {"name": "custom", "target": f"{TARGETS / 'backward.py'}:by_hand"}
    trace = traced(tmp_path, runner=runner)
    found = of(trace)
    assert [phase.phase for phase in found.phases] == ["step"] and found.peak.phase == "step"


def test_nothing_traced_is_no_timeline() -> None:
    assert timeline.timeline(replace(Trace()), AllocatorConfig(), None) is None
