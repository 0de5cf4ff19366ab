"""Lengths that vary: what is read, drawn, padded and packed, by examples counted by hand."""

import itertools
import json
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, cases, custom, parametrized, refusal, tiny

from vramsweep.harness.spec import length_distribution, trial_identity, trial_parser
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec.fit_text import describe_trial
from vramsweep.harness.sweep import plan
from vramsweep.harness.sweep.budget import Budget

SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}


def listed(folder: Path, text: str) -> str:
    path = folder / "lengths.txt"
    path.write_text(text)
    return f"lengths:{path}"


def tried(**over: Any) -> trials.Trial:
    return trial_parser.parse(tiny(**over))


def refused(**over: Any) -> str:
    return refusal(trials.InvalidTrial, tried, **over)


def identity(trial: trials.Trial) -> str:
    return trial_identity.trial_id(trial.model_dump(mode="json"))


@parametrized("spellings_of_lengths")
def test_lists_and_histograms_say_the_same(tmp_path: Path, text: str) -> None:
    found = length_distribution.source(listed(tmp_path, text))
    assert found == length_distribution.Listed((5, 7), (1, 4))
    assert [found.at(share) for share in (0.01, 0.24, 0.26, 0.99)] == [5, 5, 7, 7]


def test_a_histogram_is_drawn_as_often_as_it_counts(tmp_path: Path) -> None:
    found = length_distribution.source(listed(tmp_path, "10,1\n20,3\n"))
    drawn = list(itertools.islice(length_distribution.drawn(found, 3, 64), 4000))
    assert set(drawn) == {10, 20}
    assert drawn.count(20) / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_lognormal_has_its_median_and_its_spread() -> None:
    lognormal = length_distribution.Lognormal(500, 0.8)
    drawn = sorted(itertools.islice(length_distribution.drawn(lognormal, 0, 1 << 20), 20_000))
    assert drawn[10_000] == pytest.approx(500, rel=0.03)
    assert statistics.fmean(drawn) == pytest.approx(500 * 2.718281828 ** (0.8**2 / 2), rel=0.05)
    assert drawn[int(20_000 * 0.841)] / 500 == pytest.approx(2.718281828**0.8, rel=0.05)


def test_lengths_hang_on_the_seed_alone_and_are_cut_to_seq_len() -> None:
    data = "lengths:lognormal(20,1)"
    one = length_distribution.batches(tried(data=data, allocator={"name": "expandable", "conf": ""}), 6)
    longer = length_distribution.batches(
        tried(data=data, protocol={"measured_steps": 40}, runner={"name": "trainer"}), 20
    )
    assert longer[:6] == one
    assert length_distribution.batches(tried(data=data, seed=1), 6) != one
    drawn = [n for sample in length_distribution.documents(tried(data=data, seq_len=16), 200) for n in sample]
    assert max(drawn) == 16 and min(drawn) >= 1 and len(set(drawn)) > 8


def test_padding_to_the_longest_to_multiples_and_to_the_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [3, 9, 17, 16, 1, 1, 30, 8]
    monkeypatch.setattr(length_distribution, "drawn", lambda *_: itertools.cycle(given))
    for to, *widths in (("longest", 9, 17, 1, 30), ("8", 16, 24, 8, 32), ("max", 32, 32, 32, 32)):
        steps = length_distribution.batches(tried(data="lengths:lognormal(9,1)", padding_to=to), 4)
        shapes = [(one.samples, one.width, one.kept) for step in steps for one in step]
        assert shapes == [(2, width, kept) for width, kept in zip(widths, (12, 33, 2, 38), strict=True)], to
    trial = tried(data="lengths:lognormal(9,1)", protocol={"warmup_steps": 1, "measured_steps": 2})
    seen = length_distribution.length_columns(trial)  # the last two of four steps
    assert seen == {
        "padding_fraction": pytest.approx(1 - 40 / 62), "shortest_document": 1, "mean_document": 10.0,
        "longest_document": 30,
    }  # fmt: skip


def test_documents_are_joined_and_cut_at_the_whole_length() -> None:
    rows = length_distribution.packed([5, 3, 20, 2, 1, 9], 10)
    assert list(rows) == [(5, 3, 2), (10,), (8, 2), (1, 9)]


def test_ranks_take_batches_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_distribution, "drawn", lambda *_: itertools.count(1))
    trial = tried(data="lengths:lognormal(9,1)", sharding="ddp", world_size=2, grad_accum=2, micro_batch=1)
    (first, second) = length_distribution.batches(trial, 2)
    assert [one.width for one in first] == [1, 2, 3, 4]
    assert [one.width for one in length_distribution.of_rank(second, 1, 2)] == [6, 8]


