"""An `invalid` is decided again where what it depended on has changed, and only there."""

from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, tiny
from launchers import CARDS, StandIn, error

from vramsweep.harness.machine import machine
from vramsweep.harness.rows import journal
from vramsweep.harness.sweep import plan, resume, row_builder, run_trials

INVALID = error("vramsweep.harness.spec.trial.InvalidTrial", "transformers does not take it")
VERSIONS = {"vramsweep_version": "0.2.0", "torch_version": "2.13.0", "transformers_version": "5.16.0"}


def test_what_was_invalid_runs_again_where_a_version_has_changed_and_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ddp = {"sharding": "ddp", "world_size": 2, "device": {"name": "cuda"}}  # and there is one card
    values = [*(tiny(seed=n) for n in range(5)), tiny(seq_len=0), tiny(**ddp)]
    facts: dict[str, Any] = {"cpu_name": "one", "git_commit": "abc"} | VERSIONS
    monkeypatch.setattr(machine, "gpus", lambda: CARDS[:1])
    monkeypatch.setattr(machine, "machine_facts", lambda: dict(facts))

    def began(changed: dict[str, Any], **over: Any) -> tuple[int, str]:
        """How many rows another run adds, with these facts, and what it says of it."""
        facts.update(changed)
        before = len(journal.read(tmp_path / "t")[0]) if (tmp_path / "t").exists() else 0
        settings = plan.Settings(**(SETTINGS | {"isolation": "warm"} | over))
        launcher: Any = StandIn({0: INVALID, 1: INVALID, 2: INVALID}, 0)
        capsys.readouterr()
        run_trials.run(plan.order_trials(plan.expand_trials(values, 1)), settings, tmp_path / "t", launcher=launcher)
        return len(journal.read(tmp_path / "t")[0]) - before, capsys.readouterr().err

    were = "3 trials were invalid with {} and run again with {}\n"
    assert began({})[0] == 7
    assert began({}) == began({"git_commit": "abc+dirty"}) == (0, "")
    assert began({}, retry_failed=True) == (3, "")
    assert began({"vramsweep_version": "0.3.0"}) == (3, were.format("vramsweep 0.2.0", "0.3.0"))
    assert began({"git_commit": "def"}) == (3, were.format("vramsweep's commit abc", "def"))
    newer = began({"transformers_version": "5.17.0"}, any_system=True)
    assert newer == (3, were.format("transformers 5.16.0", "5.17.0"))
    count, said = began({"torch_version": "2.14.0"})
    assert count == 5 and were.format("torch 2.13.0", "2.14.0") in said and "2 trials were measured on another" in said
    assert began({}) == began({"git_commit": None}) == (0, "")  # what is not known is not compared
    monkeypatch.setattr(machine, "gpus", lambda: CARDS[:2])
    assert began({})[0] == 1  # which was impossible here, and no longer is


def test_an_optional_package_and_the_file_of_a_target_count_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "version", {"peft": "0.19.0"}.get)
    own = tiny(adapter="lora", device={"name": "simulated", "gpu": "h100-80gb"})
    (lora,) = plan.order_trials(plan.expand_trials([own], 1))
    row = row_builder.initial_columns(lora) | {"outcome": "invalid", "attempt": 1}
    assert row["package_versions"] == {"peft": "0.19.0"} and not row_builder.find_outdated([lora], {lora.trial_id: row})
    monkeypatch.setattr(machine, "version", {"peft": "0.20.0"}.get)
    wanted = {lora.trial_id: "invalid with peft 0.19.0 and run again with 0.20.0"}
    assert row_builder.find_outdated([lora], {lora.trial_id: row}) == wanted
    assert not row_builder.find_outdated([lora], {lora.trial_id: {"outcome": "invalid", "attempt": 1}})  # an old row
    target = tmp_path / "own.py"
    found = []
    for text in ("def mistyped(): ...", "def train(): ..."):
        target.write_text(text)
        own = tiny(runner={"name": "custom", "target": f"{target}:train"})
        found += plan.order_trials(plan.expand_trials([own], 1))
    assert resume.pending_trials(found, {found[0].trial_id: {"outcome": "invalid", "attempt": 1}}, False) == found[1:]
