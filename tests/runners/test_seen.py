"""One row of what several processes have seen, for what no machine without cards can show."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import merged, tiny

from vramsweep.harness import trial
from vramsweep.runners import seen

NATIVE = {"backend": "native", "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}}


def process(rank: int, card: int, **over: Any) -> dict[str, Any]:
    columns = {
        "peak_reserved_bytes": 100 + rank,
        "tokens_per_s": 50.0,
        "samples_per_s": 1.0,
        "elapsed_s": 2.0 + rank,
        "step_times_s": [1.0 + rank / 2] * 2,
        "gpu_uuid": f"GPU-{card}",
        "measured_steps": 2,
        "notes": None,
    }
    about = {
        "variables": {},
        "rank": rank,
        "world_size": 2,
        "card": card,
        "shapes": [[1, 50]],
        "shapes_known": True,
        "repeated": False,
    }
    return merged({"columns": columns, **about, "passes": [1], **NATIVE}, over)


def asked(**over: Any) -> trial.Trial:
    runner = {"name": "script", "command": "true {seq_len} {micro_batch}"}
    return trial.Trial.model_validate(tiny(**({"runner": runner, "seq_len": 50, "micro_batch": 1} | over)))


def test_two_processes_on_one_card_are_said() -> None:
    row = seen.columns(asked(world_size=2), [process(0, 0), process(1, 0)], {"seq_len", "micro_batch"})
    assert row["notes"] == [
        "ranks 0 and 1 ran on the same card: each counter is of one process, and the card held them all"
    ]
    assert (
        seen.columns(asked(world_size=2), [process(0, 0), process(1, 1)], {"seq_len", "micro_batch"})["notes"] is None
    )


def test_tokens_of_all_ranks_go_by_the_slowest_ones_clock() -> None:
    row = seen.columns(asked(world_size=2), [process(0, 0), process(1, 1)], set())
    assert row["tokens_per_s"] == pytest.approx((50 * 2 + 50 * 3) / 3)
    assert (row["seq_len"], row["micro_batch"], row["world_size"], row["worst_rank"]) == (50, 1, 2, 1)


def test_an_allocator_that_is_not_the_trials_is_an_error() -> None:
    one = process(0, 0, world_size=1, allocator_settings={"expandable_segments": True})
    with pytest.raises(seen.AllocatorMismatch, match="expandable_segments: asked for False, in force is True"):
        seen.columns(asked(), [one], set())
    told = process(0, 0, world_size=1, variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    with pytest.raises(trial.InvalidTrial, match="the script sets PYTORCH_ALLOC_CONF=expandable_segments:True itself"):
        seen.columns(asked(), [told], set())
