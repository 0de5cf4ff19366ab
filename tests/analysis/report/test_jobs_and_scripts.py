"""Test the report on whole jobs (protocol=job) and scripts (runner=script), with rows of known numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import synthetic
from conftest import Cli, tiny

from vramsweep.analysis.data import parts
from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import Table, load
from vramsweep.analysis.data.metrics import MIB
from vramsweep.analysis.figures.phases import of_jobs
from vramsweep.analysis.figures.style import View
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.model.fit import fit_table
from vramsweep.analysis.report.content import collect
from vramsweep.analysis.report.page import render
from vramsweep.harness.rows.schema import Row, complete_row


def job(length: int, evaluation: float, steps: float = 4, batch: int = 2, **over: Any) -> Row:
    """A whole job on a CPU whose parts took so many MiB."""
    (one,) = synthetic.sweep(lengths=(length,), batches=(batch,), allocators=("default",), repeats=1)
    sizes = {"load": 1, "first_step": steps - 1, "steps": steps, "evaluation": evaluation, "save": 2}
    peaks = {part: int(size * MIB) for part, size in sizes.items()}
    largest = max(peaks, key=lambda part: peaks[part])
    known = {"protocol": "job", "part_peak_allocated_bytes": peaks, "largest_part": largest}
    return complete_row(one | known | over)


def table(*rows: Row) -> Table:
    return synthetic.table(rows)


pytestmark = pytest.mark.deterministic
JOBS = (job(32, 11), job(64, 11, 6), job(128, 5, 6))


@pytest.mark.slow
def test_parts_are_read_from_a_journal_and_written_into_every_export(tmp_path: Path, cli: Cli) -> None:
    folder = synthetic.write(tmp_path / "jobs", JOBS)
    (folder / "damaged").mkdir()
    text = (folder / "journal.jsonl").read_text()
    (folder / "damaged" / "journal.jsonl").write_text(text + '{"half": ')  # is read line by line
    cli.run("export", folder, tmp_path / "rows.csv")
    for place in (folder, folder / "damaged", tmp_path / "rows.csv"):
        texts = load(place).frame["part_peak_allocated_bytes"]
        assert [json.loads(one) for one in texts] == [one["part_peak_allocated_bytes"] for one in JOBS]


@pytest.mark.slow
def test_the_part_that_needs_most_is_said_with_its_size_and_setting() -> None:
    assert parts.sentences(parts.jobs(groups(table(*JOBS)))) == [
        "In 2 of 3 jobs evaluation needs most (allocated): at worst 11.0 MiB where the steps need 4.0 MiB (32 tokens · "
        "batch 2)."
    ]
    assert parts.sentences(parts.jobs(groups(table(job(128, 5, 6))))) == [
        "In 1 job the steps need most (allocated): 6.0 MiB; evaluation comes next with 5.0 MiB (128 tokens · batch 2)."
    ]
    assert parts.sentences([]) == []


def test_what_an_evaluation_leaves_in_the_cache_is_no_need_of_the_steps_after_it() -> None:
    reserved = {"steps": 24 * MIB, "evaluation": 24 * MIB}
    found = parts.jobs(groups(table(job(32, 24, 10, part_peak_reserved_bytes=reserved))))
    assert [(one.base, one.largest) for one in found] == [("allocated", "evaluation")]
    assert parts.sentences(found)[0].startswith("In 1 of 1 job evaluation needs most (allocated): 24.0 MiB where the")
    assert "evaluation needs more, by up to 14.0 MiB allocated (32 tokens" in parts.remark(found)


def test_a_part_that_needs_more_of_reserved_alone_is_said_beside_what_fits() -> None:
    reserved = {"steps": 12 * MIB, "evaluation": 40 * MIB}
    found = parts.jobs(groups(table(job(32, 8, 10, part_peak_reserved_bytes=reserved))))
    assert [one.largest for one in found] == ["steps"]
    assert "evaluation needs more, by up to 28.0 MiB reserved (32 tokens" in parts.remark(found)


def test_where_only_reserved_is_known_it_decides_and_steps_that_are_not_known_are_not_0() -> None:
    alone = {"part_peak_allocated_bytes": None, "largest_part": "evaluation"}
    known = {"steps": 40 * MIB, "evaluation": 80 * MIB}
    (one,) = parts.jobs(groups(table(job(32, 1, part_peak_reserved_bytes=known, **alone))))
    assert (one.base, one.largest, one.excess) == ("reserved", "evaluation", (40 * MIB, "evaluation", "reserved"))
    (one,) = parts.jobs(groups(table(job(32, 1, part_peak_reserved_bytes={"evaluation": 80 * MIB}, **alone))))
    assert (one.largest, parts.remark([one])) == ("evaluation", "")


def view(*rows: Row) -> View:
    loaded = table(*rows)
    return View(loaded, groups(loaded), jobs=parts.jobs(groups(loaded)))


@pytest.mark.slow
def test_the_figure_has_a_bar_a_part_with_the_steps_framed() -> None:
    (figure,) = of_jobs(view(*JOBS))
    bars = {bar.name: bar for bar in figure.plot.data}
    assert list(bars["evaluation"].y) == [11, 11, 5] and list(bars["steps"].y) == [4, 6, 6]
    assert [name for name, bar in bars.items() if bar.marker.line.width] == ["steps"]
    assert "resume" not in bars  # no job had it
    assert set(figure.data["trial_id"]) == {one["trial_id"] for one in JOBS}
    assert "6 of 10 jobs" in of_jobs(view(*(job(length, 2) for length in range(10, 20))))[0].caption


@pytest.mark.slow
def test_what_fits_says_that_other_parts_need_more(tmp_path: Path, cli: Cli) -> None:
    rows = [job(length, 11) for length in (128, 256, 512, 1024, 2048)]
    content = collect(table(*rows))
    assert content.findings[0].startswith("In 5 of 5 jobs evaluation needs most")
    assert content.summary.startswith("In 5 of 5 jobs")
    remark = "in 5 of 5 whole jobs evaluation needs more, by up to 7.0 MiB allocated"
    assert any(remark in text for text in content.warnings)
    assert any("other parts of the job need more" in title for title, name, _ in content.tables if name == "frontier")
    shown = {name: frame for _, name, frame in content.tables}["parts"]
    assert list(shown["evaluation"]) == ["11.0 MiB"] * 5 and set(shown["largest"]) == {"evaluation"}
    assert remark in cli.run("frontier", synthetic.write(tmp_path / "jobs", rows), "--gib", "24").out
    within = collect(table(*(job(length, 2) for length in (128, 256, 512))))
    assert not any("whole jobs" in text for text in within.warnings)
    assert not any("other parts" in title for title, _, _ in within.tables)


def scripts(folder: Path, command: str = "python train.py --lr '{lr}' <b>") -> Path:
    rows = []
    for length in (128, 256, 512):
        for lr in (0.5, 0.25):
            (one,) = synthetic.curve((length,))
            runner = {"name": "script", "command": command, "options": {"lr": lr, "mode": "fast"}}
            trial = tiny(runner=runner, seq_len=length)
            rows.append(complete_row(one | {"runner": "script", "trial": trial, "trial_id": f"{length}-{lr}"}))
    return synthetic.write(folder, rows)


@pytest.mark.slow
def test_a_scripts_command_and_own_axes_are_what_was_asked(tmp_path: Path) -> None:
    content = collect(load(scripts(tmp_path / "run")))
    assert content.asked["command"] == "python train.py --lr '{lr}' <b>"
    assert content.asked["mode"] == "fast" and set(content.asked["lr"].split(", ")) == {"0.5", "0.25"}
    assert "<dd><code>python train.py --lr &#39;{lr}&#39; &lt;b&gt;</code></dd>" in render(content)
    named = {name: frame for _, name, frame in content.tables}["settings"]["settings"]
    assert set(named) == {"lr 0.5", "lr 0.25"}
    assert "command" not in collect(table(*synthetic.sweep(lengths=(128,)))).asked


@pytest.mark.slow
def test_three_step_times_have_no_line_and_no_interval(tmp_path: Path) -> None:
    few = table(*synthetic.curve((128, 256, 512), repeats=2))
    fits, notes = fit_table(few)
    assert "step_median_s" not in {fit.metric.column for fit in fits}
    assert "1 curve of step time with fewer than 5 different lengths not fitted" in notes
    (figure,) = [figure for figure in collect(few).figures if figure.name == "throughput"]
    assert {trace.mode for trace in figure.plot.data} == {"markers"} and "interval" not in figure.caption
    assert sorted(figure.data["seq_len"].unique()) == [128, 256, 512]


def test_no_step_begins_below_zero_seconds() -> None:
    rows = synthetic.curve((128, 256, 512, 1024, 2048))
    for one in rows:
        one["step_median_s"] = one["seq_len"] * 1e-3 - 0.05
    (fit,) = fit_table(table(*rows), ["step_median_s"])[0]
    assert "per position" in fit_wording.text(fit) and "on top of -" not in fit_wording.text(fit)
