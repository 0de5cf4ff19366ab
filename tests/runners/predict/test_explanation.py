"""What a run holds, part by part, against the replay that makes the row, the storages themselves, and the model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TARGETS, tiny
from traces import traced

from vramsweep.harness import trial
from vramsweep.harness.allocator.config import AllocatorConfig, parse
from vramsweep.runners import build, look_worker, simulated
from vramsweep.runners.explain import ROUNDING, Explanation, explanation
from vramsweep.runners.predict import replay
from vramsweep.runners.storages import CATEGORIES
from vramsweep.runners.trace import Trace


def of(trace: Trace, conf: str = "", limit: int | None = None) -> Explanation:
    found = explanation(trace, parse(conf), limit)
    assert found is not None
    return found


def alive(trace: Trace) -> Iterator[set[int]]:
    """The storages after each event."""
    now: set[int] = set()
    for event in trace.events:
        now ^= {abs(event) - 1} if event else set()
        yield now


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_every_phase_is_the_row_s_and_its_parts_sum(tmp_path: Path, conf: str) -> None:
    trace = traced(tmp_path, grad_accum=2)
    found, predicted = of(trace, conf), replay(trace, parse(conf), None)
    row = simulated.columns(predicted)
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


def test_each_part_s_own_most_is_the_storages(tmp_path: Path) -> None:
    trace = traced(tmp_path)
    held = [
        {name: sum(trace.sizes[n] for n in now if trace.categories[n] == name) for name in CATEGORIES}
        for now in map(set, alive(trace))
    ]
    found = of(trace)
    assert {name: found.most[name] for name in CATEGORIES} == {
        name: max(one[name] for one in held) for name in CATEGORIES
    }
    assert 0 < found.most[ROUNDING] < 512 * max(len(now) for now in map(set, alive(trace)))
    assert found.most["gradients"] > found.peak.parts["gradients"]  # not all are there yet when most is held


def test_the_states_are_the_model_s_own(tmp_path: Path) -> None:
    chosen = trial.parse(tiny())
    net = build.model(chosen, torch.device("cpu"))
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    most = of(traced(tmp_path)).most
    assert [most[name] for name in ("parameters", "gradients")] == [size, size]
    assert 2 * size <= most["optimizer_state"] <= 2 * size + 8 * len(list(net.parameters()))


@pytest.mark.slow
def test_the_largest_are_what_the_peak_is_made_of(tmp_path: Path) -> None:
    trace = traced(tmp_path, seq_len=512)
    found = of(trace)
    sizes = [one.held.bytes * one.count for one in found.largest]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) == 10
    assert sum(sizes) + found.rest + found.peak.parts[ROUNDING] == found.peak.allocated
    at_peak = next(set(now) for i, now in enumerate(alive(trace)) if i == found.peak.event)
    assert sum(one.count for one in found.largest) + found.rest_count == len(at_peak)
    layers = [one.count for one in found.largest if ".*." in one.held.module]
    assert layers and all(count % 2 == 0 for count in layers)  # of a model of two layers


def test_what_was_asked_for_and_what_was_held_sum(tmp_path: Path) -> None:
    trace = traced(tmp_path, seq_len=512)
    whole = of(trace)
    limit = whole.peak.allocated - (1 << 20)  # whatever the allocator gives back before it gives up
    found = of(trace, limit=limit)
    refused, asked = found.refused, found.asked
    assert refused is not None and asked is not None
    first = next(i for i, event in enumerate(trace.events) if event == refused.storage + 1)
    live = next(set(now) for i, now in enumerate(alive(trace)) if i == first)  # the request's own storage included
    assert trace.sizes[refused.storage] == refused.request == asked.bytes and asked.operator
    for name in CATEGORIES:
        assert refused.parts[name] == sum(trace.sizes[n] for n in live if trace.categories[n] == name)
    assert sum(refused.parts.values()) == refused.allocated + refused.request
    assert refused.allocated <= refused.reserved <= limit
    assert refused.reserved + refused.request > limit - (20 << 20)  # nothing of that size was free in between
    assert replace(found, refused=None, asked=None) == whole


@pytest.mark.parametrize("conf", ["garbage_collection_threshold:0.6", "per_process_memory_fraction:0.5", ""])
def test_what_fits_is_explained_in_the_room_that_it_has(tmp_path: Path, conf: str) -> None:
    """As the row has it: a setting that collects garbage, or a card nearly full, reserves as the limit has it."""
    trace = traced(tmp_path, seq_len=512, micro_batch=8)
    whole = replay(trace, AllocatorConfig(), None).peak["reserved"]
    share = parse(conf).per_process_memory_fraction
    for limit in (int(room * whole / share) for room in (0.97, 1.0, 1.3, 2.0)):
        found, row = of(trace, conf, limit), replay(trace, parse(conf), limit)
        assert (found.refused is None) == (row.refused is None)
        if row.refused is None:
            assert found.peak_reserved == row.peak["reserved"] <= limit * share


def test_a_node_without_room_is_told(tmp_path: Path) -> None:
    def answered(gib: float | None) -> dict[str, Any]:
        device = {"name": "simulated", "gpu": "a100-80gb", "node_memory_gib": gib}
        found = look_worker.of_trial("explanation", trial.parse(tiny(device=device)), tmp_path, True)
        assert found is not None
        return found

    assert "a node's 0.01 GiB of host memory are too few" in answered(0.01)["host_refused"]
    assert answered(512)["host_refused"] is answered(None)["host_refused"] is None


def test_a_card_that_has_no_room_for_the_model_says_so_of_loading(tmp_path: Path) -> None:
    asked = of(traced(tmp_path), limit=1 << 20).asked
    assert asked is not None
    assert (asked.step, asked.phase, asked.category) == (None, "load", "parameters")
    assert asked.module.endswith("weight")


def test_a_step_whose_backward_pass_is_not_seen_is_one_phase(tmp_path: Path) -> None:
    runner = {"name": "custom", "target": f"{TARGETS / 'backward.py'}:by_hand"}
    trace = traced(tmp_path, runner=runner)
    found = of(trace)
    assert [one.phase for one in found.phases] == ["load", "step"] and found.peak.phase == "step"
    assert found.peak.allocated == replay(trace, AllocatorConfig(), None).peak["allocated"]


def test_nothing_traced_is_no_explanation() -> None:
    assert explanation(Trace(), AllocatorConfig(), None) is None
