"""Figures, tables, report and paper folder: from good rows, bad rows and hostile rows."""

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import Cli, tiny, unpacked
from synthetic import table

from vramsweep.analysis.cli import main
from vramsweep.analysis.data.load import from_frame
from vramsweep.analysis.figures import layout, plots
from vramsweep.analysis.report.content import collect
from vramsweep.analysis.report.write import write_report
from vramsweep.harness.rows.schema import Row, complete_row
from vramsweep.harness.sweep import plan

pytestmark = pytest.mark.deterministic
LENGTHS = (512, 1024, 2048, 4096, 8192)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with a report, made through the command line, without static images."""
    rows = synthetic.sweep(LENGTHS, batches=(1, 4), repeats=1)
    whole = plan.expand_trials([tiny(seq_len=128)], 1)[0][0].resolved
    rows[0] = {**rows[0], "throttle_reasons": ["sw_power_cap"], "plateau": False, "trial": whole}
    path = synthetic.write(tmp_path_factory.mktemp("results") / "sweep", rows)
    assert main(["report", str(path), "--images", "none"]) == 0
    return path


@pytest.mark.slow
def test_every_figure_of_the_issue_is_drawn_with_its_data_and_their_rows(folder: Path) -> None:
    names = {path.stem for path in (folder / "figures").glob("*.html")}
    assert names == {
        "memory_by_length", "allocators", "allocators_by_speed", "throughput", "iterations", "mfu", "memory_by_phase",
        "step_times", "plateau", "heat_map", "pareto", "frontier",
    }  # fmt: skip
    known = {json.loads(line)["trial_id"] for line in (folder / "journal.jsonl").read_text().splitlines()}
    for name in names:
        data = pd.read_csv(folder / "figures" / f"{name}.csv")
        ids = data["trial_ids" if name == "frontier" else "trial_id"].dropna()
        assert len(ids)
        assert {one for text in ids for one in text.split()} <= known


@pytest.mark.slow
def test_axes_have_units_and_lines_have_markers() -> None:
    for figure in collect(table(synthetic.sweep(LENGTHS, batches=(1, 4), repeats=1))).figures:
        axes = [figure.plot.layout.xaxis.title.text, figure.plot.layout.yaxis.title.text]
        if figure.name == "frontier":  # its rows are settings
            assert not axes.pop()
        assert all("(" in text or text in ("measured step", "iterations/s") for text in axes), figure.name


@pytest.mark.slow
def test_predicted_rows_get_figures_of_their_own_and_one_against_measured() -> None:
    measured = synthetic.curve(LENGTHS, gpu_name="NVIDIA L4")
    predicted = synthetic.curve(LENGTHS, device="simulated", simulated_gpu="l4-24gb", seed=1)
    predicted[0]["not_covered"] = ["kernel_scratch"]
    content = collect(table([*measured, *predicted]))
    names = {figure.name for figure in content.figures}
    assert {"memory_by_length_measured_on_cuda", "memory_by_length_predicted", "predicted_against_measured"} <= names
    assert any("peak allocated exact" in finding for finding in content.findings)
    for figure in content.figures:
        if figure.name.endswith("_predicted") and "trial_id" in figure.data:
            ids = " ".join(figure.data["trial_id"].astype(str)).split()
            assert all(one.startswith("si") for one in ids)
            shown = str(predicted[0]["trial_id"]) in ids
            assert figure.source.startswith("Predicted for l4-24gb" + " (not covered: kernel_scratch)" * shown)
    assert any(warning.startswith("not covered in 1 row: scratch memory") for warning in content.warnings)
    assert any("predicted, not measured: " in warning for warning in content.warnings)
    faulty = {"step_growth_bytes": 2**27, "full_after_steps": 308, "parameters_without_gradient": 7}
    rows = [measured[0] | faulty | {"trainable_parameters": 9}, *measured[1:]]
    warnings = " ".join(collect(table(rows)).warnings)
    assert "every step leaks memory, up to 0.12 GiB (full after about 308 steps), in 1 row" in warnings
    assert "up to 7 of 9 trainable parameters had no gradient in any step, in 1 row" in warnings
    assert all(fit.points.ids[0][:2] == fit.points.ids[-1][:2] for fit in content.fits)


@pytest.mark.slow
def test_what_is_only_predicted_says_so_on_every_figure_table_and_finding() -> None:
    rows = synthetic.sweep(lengths=(128, 256, 512, 1024), batches=(1, 2), repeats=1, device="simulated")
    content = collect(table(rows))
    assert content.figures
    for figure in content.figures:
        assert "predicted" in [note.text for note in figure.plot.layout.annotations]
        for alone in (layout.page(figure), layout.column(figure)):
            assert "(predicted)" in figure.title
            assert any(note.text.startswith("Predicted for ") for note in alone.layout.annotations), figure.name
    assert content.findings
    assert all(sentence.startswith(("Predicted: ", "Estimated ")) for sentence in content.findings)
    assert [title for title, name, _ in content.tables if name in ("settings", "fits")] == [
        "Settings (predicted)", "Fitted curves (predicted; *: chosen)",
    ]  # fmt: skip


def test_thinning_keeps_ends_and_extremes() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[12_345] = 9
    at = plots.thin(x, y)
    assert len(at) <= plots.POINTS
    assert {0, 12_345, 99_999} <= set(at.tolist())


@pytest.mark.slow
def test_the_report_says_what_was_found_and_warns(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    whole = unpacked(page)
    assert "Compared with default: expandable reserves 0.8" in page
    assert "the GPU was throttled in 1 row: allocator=default seq_len=512" in page
    assert "memory was still rising at the end in 1 row" in page
    rows = rows_of(page)
    commands = [" ".join(rows["words"][word] for word in one) for one in rows["command"]]
    assert sum(one.startswith("python -m vramsweep sweep model=tiny ") for one in commands) == 1
    assert sum("no command: the resolved trial has no allocator" in one for one in commands) == 19  # no whole trial
    assert "<strong>16</strong> ok" in page and "<strong>4</strong> oom" in page
    assert re.search(r"plotly\.js v\d", whole)


def rows_of(page: str) -> dict[str, Any]:
    """The columns that the table of rows is made of."""
    (line,) = [line for line in unpacked(page).splitlines() if line.startswith('{"trial":')]
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("one row", synthetic.curve((128,))),
        ("all out of memory", synthetic.curve((128, 256), device_gib=1)),
        ("nothing measured", [complete_row({"trial_id": "a", "terminal": True, "outcome": "invalid", "reason": "no"})]),
        ("no lengths", [{**r, "seq_len": None} for r in synthetic.sweep(lengths=(128,), batches=(1,))]),
    ],
)
def test_what_can_still_be_shown_is_shown(name: str, rows: list[Row], tmp_path: Path) -> None:
    path = synthetic.write(tmp_path, rows)
    assert main(["report", str(path), "--images", "none"]) == 0
    page = (path / "report.html").read_text()
    assert "Rows and how to reproduce them" in page
    if name == "all out of memory":
        assert "2</strong> oom" in page and "no measured values to fit" in page


@pytest.mark.slow
def test_thousands_of_groups_are_counted_and_some_are_drawn() -> None:
    base = synthetic.curve((128, 256, 512))
    frame = pd.DataFrame(base * 2_000)
    frame["micro_batch"] = np.repeat(np.arange(2_000), 3) + 1
    frame["trial_id"] = [f"t{i}" for i in range(len(frame))]
    content = collect(from_frame(frame, "test"))
    assert any("2,000 groups of equal settings; only the 24 with most rows were fitted" in w for w in content.warnings)
    assert len(content.figures) >= 5


@pytest.mark.slow
def test_without_what_draws_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "py_mini_racer", None)
    note, *others = write_report(table(synthetic.curve(LENGTHS[:3])), tmp_path / "out", ["png"]).notes
    assert others and re.match(r"not all png figures were drawn: py_mini_racer is not installed; .*\[png\]", note)


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_named_and_nothing_of_it_stays(tmp_path: Path, cli: Cli) -> None:
    path = synthetic.write(tmp_path, synthetic.sweep(lengths=(128,), batches=(1,)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, name in ((99, "rows.csv"), (1 << 20, "report.html")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            said = cli.refuse("report", path, "--images", "none")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert f"cannot write {path / name}: no file of this process may grow that large" in said
        assert {file.name for file in path.iterdir()} == {"journal.jsonl"}


def test_user_errors_are_one_line_and_exit_status_2(tmp_path: Path, cli: Cli) -> None:
    assert "there is no file" in cli.refuse("report", tmp_path / "none")
    path = synthetic.write(tmp_path, synthetic.sweep(lengths=(128,), batches=(1,)))
    assert "gif" in cli.refuse("report", path, "--images", "gif")
    assert "nothing could be fitted" in cli.refuse("fit", path)


@pytest.mark.slow
def test_repeats_whose_memory_differs_are_named_and_speed_has_an_interval() -> None:
    rows = synthetic.curve((128, 256, 512), repeats=3)
    rows[1]["peak_reserved_bytes"] += 1
    content = collect(table(rows))
    pair = f"peak_reserved_bytes of repeats {rows[0]['trial_id']} and {rows[1]['trial_id']} differs by 1 B"
    assert any(pair in warning for warning in content.warnings)
    (shown,) = [frame for title, _, frame in content.tables if title == "Settings"]
    assert shown["95 % interval (tokens/s)"].iloc[0].endswith(" (3 processes)")
    once = collect(from_frame(pd.DataFrame([row for row in rows if row["repeat"] == 0]), "test"))
    assert any("measured once, so speed has no interval" in warning for warning in once.warnings)
    (shown,) = [frame for title, _, frame in once.tables if title == "Settings"]
    assert shown["95 % interval (tokens/s)"].iloc[0] == "none: one process"