def test_the_file_counts_by_its_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("5\n7\n")
    (tmp_path / "b").write_text("5\n7\n")
    one, other = (tried(data=f"lengths:{tmp_path / name}") for name in "ab")
    assert identity(one) == identity(other) != identity(tried())
    (tmp_path / "b").write_text("5\n8\n")
    assert identity(tried(data=f"lengths:{tmp_path / 'b'}")) != identity(one)


def test_a_multiple_may_be_a_number() -> None:
    assert tried(data="lengths:lognormal(9,1)", padding_to=16) == tried(data="lengths:lognormal(9,1)", padding_to="16")


@pytest.mark.parametrize(("data", "said"), cases("lengths_words"))
def test_what_says_no_lengths_is_refused(data: str, said: str) -> None:
    assert said in refused(data=data)


@pytest.mark.parametrize(("text", "said"), cases("lengths_files"))
def test_a_file_of_something_else_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(data=listed(tmp_path, json.loads(text)))


def test_errors_are_short_and_name_what_cannot_be_read(tmp_path: Path) -> None:
    for text, said in (
        ("[" * 100_000, "is not JSON"),
        ("9" * 5000, "... (5,002 characters) is not a length"),
        ("5," + "9" * 400, "is not a length"),
        ("5,7,9," * 30_000, "... (180,002 characters) is not a length"),
    ):
        assert said in refused(data=listed(tmp_path, text))
    for text in ("7," * 100_000, f"[{'[' * 50_000}{']' * 50_000}]", f'["{"7" * 100_000}"]'):
        assert len(refused(data=listed(tmp_path, text))) < 400
    assert "there is no file nnn" in refused(data=f"lengths:{'n' * 300}")
    data = listed(tmp_path, "5\n")
    (tmp_path / "lengths.txt").chmod(0)
    if os.geteuid():  # root reads everything
        assert f"{tmp_path / 'lengths.txt'} cannot be read: Permission denied" in refused(data=data)


def test_a_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Path] = []
    lines = length_distribution._lines
    monkeypatch.setattr(length_distribution, "_lines", lambda place, text: parsed.append(place) or lines(place, text))
    data = listed(tmp_path, "5\n7\n")
    for _ in range(2):
        assert length_distribution.source(data) == length_distribution.Listed((5, 7), (1, 2))
    assert len(parsed) == 1
    listed(tmp_path, "5\n7\n9\n")
    assert length_distribution.source(data) == length_distribution.Listed((5, 7, 9), (1, 2, 3))


def test_what_is_estimated_goes_with_the_lengths() -> None:
    short, whole = (
        Budget(plan.Settings(**(SETTINGS | {"timeout_s": 1e9})), flops=1e6)
        .total(plan.order_trials(plan.expand_trials([tiny(seq_len=4096, data=data)], 1)))
        .seconds
        for data in ("lengths:lognormal(64,0.5)", "synthetic")
    )
    assert short is not None and whole is not None
    assert 64 / 4096 * 0.8 < (short - 2) / (whole - 2) < 64 / 4096 * 2  # batches of two are as wide as the longer one


def test_labels_say_what_is_drawn_from(tmp_path: Path) -> None:
    assert "data=lengths:lognormal(9,1)" in describe_trial(tried(data="lengths:lognormal(9,1)"))
    assert "data=lengths:lengths.txt" in describe_trial(tried(data=listed(tmp_path, "5\n")))
    assert "data" not in describe_trial(tried())


def test_a_seed_is_no_negative_number() -> None:
    assert "seed = -1: allowed is 0 or more" in refused(seed=-1)


def test_settings_that_do_not_go_together_say_what_would() -> None:
    data = "lengths:lognormal(9,1)"
    assert "padding=0.5 needs data=synthetic" in refused(data=data, padding=0.5)
    assert "padding_to=64 needs data=lengths:" in refused(padding_to="64")
    assert "choose longest (of the batch), a multiple such as 64, or max" in refused(data=data, padding_to="shortest")
    assert "which is no multiple of it; use seq_len=24" in refused(data=data, padding_to="12")
    assert "packed samples are all full" in refused(data=data, padding_to="8", packing="wrapped")
    own = {"runner": custom("good")["runner"], "data": data, "device": SIMULATED}
    assert "cannot be predicted, because it is unknown how the target uses a length" in refused(**own)
    flash = {"data": data, "attention": "flash_attention_2", "precision": "bf16", "device": SIMULATED}
    assert "padding of varying lengths cannot be predicted" in refused(**flash)
    assert tried(**flash, micro_batch=1).micro_batch == 1
    assert tried(data=data, packing="documents").packing == "documents"
    for mistake in ({"padding_to": "0"}, {"data": "lengths:nothing"}):  # nothing that rests on one is looked at
        assert len([*length_distribution.lengths_problem(tried(data=data).model_copy(update=mistake))]) == 1
