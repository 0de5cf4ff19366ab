"""hydra/sweeper=adaptive, from the command line to what is measured, inferred and drawn."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import TARGETS, Cli, cases
from launchers import Still, error
from test_hydra import planned

from hydra_plugins.vramsweep import adaptive
from vramsweep.analysis.data.load import load
from vramsweep.analysis.figures.inferred import of_inferred
from vramsweep.harness.config import compose
from vramsweep.harness.files import sweep_folder
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.machine import machine
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.sweep import session, trial_loop

ADAPTIVE = ("-m", "hydra/sweeper=adaptive", "model=tiny", "device=cpu", "precision=fp32", "protocol=brief")


@pytest.mark.slow
def test_adaptive_measures_few_points_says_what_the_others_come_to_and_goes_on(here: Path, cli: Cli) -> None:
    words = [*ADAPTIVE, "seq_len=range(4,513,4)", "report=false"]
    out = cli.run("sweep", *words).out
    folder = here / "results" / "tiny-torch-cpu"
    rows = journal.terminal(journal.read(folder)[0])
    lines = {line["trial_id"]: line for line in sweep_folder.read_inferred(folder)}
    assert 9 < len(rows) <= 40 and len(rows) + len(lines) == 128 and not rows.keys() & lines.keys()
    assert f"{len(rows)} of 128 points measured" in out
    assert all(line["peak_allocated_bytes_basis"] == "curve" and line["fits"] for line in lines.values())
    assert not any("peak_reserved_bytes" in line for line in lines.values())  # a resident set, on a CPU
    (drawn,) = of_inferred(load(folder))
    assert drawn.name == "inferred"
    assert [one.name for one in drawn.plot.data if one.name] == ["allocated, inferred", "allocated, measured"]
    assert drawn.data["inferred"].count() == len(lines) and drawn.data["measured"].count() == len(rows)
    cli.run("sweep", *words)
    assert journal.terminal(journal.read(folder)[0]).keys() == rows.keys()

    other = ["-m", *ADAPTIVE[2:], "seq_len=100,300,500", "report=false", "name=plain"]
    cli.run("sweep", *other)
    for trial_id, row in journal.terminal(journal.read(here / "results" / "plain")[0]).items():
        known = lines[trial_id]["peak_allocated_bytes"] if trial_id in lines else rows[trial_id]["peak_allocated_bytes"]
        assert known == pytest.approx(row["peak_allocated_bytes"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("typed", "said"), cases("adaptive_mistakes"))
def test_what_adaptive_refuses(typed: str, said: str, here: Path, cli: Cli) -> None:
    assert said in cli.refuse("sweep", *ADAPTIVE, *typed.split())
    assert not list(here.rglob("journal.jsonl"))


@pytest.mark.slow
def test_adaptive_falls_into_configurations_and_plans_its_first_round(here: Path, cli: Cli) -> None:
    words = ("seq_len=64,128,5000", "micro_batch=1,2", "seed=0,1")
    trials = planned(cli, *ADAPTIVE, *words)
    assert len(trials) == 12  # so few are all asked for
    first = planned(cli, *ADAPTIVE, "seq_len=range(8,2049,8)")
    assert len(first) == 9
    every = compose.resolve([word for word in ADAPTIVE if "sweeper" not in word] + list(words)).trials
    own = adaptive.configurations(every)
    assert [len(of_one) for of_one in own] == [4, 4]
    assert all(len({every[n].resolved["seed"] for n in of_one}) == 1 for of_one in own)


def test_what_a_row_says_to_adaptive() -> None:
    peaks = {"peak_allocated_bytes": 5, "peak_reserved_bytes": 7, "device": "cuda", "device_total_bytes": 10 << 30}
    ok = adaptive.answer(peaks | {"outcome": "ok"})
    assert (ok.fits, ok.values) == (True, {"peak_allocated_bytes": 5, "peak_reserved_bytes": 7})
    squeezed = adaptive.answer(peaks | {"outcome": "ok", "alloc_retries": 3})
    assert squeezed.values == {"peak_allocated_bytes": 5}
    full = adaptive.answer(peaks | {"outcome": "oom"})
    assert full.fits is False and not full.values and full.limit == (10 << 30) - gpu_lookup.CONTEXT_BYTES
    for kind in ("crash", "timeout", "invalid", "contended"):
        assert adaptive.answer(peaks | {"outcome": kind}).fits is None
    skipped = adaptive.answer(peaks | {"outcome": "skipped"})
    assert skipped.fits is False and not skipped.measured
    assert adaptive.answer(peaks | {"outcome": "host_oom"}).fits is False


class Measuring(Still):
    """It knows the answer by the length; at those of `failing` it crashes. Each trial takes a second."""

    failing: tuple[int, ...] = ()

    def answer(self, spec: Any, *_: Any) -> Evidence:
        length = spec["trial"]["seq_len"]
        if length in self.failing:
            return error("X", "odd")
        values = {"peak_allocated_bytes": max(1 << 30, length << 22), "loss_last": 1.0}
        return Evidence(exit_code=0, result={"values": values})


Measured = Callable[..., tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]


@pytest.fixture
def measured(here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Measured:
    """Sweep with that launcher: what is printed, the terminal rows, and what was inferred."""

    def run(*words: str, failing: tuple[int, ...] = ()) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
        monkeypatch.setattr(session, "Launcher", type("Own", (Measuring,), {"failing": failing}))
        out = cli.run("sweep", *ADAPTIVE, "report=false", "name=t", *words, status=int(bool(failing))).out
        place = here / "results" / "t"
        return out, list(journal.terminal(journal.read(place)[0]).values()), sweep_folder.read_inferred(place)

    return run


def test_adaptive_counts_only_what_was_measured_where_a_budget_ends_it(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10**6, 20))  # so that a busy machine's own seconds do not count
    monkeypatch.setattr(trial_loop, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + next(clock)))
    said, rows, lines = measured("seq_len=range(8,1025,8)", "budget=120s", "retries=0")
    assert 0 < len(rows) < 9 and len(rows) + len(lines) == 128
    assert f"{len(rows)} of 128 points measured" in said and "because the budget ended the search" in said


@pytest.mark.slow
def test_adaptive_infers_what_failed_too_and_keeps_other_configurations(measured: Measured) -> None:
    words = ("seq_len=range(8,1025,8)", "retries=0", "breaker=0")
    said, rows, lines = measured(*words, failing=(1024,))
    failed = [row["trial_id"] for row in rows if row["outcome"] != "ok"]
    assert len(failed) == 1 and failed[0] in {line["trial_id"] for line in lines}
    assert f"{len(rows) - 1} of 128 points measured, 1 failed" in said
    assert len(rows) - 1 + len(lines) == 128
    more = measured(*words, "precision=bf16")[2]
    assert len(more) > len(lines) and {line["trial_id"] for line in lines} <= {line["trial_id"] for line in more}


@pytest.mark.slow
def test_adaptive_takes_a_preset_s_lengths(measured: Measured) -> None:
    assert " of 187 points measured" in measured("sweep=lengths")[0]


@pytest.mark.slow
def test_adaptive_predicts_for_a_card_first_in_a_folder_beside(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["-m", "model=tiny", "device=cuda", "seq_len=64,128,192,256", "precision=fp32", "protocol=brief"]
    asked = compose.resolve([*words, "predict=l4-24gb", "results=out", "name=night"])
    assert asked.settings is not None
    grid = adaptive.predicted_grid(asked.trials, asked)
    assert grid.fits is not None and grid.fits.all()
    assert set(grid.phase or ()) <= {"load", "forward", "backward", "optimizer"}
    rows = journal.terminal(journal.read(here / "out" / "night-predicted")[0])
    assert {row["device"] for row in rows.values()} == {"simulated"} and len(rows) == 4
    assert sorted(grid.predicted["peak_allocated_bytes"]) == sorted(r["peak_allocated_bytes"] for r in rows.values())
    off = dataclasses.replace(asked, settings=dataclasses.replace(asked.settings, predict=False))
    assert not adaptive.predicted_grid(asked.trials, off).predicted


CARD = machine.Gpu(0, "NVIDIA L4", "GPU-1", "580", 23 << 30, 0, ())
ON_CARD = ("-m", "hydra/sweeper=adaptive", "model=tiny", "device=cuda", "precision=fp32", "protocol=brief",
           "report=false", "name=t", "seq_len=range(16,2049,16)")  # fmt: skip


class OnACard(Measuring):
    """It measures what is predicted, and a part above it that grows; beyond `LIMIT` it has no more memory."""

    LIMIT = 400 << 20

    @staticmethod
    def need(row: Mapping[str, Any], name: str) -> int:
        return int(row[name] * 1.03) + (150 << 20)

    def answer(self, spec: Any, folder: Path, *_: Any) -> Evidence:
        rows = journal.terminal(journal.read(folder.parents[3].with_name("t-predicted"))[0]).values()
        (row,) = (row for row in rows if row["seq_len"] == spec["trial"]["seq_len"])
        peaks = {name: self.need(row, name) for name in ("peak_allocated_bytes", "peak_reserved_bytes")}
        total = {"device_total_bytes": self.LIMIT + gpu_lookup.CONTEXT_BYTES}
        if peaks["peak_reserved_bytes"] > self.LIMIT:
            return error("torch.OutOfMemoryError", "CUDA out of memory", **total)
        return Evidence(exit_code=0, result={"values": {**peaks, **total, "loss_last": 1.0}})


@pytest.fixture
def one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [CARD])
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [CARD])
    monkeypatch.setattr(machine, "again", lambda cards: cards)


@pytest.mark.slow
@pytest.mark.usefixtures("one_card")
def test_adaptive_on_a_card_measures_few_beside_its_predictions_and_finds_what_fits(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(session, "Launcher", OnACard)
    assert "predicting 128 points for l4-24gb" in cli.run("sweep", *ON_CARD).err
    folder = here / "results" / "t"
    measured = journal.terminal(journal.read(folder)[0]).values()
    assert {row["device"] for row in measured} == {"cuda"} and len(measured) <= 30
    truth = {row["seq_len"]: row for row in journal.terminal(journal.read(folder.with_name("t-predicted"))[0]).values()}
    lines = sweep_folder.read_inferred(folder)
    assert len(lines) + len(measured) == 128
    edge = max(row["seq_len"] for row in measured if row["outcome"] == "ok")
    full = min(row["seq_len"] for row in measured if row["outcome"] == "oom")
    assert full - edge <= 16 * 0.05 * 128  # of five points in a hundred it may stay open
    for line in lines:
        row = truth[line["seq_len"]]
        fits = OnACard.need(row, "peak_reserved_bytes") <= OnACard.LIMIT
        assert line["fits"] in (fits, None)
        if line["fits"]:
            assert line["peak_allocated_bytes_basis"] == "prediction+residual"
            assert line["peak_allocated_bytes"] == pytest.approx(OnACard.need(row, "peak_allocated_bytes"), rel=0.01)


@pytest.mark.slow
@pytest.mark.usefixtures("one_card")
def test_adaptive_goes_on_without_predictions_where_a_target_cannot_be_traced(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(session, "Launcher", Measuring)
    own = (*ON_CARD[:-1], "runner=custom", f"runner.target={TARGETS / 'simulated_faults.py'}:raises_beyond_4")
    said = cli.run("sweep", *own, "seq_len=range(16,1025,16)")
    lines = sweep_folder.read_inferred(here / "results" / "t")
    rows = journal.terminal(journal.read(here / "results" / "t")[0]).values()
    assert {row["outcome"] for row in rows} == {"ok"} and len(rows) + len(lines) == 64
    assert {line["peak_allocated_bytes_basis"] for line in lines} == {"curve"}
    for line in lines:
        assert line["peak_allocated_bytes"] == pytest.approx(max(1 << 30, line["seq_len"] << 22), rel=0.01)
    assert "too long for me" in said.out + said.err  # why nothing was predicted
