"""One row of what several processes have seen, for what no machine without cards can show."""

from typing import Any

import pytest
import torch
from conftest import literal_cases, merged, parametrized, tiny

from vramsweep.harness.spec import trial
from vramsweep.runners.scripts import observed_row
from vramsweep.runners.scripts.token_volume import Volume

NATIVE = {"backend": "native", "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False}}


def process(rank: int, card: int, **over: Any) -> dict[str, Any]:
    columns = {
        "peak_reserved_bytes": 100 + rank, "tokens_per_s": 50.0, "samples_per_s": 1.0, "elapsed_s": 2.0 + rank,
        "step_times_s": [1.0 + rank / 2] * 2, "gpu_uuid": f"GPU-{card}", "measured_steps": 2, "notes": None,
    }  # fmt: skip
    about = {"variables": {}, "rank": rank, "world_size": 2, "card": card}
    shapes = {"shapes": [[1, 50]], "shapes_known": True, "repeated": False, "batches": [1]}
    return merged({"columns": columns, **about, **shapes, **NATIVE}, over)


def asked(**over: Any) -> trial.Trial:
    runner = {"name": "script", "command": "true {seq_len} {micro_batch}"}
    known = {"runner": runner, "seq_len": 50, "micro_batch": 1, "device": {"name": "cuda"}}
    return trial.Trial.model_validate(tiny(**(known | over)))


def test_two_processes_on_one_card_are_said() -> None:
    row = observed_row.columns(asked(world_size=2), [process(0, 0), process(1, 0)], {"seq_len", "micro_batch"})
    assert row["notes"] == [
        "ranks 0 and 1 ran on the same GPU; each counter covers one process, so the GPU used more memory"
    ]
    # each rank may have a CUDA_VISIBLE_DEVICES of its own, in which its card is the first
    unknown = [process(rank, 0, columns={"gpu_uuid": None}) for rank in (0, 1)]
    for ranks in ([process(0, 0), process(1, 1)], unknown):
        assert observed_row.columns(asked(world_size=2), ranks, {"seq_len", "micro_batch"})["notes"] is None
    turned = [process(rank, 0) | {"card": rank} for rank in (0, 1)]
    assert observed_row.columns(asked(world_size=2), turned, {"seq_len", "micro_batch"})["notes"]


@parametrized("trained_elsewhere")
def test_a_training_on_another_device_than_the_trials_is_no_row(
    device: str, card: bool, columns: dict[str, Any], said: str
) -> None:
    one = merged(process(0, 0, world_size=1), {"columns": columns})
    if not card:
        one = {name: value for name, value in one.items() if name not in ("card", *NATIVE)}
    with pytest.raises(trial.InvalidTrial, match=said):
        observed_row.columns(asked(device={"name": device}), [one], set())


IDS = torch.zeros(3, 8, dtype=torch.int64)
FORWARD = "f"
STEPS: dict[str, int | None] = dict(literal_cases("passes_of_steps"))


def volume(passes: str, ids: torch.Tensor = IDS, first: str = "") -> Volume:
    """Return the volume of five steps with these passes; `first` replaces those of the first step."""
    one = Volume()
    for step in (first or passes, *[passes] * 4):
        one.begin_step()
        for kind in step:
            one.forward(torch.nn.Identity(), (ids,), {}) if kind == FORWARD else one.backward(over=True)
    return one


@pytest.mark.parametrize("passes", STEPS)
def test_backward_passes_are_batches_where_each_has_a_forward_pass_of_its_own(passes: str) -> None:
    batches = STEPS[passes]
    known = volume(passes)
    assert known.said()["batches"] == volume(passes, first="b").said()["batches"] == [batches]
    one = process(0, 0, world_size=1, **known.said())
    row = observed_row.columns(asked(), [one], set())
    assert row.get("grad_accum") == (batches if FORWARD in passes else None)
    unknown = process(0, 0, world_size=1, **volume(passes, IDS.float()).said())
    without = merged(unknown, {"columns": {"tokens_per_s": None, "samples_per_s": None}})
    row = observed_row.columns(asked(), [without], {"seq_len", "micro_batch"})
    if batches is None:
        assert row["tokens_per_s"] is None and "give it as {grad_accum}" in row["notes"][0]
        row = observed_row.columns(asked(grad_accum=2), [without], {"seq_len", "micro_batch", "grad_accum"})
        assert row["tokens_per_s"] == 2 * 50 * 2 / 2.0 and "given length, batch and accumulation" in row["notes"][0]
    else:
        assert row["tokens_per_s"] == batches * 50 * 2 / 2.0 and "from the given length and batch" in row["notes"][0]


def test_steps_of_several_numbers_of_batches_have_none() -> None:
    one = Volume()
    for batches in (1, 1, 2, 1):
        one.begin_step()
        for _ in range(batches):
            one.forward(torch.nn.Identity(), (IDS,), {})
            one.backward(over=True)
    assert sorted(one.said()["batches"]) == [1, 2]
    row = observed_row.columns(asked(), [process(0, 0, world_size=1, **one.said())], set())
    assert (row["micro_batch"], row["seq_len"], row["grad_accum"]) == (3, 8, None)


def test_tokens_of_all_ranks_go_by_the_slowest_ones_clock() -> None:
    row = observed_row.columns(asked(world_size=2), [process(0, 0), process(1, 1)], set())
    assert row["tokens_per_s"] == pytest.approx((50 * 2 + 50 * 3) / 3)
    assert (row["seq_len"], row["micro_batch"], row["world_size"], row["worst_rank"]) == (50, 1, 2, 1)


def test_an_allocator_that_is_not_the_trials_is_an_error() -> None:
    one = process(0, 0, world_size=1, allocator_settings={"expandable_segments": True})
    with pytest.raises(observed_row.AllocatorMismatch, match="expandable_segments: requested False, in force True"):
        observed_row.columns(asked(), [one], set())
    told = process(0, 0, world_size=1, variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    with pytest.raises(trial.InvalidTrial, match="the script sets PYTORCH_ALLOC_CONF=expandable_segments:True itself"):
        observed_row.columns(asked(), [told], set())
