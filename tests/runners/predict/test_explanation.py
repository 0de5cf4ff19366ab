"""Test a run's memory by component and over a step against the row's replay, the storages and the model."""

import itertools
import json
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TARGETS, tiny
from traces import SIMULATED, alive, most_held, traced_once

from vramsweep.harness.allocator.config import AllocatorConfig, parse
from vramsweep.harness.hardware.gpu_lookup import memory_limit
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.model import build
from vramsweep.runners.predict import memory_timeline, predicted_row
from vramsweep.runners.predict.explanation import Explanation, explanation
from vramsweep.runners.predict.memory_timeline import ROUNDING, Timeline
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.trace.trace_data import CATEGORIES, Trace
from vramsweep.runners.worker import query_server

pytestmark = pytest.mark.deterministic


def of(trace: Trace, conf: str = "", limit: int | None = None) -> Explanation:
    found = explanation(trace, parse(conf), limit)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_every_phase_is_the_row_s_and_its_parts_sum(conf: str) -> None:
    trace = traced_once(grad_accum=2)
    found, predicted = of(trace, conf), replay(trace, parse(conf), None)
    row = predicted_row.columns(predicted)
    assert [(one.step, one.phase) for one in found.phases] == [
        (None, "load"), (2, "forward"), (2, "backward"), (2, "optimizer"),
    ]  # fmt: skip
    for one in found.phases:
        for counter in ("allocated", "reserved"):
            assert getattr(one, counter) == row[f"{one.phase}_peak_{counter}_bytes"]
    for one in (*found.phases, found.peak):
        assert sum(one.parts.values()) == one.allocated
    assert (found.peak.allocated, found.peak_reserved) == (row["peak_allocated_bytes"], row["peak_reserved_bytes"])
    assert found.peak.parts == predicted.breakdown
    assert found.refused is None
    assert json.loads(json.dumps(asdict(found)))["peak"]["parts"] == found.peak.parts


@pytest.mark.slow
def test_each_part_s_own_most_is_the_storages_and_the_model_s() -> None:
    trace = traced_once()
    found, most = of(trace), most_held(trace)
    assert {name: found.most[name] for name in CATEGORIES} == {name: most[name] for name in CATEGORIES}
    assert (
        0 < found.most[ROUNDING] < 512 * max(itertools.accumulate((event > 0) - (event < 0) for event in trace.events))
    )
    assert found.most["gradients"] > found.peak.parts["gradients"]  # not all are there yet when most is held
    net = build.model(trial_parser.parse(tiny()), torch.device("cpu"))
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    assert [found.most[name] for name in ("parameters", "gradients")] == [size, size]
    assert 2 * size <= found.most["optimizer_state"] <= 2 * size + 8 * len(list(net.parameters()))


@pytest.mark.slow
def test_the_largest_are_what_the_peak_is_made_of() -> None:
    trace = traced_once(seq_len=512)
    found = of(trace)
    sizes = [one.held.bytes * one.count for one in found.largest]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 10
    assert sum(sizes) + found.rest + found.peak.parts[ROUNDING] == found.peak.allocated
    at_peak = alive(trace.events[: found.peak.event + 1])
    assert sum(one.count for one in found.largest) + found.rest_count == len(at_peak)
    made = [(trace.sizes[n], *trace.makers[trace.origins[n]]) for n in at_peak]
    alike = Counter((size, re.sub(r"\.\d+\.", ".*.", path), *rest) for size, path, *rest in made)
    layers = [one for one in found.largest if ".*." in one.held.module]
    assert layers
    for one in layers:
        assert one.count == alike[one.held.bytes, one.held.module, one.held.operator, one.held.line] > 1


def test_what_was_asked_for_and_what_was_held_sum() -> None:
    trace = traced_once(seq_len=512)
    whole = of(trace)
    limit = whole.peak.allocated - (1 << 20)  # whatever the allocator gives back before it gives up
    found = of(trace, limit=limit)
    refused, asked = found.refused, found.asked
    assert refused is not None and asked is not None
    first = next(i for i, event in enumerate(trace.events) if event == refused.storage + 1)
    live = alive(trace.events[: first + 1])  # the request's own storage included
    assert trace.sizes[refused.storage] == refused.request == asked.bytes and asked.operator
    for name in CATEGORIES:
        assert refused.parts[name] == sum(trace.sizes[n] for n in live if trace.categories[n] == name)
    assert sum(refused.parts.values()) == refused.allocated + refused.request
    assert refused.allocated <= refused.reserved <= limit
    assert refused.reserved + refused.request > limit - (20 << 20)  # nothing of that size was free in between
    assert replace(found, refused=None, asked=None) == whole
    few = {"name": "few", "conf": "per_process_memory_fraction:0.0002"}  # as `explain --json` prints it, for programs
    chosen = trial_parser.parse(tiny(device=SIMULATED, seq_len=512, allocator=few))
    setting = parse(few["conf"]), memory_limit(chosen.device.card)
    answer = json.loads(json.dumps(query_server._explanation(trace, chosen, setting)))
    assert answer["refused"]["mark"].keys() == {"end", "step", "phase"}


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["garbage_collection_threshold:0.6", "per_process_memory_fraction:0.5", ""])
def test_what_fits_is_explained_in_the_room_that_it_has(conf: str) -> None:
    """As the row has it: a setting that collects garbage, or a card nearly full, reserves as the limit has it."""
    trace = traced_once(seq_len=512, micro_batch=8)
    whole = replay(trace, AllocatorConfig(), None).peak["reserved"]
    share = parse(conf).per_process_memory_fraction
    for limit in (int(room * whole / share) for room in (0.97, 1.0, 1.3, 2.0)):
        found, row = of(trace, conf, limit), replay(trace, parse(conf), limit)
        assert (found.refused is None) == (row.refused is None)
        if row.refused is None:
            assert found.peak_reserved == row.peak["reserved"] <= limit * share


