"""`why` of rows, and what it predicts only if the settings are the user's or ours."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Cli, tiny

from vramsweep.harness.rows.schema import BY_NAME
from vramsweep.harness.search.advice_search import Advice, Option
from vramsweep.harness.search.memory_savings import REMEDIES
from vramsweep.harness.sweep import plan
from vramsweep.harness.verbs import advise, why

GIB = 1 << 30
FULL = next(one for one in REMEDIES if one.words == "checkpointing=full")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the words that predictions were asked for."""
    words: list[list[str]] = []
    base, full = Option((), 20 * GIB, 2e-5), Option((FULL,), 9 * GIB, 3e-5)
    [[item]] = plan.expand_trials([tiny(device={"name": "simulated", "gpu": "t4-16gb"})], 1)

    def ask(given: Any, **_: Any) -> Any:
        words.append(list(given))
        asked = SimpleNamespace(base=item, trial=item.trial, axis=None)
        return asked, Advice(base, (full,), (base, full), 2, 14 * GIB), []

    monkeypatch.setattr(advise, "ask", ask)
    return words


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return a folder with one predicted row out of memory."""
    [[item]] = plan.expand_trials([tiny(device={"name": "simulated", "gpu": "t4-16gb"})], 1)
    item.resolved["model"]["name"] = "theirs/gpt"
    row = {
        "schema_version": 2, "trial_id": item.trial_id, "terminal": True, "outcome": "oom", "device": "simulated",
        "reason": "too [red]small\x1b", "phase": "step 0, forward", "trial": item.resolved,
        "oom_request_bytes": 2 * GIB, "oom_allocated_bytes": 12 * GIB, "oom_reserved_bytes": 13 * GIB,
        "memory_limit_bytes": 14 * GIB, "unlimited_peak_reserved_bytes": 30 * GIB,
        "oom_parts_bytes": {"parameters": 1 * GIB, "activations": 13 * GIB},
    }  # fmt: skip
    (tmp_path / "journal.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_a_row_is_explained_and_a_model_of_the_folder_s_own_is_not_predicted(
    sweep: Path, cli: Cli, asked: list[list[str]]
) -> None:
    printed = cli.run("why", sweep).out
    assert "predicted; 1 of 1 trials did" in printed and "\x1b" not in printed and "[red]" in printed
    assert "12.0 GiB  allocated: activations 13.0 GiB, parameters 1.0 GiB (with the failed request)" in printed
    assert " 1.0 GiB  reserved but unused" in printed and "30.0 GiB reserved; on: rtx5090-32gb" in printed
    assert "to change: smaller micro_batch" in printed and len(printed.splitlines()) <= 20
    assert asked == [], "the model is not built in"
    assert "no finished trial" in cli.refuse("why", sweep, "abc")


def test_words_after_the_file_are_predicted_and_named_so(tmp_path: Path, cli: Cli, asked: list[list[str]]) -> None:
    (tmp_path / "x.log").write_text("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB")
    printed = cli.run("why", tmp_path / "x.log", "model=gpt2", "seq_len=1024", "gpu=t4-16gb").out.splitlines()
    assert asked == [["model=gpt2", "seq_len=1024", "device.gpu=t4-16gb"]] and len(printed) <= 20
    assert next(line for line in printed if line.startswith("predicted for"))
    assert "  20.0 GiB  reserved: unchanged (too much)" in printed
    assert "   9.0 GiB  reserved: checkpointing=full (fits, recommended)" in printed
    found = cli.json("why", tmp_path / "x.log", "model=gpt2")["predicted"]
    assert found["as_it_is"]["reserved_bytes"] == 20 * GIB


@pytest.mark.slow
def test_a_row_of_a_built_in_model_gives_the_words_of_its_settings() -> None:
    from vramsweep.harness.config import compose

    words = ["model=gpt2", "seq_len=512", "micro_batch=4", "checkpointing=full", "device.gpu=t4-16gb"]
    [item] = compose.resolve(["device=simulated", *words], "explain").trials
    row = dict.fromkeys(BY_NAME) | {"device": "simulated", "trial": item.resolved, "trial_id": item.trial_id}
    typed, ours = why.settings_of_row(row)
    assert ours and set(words) <= set(typed)
    [again] = compose.resolve(["device=simulated", *typed], "explain").trials
    assert again.resolved | {"protocol": None} == item.resolved | {"protocol": None}
    theirs = item.resolved | {"model": item.resolved["model"] | {"path": "theirs/gpt"}}
    assert not why.settings_of_row(row | {"trial": theirs})[1]
    assert why.settings_of_row(row | {"trial": None, "model": "gpt2", "seq_len": 8}) == (
        ["model=gpt2", "seq_len=8"],
        False,
    )
