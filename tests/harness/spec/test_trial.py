"""Identity and validity of trials."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import cases, custom, parametrized, refusal, tiny

from vramsweep.harness.spec import runner_table, trial_identity, trial_parser
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec.fit_text import describe_trial


def identity(values: dict[str, Any]) -> str:
    return trial_identity.trial_id(trial_parser.parse(values).model_dump(mode="json"))


def test_same_values_give_the_same_id_whatever_their_order() -> None:
    assert identity(tiny()) == identity(dict(reversed(list(tiny().items()))))


@parametrized("changes_of_trials")
def test_any_changed_setting_is_a_new_trial(change: dict[str, Any]) -> None:
    assert identity(tiny(**change)) != identity(tiny())


@parametrized("changes_of_names")
def test_names_and_defaults_do_not_make_a_trial(change: dict[str, Any]) -> None:
    assert identity(tiny(**change)) == identity(tiny())


def test_a_new_axis_changes_no_id_while_it_is_at_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = trial_parser.parse(tiny()).model_dump(mode="json")
    monkeypatch.setitem(trial_identity.ID_DEFAULTS, ("galore",), False)
    assert trial_identity.trial_id(resolved | {"galore": False}) == trial_identity.trial_id(resolved)
    assert trial_identity.trial_id(resolved | {"galore": True}) != trial_identity.trial_id(resolved)


def test_ids_are_frozen() -> None:
    """A change of these is a new version of the ids: every journal out there would run anew."""
    assert identity(tiny()) == "8145e009cbffcfe0"
    divided = tiny(runner={"name": "deepspeed"}, sharding="zero3", world_size=8, offload_optimizer=True)
    assert identity(divided) == "66f8abef81e82f10"
    assert identity(tiny(device=SIMULATED, precision="bf16", attention="eager")) == "32f5c810ba30cacf"


def test_what_is_left_out_are_the_defaults_of_today() -> None:
    given = {"model", "seq_len", "micro_batch", "precision", "allocator", "runner", "device", "protocol"}
    defaults = {
        name: f.default for name, f in trials.Trial.model_fields.items() if name not in {*given, "fingerprints"}
    }
    assert defaults == {path[0]: value for path, value in trial_identity.ID_DEFAULTS.items() if len(path) == 1}


def test_a_raised_measurement_version_is_a_new_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(tiny()), identity(tiny(runner={"name": "trainer"}))
    raised = tuple(replace(r, measurement=99) if r.name == "torch" else r for r in runner_table.RUNNERS)
    monkeypatch.setattr(runner_table, "RUNNERS", raised)
    assert identity(tiny()) != before[0]
    assert identity(tiny(runner={"name": "trainer"})) == before[1]


def test_a_file_counts_by_what_is_in_it_not_by_where_it_is(tmp_path: Path) -> None:
    ids = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        target = tmp_path / folder / "mine.py"
        target.write_text("def build(trial): pass\ndef other(trial): pass")
        ids += [identity(tiny(runner={"name": "custom", "target": f"{target}:{f}"})) for f in ("build", "other")]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]


def test_a_file_counts_by_what_is_in_it_however_it_is_spelled(here: Path) -> None:
    ids = []
    for text in ("def build(trial): pass", "def build(trial): return 1"):
        Path("mine.py").write_text(text)
        spellings = ("mine.py", "./mine.py", f"{here}//mine.py", f"../{here.name}/mine.py")
        ids.append({identity(tiny(runner={"name": "custom", "target": f"{name}:build"})) for name in spellings})
    assert [len(found) for found in ids] == [1, 1]
    assert ids[0] != ids[1]


def test_an_empty_or_null_option_of_a_library_says_something() -> None:
    def of(**options: Any) -> str:
        return identity(tiny(runner={"name": "deepspeed", "options": options}, sharding="zero2"))

    assert len({of(), of(activation_checkpointing={}), of(zero_optimization={"round_robin_gradients": None})}) == 3


def test_the_same_model_in_two_folders_is_one_trial_unless_its_tokens_differ(tmp_path: Path) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("one two")
    ids = {}
    for folder, tokenizer in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "tokenizer.json").write_text(tokenizer)
        model = {"name": folder, "model_type": None, "path": str(tmp_path / folder), "config": {}}
        values = tiny() | {"model": model}
        ids[folder] = identity(values), identity(values | {"data": str(text)})
    assert ids["a"] == ids["b"]
    assert ids["a"][0] == ids["c"][0]
    assert ids["a"][1] != ids["c"][1]


def test_equal_allocator_texts_are_one_trial() -> None:
    cuda = {"device": {"name": "cuda"}}
    one = tiny(**cuda, allocator={"name": "a", "conf": "max_split_size_mb:128,expandable_segments:True"})
    two = tiny(**cuda, allocator={"name": "a", "conf": " expandable_segments:True , max_split_size_mb:128"})
    assert trial_parser.parse(one).allocator.conf == trial_parser.parse(two).allocator.conf
    assert identity(one) == identity(two)


SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}


def test_options_of_a_target_are_its_own_and_null_leaves_one_to_the_library() -> None:
    target = {"name": "custom", "target": f"{__file__}:build", "options": {"static_graph": 5}}
    assert trial_parser.parse(tiny(runner=target)).runner.options == {"static_graph": 5}
    left = {"name": "trainer", "options": {"ddp_bucket_cap_mb": None}}
    assert trial_parser.parse(tiny(runner=left, sharding="ddp", world_size=2)).runner.options == left["options"]


@pytest.mark.parametrize(("settings", "reason"), cases("impossible_trials"))
def test_impossible_combinations_say_why(settings: str, reason: str) -> None:
    said = refusal(trials.InvalidTrial, trial_parser.parse, tiny(**json.loads(settings)))
    assert reason in said and "\n" not in said


def test_a_capability_may_be_typed_as_a_number() -> None:
    trial = trial_parser.parse(tiny(device={**SIMULATED, "memory_gib": 8, "capability": 7.5, "headroom_gib": 0.5}))
    assert (trial.device.card.capability, trial.device.card.headroom_gib) == ((7, 5), 0.5)
    label = describe_trial(trial)
    assert all(one in label for one in ("device.memory_gib=8.0", "device.capability=7.5", "device.headroom_gib=0.5"))
    assert identity(tiny(device=SIMULATED)) == identity(tiny(device={**SIMULATED, "headroom_gib": 0}))


@pytest.mark.parametrize(
    ("typed", "meant"), [(8, (8, 0)), (9, (9, 0)), (10, (10, 0)), ("12", (12, 0)), (10.3, (10, 3))]
)
def test_a_whole_number_is_a_capability_too(typed: Any, meant: tuple[int, int]) -> None:
    trial, spelled = (
        trial_parser.parse(tiny(device={**SIMULATED, "memory_gib": 8, "capability": one}))
        for one in (typed, ".".join(map(str, meant)))
    )
    assert trial.device.card.capability == meant
    assert trial == spelled


def test_steps_and_tokens() -> None:
    trial = trial_parser.parse(tiny(grad_accum=3, seq_len=10, micro_batch=4))
    assert trial.tokens_per_step() == 120
    assert trial.samples_per_step() == 12
    assert trial.steps() == 1 + 1 + 2 + 1


def test_custom_needs_no_model_architecture() -> None:
    values = custom("good")
    values["model"] = {"name": "mine"}
    assert trial_parser.parse(values).model.name == "mine"


def test_custom_targets_find_the_trial_by_its_names() -> None:
    import vramsweep
    import vramsweep.harness.trial as earlier

    assert vramsweep.Trial is earlier.Trial is trials.Trial