@pytest.mark.slow
def test_a_node_without_room_is_told(tmp_path: Path) -> None:
    def answered(gib: float | None) -> dict[str, Any]:
        chosen = trial_parser.parse(tiny(device=SIMULATED | {"node_memory_gib": gib}))
        found = query_server.answer_trial("explanation", chosen, tmp_path, tmp_path, True)
        assert found is not None
        return found

    assert "0.01 GiB of host memory per node are not enough" in answered(0.01)["host_refused"]
    assert answered(512)["host_refused"] is answered(None)["host_refused"] is None


def test_a_card_that_has_no_room_for_the_model_says_so_of_loading() -> None:
    asked = of(traced_once(), limit=1 << 20).asked
    assert asked is not None
    assert (asked.step, asked.phase, asked.category) == (None, "load", "parameters")
    assert asked.module.endswith("weight")


def test_a_step_whose_backward_pass_is_not_seen_is_one_phase() -> None:
    runner = {"name": "custom", "target": f"{TARGETS / 'backward.py'}:by_hand"}
    trace = traced_once(runner=runner)
    found, over_time = of(trace), drawn(trace)
    assert [one.phase for one in found.phases] == ["load", "step"] and found.peak.phase == "step"
    assert [one.phase for one in over_time.phases] == ["step"] and over_time.peak.phase == "step"
    assert found.peak.allocated == replay(trace, AllocatorConfig(), None).peak["allocated"]


def test_nothing_traced_is_no_explanation() -> None:
    assert explanation(Trace(), AllocatorConfig(), None) is None
    assert memory_timeline.timeline(Trace(), AllocatorConfig(), None) is None


# A step's timeline


def drawn(trace: Trace, conf: str = "", limit: int | None = None) -> Timeline:
    found = memory_timeline.timeline(trace, parse(conf), limit)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:128"])
def test_every_point_sums_and_the_peaks_are_the_row_s(conf: str) -> None:
    trace = traced_once(grad_accum=2)
    found, row = drawn(trace, conf), replay(trace, parse(conf), None)
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


def test_the_largest_of_a_timeline_are_those_alive_at_the_peak() -> None:
    trace = traced_once(seq_len=512)
    peak = drawn(trace).peak
    first = next(mark.end for mark in reversed(trace.marks) if mark.step == 1)
    there = alive(trace.events[: first + peak.event])
    assert [held.bytes for held in peak.largest] == sorted((trace.sizes[n] for n in there), reverse=True)[:10]
    assert sum(held.bytes for held in peak.largest) + peak.rest + peak.rounding == peak.allocated
    assert len(there) == 10 + peak.rest_count
    assert peak.phase == "backward"
    workspaces = [held for held in peak.largest if held.category == "workspaces"]
    assert {held.operator for held in workspaces} == {"cuBLAS workspace", "cuBLAS workspace (backward)"}
    assert {(held.step, held.phase) for held in workspaces} == {(0, "forward"), (0, "backward")}
    logits = [held for held in peak.largest if held.category == "activations"]
    assert ("model.layers.0.mlp.act_fn", "aten.silu", 2) in {(held.module, held.operator, held.step) for held in logits}
    kinds = {(one.held.bytes, one.held.operator): one for one in peak.alike}  # in which layers count as one
    assert len(peak.alike) == 10 and {(held.bytes, held.operator) for held in peak.largest} <= kinds.keys()
    assert [one.held.bytes for one in peak.alike] == sorted((one.held.bytes for one in peak.alike), reverse=True)
    assert {one.count for one in peak.alike if one.held.module.startswith("model.layers.*.")} == {2}
    single = next(one for one in peak.alike if one.held.operator == "cuBLAS workspace")
    assert (single.held.module, single.count) == ("model.layers.0.self_attn.q_proj", 1)


def test_where_memory_runs_out_the_rest_goes_on_without_the_limit() -> None:
    trace = traced_once(seq_len=512)
    whole = drawn(trace)
    limit = whole.peak.allocated - (1 << 20)  # of less reserved memory, a retry can still make enough
    found, row = drawn(trace, limit=limit), replay(trace, AllocatorConfig(), limit)
    assert row.refused is not None and found.failure is not None
    failed = row.refused.mark
    assert (found.step, found.failure.phase) == (failed.step, failed.phase)
    assert found.failure.request == row.refused.request
    begin = max((mark.end for mark in trace.marks if (-1 if mark.step is None else mark.step) < failed.step), default=0)
    event = trace.events[begin + found.failure.event - 1]
    assert event > 0 and trace.sizes[event - 1] == row.refused.request
    assert found.limit == limit < max(found.reserved)
    assert whole.failure is None and whole.limit is None
    loading = drawn(trace, limit=1 << 20)  # too little for the model
    assert loading.step is None and [phase.phase for phase in loading.phases] == ["load"]
    assert loading.failure is not None and loading.failure.phase == "load"


def test_a_long_step_keeps_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced_once()
    every = drawn(trace)
    monkeypatch.setattr(memory_timeline, "POINTS", 80)
    few = drawn(trace)
    assert len(every.event) == every.events + 1 > 400
    assert 40 < len(few.event) <= 82
    assert few.peak == every.peak
    for name in ("allocated", "active", "reserved"):
        assert max(getattr(few, name)) == max(getattr(every, name))
    at = {event: i for i, event in enumerate(every.event)}
    for i, event in enumerate(few.event):
        assert {n: p[i] for n, p in few.parts.items()} == {n: p[at[event]] for n, p in every.parts.items()}
