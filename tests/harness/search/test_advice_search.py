"""Test advice on combined changes against an exhaustive search of made-up memory, and its text."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import cases, literal_cases, tiny

from vramsweep.harness.search import advice_search
from vramsweep.harness.search.advice_search import (
    REMEDIES,
    MemorySaving,
    Option,
    applicable,
    apply_changes,
    front,
    search,
)
from vramsweep.harness.spec import trial_parser

SAME, ROUNDING, PRECISION, METHOD = range(len(advice_search.LEVELS))

# Made up: factors of activations, of states, of what the logits take, and of time. They do not multiply as a whole, and
# a fused kernel does nothing beside a chunked loss; a smaller optimizer state is a little more, until what is kept for
# the backward phase is gone.
EFFECTS = {saving: tuple(factors) for saving, *factors in literal_cases("effects_of_savings")}
OURS = [one for one in REMEDIES if one.words in EFFECTS]


def option(taken: Sequence[MemorySaving]) -> Option:
    activations, states, logits, time = 4000.0, 2000.0, 2000.0, 1.0
    names = {one.words for one in taken}
    for name in sorted(names):
        kept, held, made, slower = EFFECTS[name]
        if name == "loss=chunked" and "kernels=liger" in names:
            made = 1.0
        if name == "optimizer=adamw_bnb_8bit" and "checkpointing=full" not in names:
            held = 1.01
        activations, states, logits, time = activations * kept, states * held, logits * made, time * slower
    return Option(tuple(taken), round(max(activations + states, states + logits + 0.3 * activations)), time)


class Predictor:
    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, taken: Sequence[tuple[MemorySaving, ...]]) -> list[Option]:
        self.asked += [tuple(one.words for one in these) for these in taken]
        return [option(these) for these in taken]


def every() -> list[Option]:
    groups: dict[str, list[MemorySaving | None]] = {}
    for one in OURS:
        groups.setdefault(one.group, [None]).append(one)
    return [option([one for one in taken if one]) for taken in itertools.product(*groups.values())]


def beaten(one: Option, others: Sequence[Option]) -> bool:
    assert one.need is not None and one.seconds is not None
    return any(
        other.need < one.need and other.seconds < one.seconds  # type: ignore[operator]
        for other in others
    )


@pytest.mark.parametrize("limit", [900, 1500, 2500, 4000, 5500])
def test_of_a_small_space_all_is_tried_and_the_recommended_is_on_its_front(limit: int) -> None:
    found = search(OURS, Predictor(), limit, most=10_000)
    assert len({one.remedies for one in found.tried}) == len(found.tried) == found.space == len(every())
    fitting = [one for one in every() if one.fits(limit)]
    chosen = found.recommended
    if not fitting:
        assert chosen is None and found.nearest is not None
        assert found.nearest.need == min(one.need or 0 for one in every())
        return
    assert chosen is not None and chosen.fits(limit)
    same = [one for one in fitting if one.level == min(one.level for one in fitting)]
    assert chosen.level == same[0].level and not beaten(chosen, same)
    assert chosen.seconds == min(one.seconds or 0 for one in same)
    for one in found.front:
        assert one.fits(limit) and not beaten(one, fitting)


@pytest.mark.parametrize("limit", [1500, 2500, 4000])
def test_few_predictions_find_what_many_would(limit: int) -> None:
    asked = Predictor()
    found = search(OURS, asked, limit, most=24)
    assert len(asked.asked) == 1 + len(OURS) + 24 < found.space
    assert len(set(asked.asked)) == len(asked.asked)  # nothing twice
    best = min((one for one in every() if one.fits(limit)), key=lambda one: (one.level, one.seconds or 0))
    assert found.recommended is not None and found.recommended.fits(limit)
    assert found.recommended.level == best.level
    assert (found.recommended.seconds or 0) <= 1.1 * (best.seconds or 0)
    assert found.nearest is not None and (found.nearest.need or 0) == min(one.need or 0 for one in every())


def test_least_change_comes_before_speed() -> None:
    found = search(OURS, Predictor(), 5500)
    assert found.recommended is not None
    assert found.recommended.level == SAME  # checkpointing alone does, though SGD is faster
    assert {one.words for one in found.recommended.remedies} <= {
        "checkpointing=selective", "checkpointing=full", "allocator=expandable",
    }  # fmt: skip


def test_what_fits_as_it_is_needs_no_change() -> None:
    found = search(OURS, Predictor(), 10_000)
    assert found.recommended is not None
    assert found.recommended.remedies == ()


def test_a_front_has_equals_once_with_the_least_change() -> None:
    one, other = OURS[0], OURS[1]
    options = [Option((one, other), 5, 2.0), Option((one,), 5, 2.0), Option((), 9, 1.0), Option((other,), 9, 3.0)]
    assert [len(each.remedies) for each in front(options)] == [0, 1]
    unknown = [Option((), 9, None), Option((one,), 7, None)]
    assert [each.need for each in front(unknown)] == [7]  # without times the least memory


def test_what_cannot_be_predicted_ends_the_search() -> None:
    found = search(OURS, lambda taken: [Option(these, None, None, "no") for these in taken], 100)
    assert (found.recommended, found.nearest, len(found.tried)) == (None, None, 1)


def test_what_harms_alone_is_found_where_it_helps() -> None:
    """Nothing but the smaller state, with checkpointing, is small enough that keeps the training what it was."""
    eight = next(one for one in OURS if one.words == "optimizer=adamw_bnb_8bit")
    least = min((one for one in every() if one.level <= PRECISION), key=lambda one: one.need or 0)
    assert eight in least.remedies and (option([eight]).need or 0) > (option([]).need or 0)
    found = search(OURS, Predictor(), least.need or 0, most=24)
    assert found.recommended is not None and eight in found.recommended.remedies
    assert found.recommended.level == PRECISION


def test_what_fits_with_room_to_spare_comes_before_what_only_just_does() -> None:
    """Among those that change as little of the result."""
    half, full = (next(one for one in OURS if one.words == f"checkpointing={kind}") for kind in ("selective", "full"))
    sizes = {(): (120, 1.0), (half,): (100, 1.1), (full,): (60, 1.3)}
    for limit, recommended in ((100, (full,)), (102, (half,))):
        found = search([full, half], lambda taken: [Option(these, *sizes[these]) for these in taken], limit)
        assert found.recommended is not None and found.recommended.remedies == recommended


def test_what_may_be_needed_besides_is_room_to_spare() -> None:
    """A percent of the limit, or more where NCCL takes more."""
    assert Option((), 99, 1.0).fits_well(100) and not Option((), 100, 1.0).fits_well(100)
    assert Option((), 98, 1.0, beside=2).fits_well(100) and not Option((), 99, 1.0, beside=2).fits_well(100)


def test_what_runs_out_does_not_fit_however_little_it_needs() -> None:
    full = [Option((), 50, 1.0, full=True)]
    found = search([], lambda taken: full[: len(taken)], 100)
    assert found.recommended is None and found.nearest == full[0]


def test_without_times_less_work_is_faster() -> None:
    half, full = (next(one for one in OURS if one.words == f"checkpointing={kind}") for kind in ("selective", "full"))
    sizes = {(): (100, (1.0, 1.0)), (half,): (60, (1.0, 2.0)), (full,): (40, (1.3, 2.0))}

    def predict(taken: Sequence[tuple[MemorySaving, ...]]) -> list[Option]:
        return [Option(these, sizes[these][0], None, work=sizes[these][1]) for these in taken]

    found = search([full, half], predict, 70)
    assert found.recommended is not None and found.recommended.remedies == (half,)
    assert [one.need for one in found.front] == [60, 40]


def resolved(**over: Any) -> dict[str, Any]:
    return trial_parser.parse(tiny(device={"name": "simulated", "gpu": "a100-80gb"}, **over)).model_dump(mode="json")


def test_remedies_are_changes_that_a_trial_can_have() -> None:
    base = resolved(micro_batch=8, grad_accum=2, attention="eager", runner={"name": "trainer"})
    names = [one.words for one in applicable(base)]
    assert names[:3] == ["micro_batch=4 grad_accum=4", "micro_batch=2 grad_accum=8", "micro_batch=1 grad_accum=16"]
    assert "attention=sdpa" in names and "attention=sdpa" not in [one.words for one in applicable(resolved())]
    for one in applicable(base):
        made = trial_parser.parse(apply_changes(base, [one]))
        assert made != trial_parser.parse(base), one.words
        assert made.micro_batch * made.grad_accum == 16
    assert not [one for one in applicable(resolved(micro_batch=1)) if one.group == "batch"]


def test_every_remedy_says_what_it_changes() -> None:
    for one in REMEDIES:
        assert bool(one.result) == (one.level >= PRECISION), one.words
        assert {word.partition("=")[0] for word in one.words.split()} == set(one.change), one.words


def test_what_a_card_is_too_old_for_says_so() -> None:
    bf16, fp16 = (next(one for one in REMEDIES if one.words == f"precision={name}") for name in ("bf16", "fp16"))
    assert "emulated" in (advice_search.too_old(bf16, (7, 5)) or "") and advice_search.too_old(bf16, (8, 0)) is None
    assert advice_search.too_old(fp16, (7, 5)) is None
    cached = resolved(use_cache="on", runner={"name": "trainer"})
    (full,) = (one for one in applicable(cached) if one.words.startswith("checkpointing=full"))
    # else the trial is refused, alone and with others
    assert trial_parser.parse(apply_changes(cached, [full])).use_cache == "off"
    names = [one.words for one in applicable(resolved(precision="fp32"))]
    assert "precision=fp16" in names and "offload_optimizer=true" not in names  # nothing is divided
    assert "precision=fp16" not in [one.words for one in applicable(resolved(precision="bf16"))]
    asked = resolved(allocator={"name": "mine", "conf": "per_process_memory_fraction:0.5"})
    assert "allocator=expandable" not in [one.words for one in applicable(asked)]


@pytest.mark.parametrize(("settings", "levels"), cases("levels_of_changes"))
def test_a_level_is_how_much_changes_of_this_trial(settings: str, levels: str) -> None:
    over = json.loads(settings)
    axis = next(iter(over))
    found = [one for one in applicable({**resolved(), **over}) if one.group == axis]
    assert {one.words.partition("=")[2]: advice_search.ACCEPTED[one.level] for one in found} == json.loads(levels)
    assert not any("AdamW" in one.result or "16" in one.result.replace("bf16", "").replace("fp16", "") for one in found)


@pytest.mark.parametrize(("quantization", "offered"), [("none", True), ("nf4", True), ("nf4_double", False)])
def test_adapters_keep_their_rank_where_weights_are_quantised(quantization: str, offered: bool) -> None:
    base = {**resolved(), "adapter": "lora", "lora_r": 64, "quantization": quantization}
    found = [one for one in applicable(base) if one.group == "quantization"]
    assert [(one.words, one.level) for one in found] == [("quantization=nf4_double", PRECISION)] * offered
    assert not [one for one in applicable({**base, "adapter": "none"}) if one.group == "quantization"]


def test_two_changes_of_one_setting_are_no_combination() -> None:
    base = resolved(use_cache="on", runner={"name": "trainer"})
    cached = [one for one in applicable(base) if "use_cache" in one.change]
    assert len(cached) == 3
    found = search(cached, lambda taken: [Option(these, 5, 1.0) for these in taken], 9)
    assert {len(one.remedies) for one in found.tried} == {0, 1} and found.space == 4


def test_words_of_remedies_take_the_place_of_others() -> None:
    nf4 = next(one for one in REMEDIES if {"adapter", "quantization"} == set(one.change))
    said = advice_search.words(["model=gpt2", "adapter=none", "seq_len=512"], [nf4])
    assert said == ["model=gpt2", "seq_len=512", "adapter=lora", "quantization=nf4_double"]


def test_how_many_is_the_user_s_choice() -> None:
    asked = Predictor()
    assert len(search(OURS, asked, 2500, most=0).tried) == 1 + len(OURS) == len(asked.asked)
    assert advice_search.MOST > 0
