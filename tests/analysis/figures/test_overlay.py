"""Test the overlay figure: its marks, the files next to it, and the files that it refuses to overwrite."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import Cli, refusal

from vramsweep.analysis.compare.trends import SPEED, along
from vramsweep.analysis.compare.verdicts import compare
from vramsweep.analysis.figures import overlay
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import Row


def sides(lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)) -> tuple[list[Row], list[Row]]:
    """B: half the memory, slower up to 600 tokens and faster from there on, and a length more."""
    a = synthetic.curve(lengths[:-1], repeats=3)
    b = synthetic.curve(lengths, repeats=3, seed=1)
    for row in b:
        row["peak_reserved_bytes"] //= 2
        row["tokens_per_s"] *= 0.9 if row["seq_len"] < 600 else 1.1
    return a, b


def drawn(a: list[Row], b: list[Row]) -> overlay.Figure:
    found = compare(*(synthetic.table(rows) for rows in (a, b)), names=("runs/a", "runs/b"))
    return overlay.figure(found, along(found))


@pytest.mark.slow
def test_both_sides_and_what_lies_between_them_are_drawn_with_where_it_changes() -> None:
    figure = drawn(*sides())
    assert figure.title == "B b compared with A a"
    titles = [axis.title.text for axis in figure.plot.select_yaxes()]
    assert titles == ["peak memory (GiB)", "B − A (GiB)", "tokens/s", "B/A − 1 (%)"]
    notes = [note.text for note in figure.plot.layout.annotations]
    assert any(note.startswith("+") and note.endswith("% from about 1,024 tokens on") for note in notes)
    assert any(" x)" in note for note in notes)  # the largest difference
    assert "95 % interval" in figure.caption
    assert {trace.name for trace in figure.plot.data if trace.showlegend} >= {"A a", "B b"}


@pytest.mark.slow
def test_the_data_drawn_has_what_only_one_side_measured_and_its_trials() -> None:
    data = drawn(*sides()).data
    assert data["seq_len"].tolist() == [128, 256, 512, 1024, 2048, 4096]
    assert np.isnan(data["peak_reserved_bytes_a"].iloc[-1])
    assert data["peak_reserved_bytes_b"].notna().all()
    assert (data["trial_ids"].str.split().str.len() == [6, 6, 6, 6, 6, 3]).all()


@pytest.mark.slow
def test_running_out_of_memory_is_marked() -> None:
    a, b = sides()
    for row in a:
        if row["seq_len"] == 2048:
            row |= {"outcome": "oom", "peak_reserved_bytes": None, "peak_allocated_bytes": None,
                    "peak_active_bytes": None, "tokens_per_s": None}  # fmt: skip
    figure = drawn(a, b)
    assert figure.data.set_index("seq_len")["out_of_memory"].to_dict()[2048] == "a"
    assert "A out of memory" in [trace.name for trace in figure.plot.data]
    assert figure.data.set_index("seq_len")["tokens_per_s_b"].notna()[2048]


@pytest.mark.slow
@pytest.mark.parametrize("gone", [("peak_reserved_bytes", "peak_allocated_bytes", "peak_active_bytes"), (SPEED,)])
def test_what_the_sides_nowhere_both_know_has_no_panel(gone: tuple[str, ...]) -> None:
    a, b = sides()
    for rows, known in ((a, lambda length: length < 500), (b, lambda length: length > 500)):
        for row in rows:
            if not known(row["seq_len"]):
                row |= dict.fromkeys(gone)
    titles = [axis.title.text for axis in drawn(a, b).plot.select_yaxes()]
    assert titles == (["peak memory (GiB)", "B − A (GiB)"] if gone == (SPEED,) else ["tokens/s", "B/A − 1 (%)"])


@pytest.mark.slow
def test_sides_of_which_one_ran_out_of_memory_wherever_the_other_fitted_are_no_figure() -> None:
    a, b = sides()
    lost = dict.fromkeys(("peak_reserved_bytes", "peak_allocated_bytes", "peak_active_bytes", SPEED))
    gone = [[row | lost | {"outcome": "oom"} if (row["seq_len"] < 500) == first else row for row in rows]
            for first, rows in ((True, a), (False, b))]  # fmt: skip
    assert "nothing to draw, because no pair has a memory size or a speed on both" in refusal(UserError, drawn, *gone)


@pytest.mark.slow
def test_thousands_of_pairs_are_thinned() -> None:
    rows = synthetic.curve(range(1, 1601))
    figure = drawn(rows, rows)
    assert len(figure.data) == 1600
    assert max(len(trace.x) for trace in figure.plot.data) < 1600


def test_one_length_is_no_figure() -> None:
    a, _ = sides((128, 256))
    assert "compare two of either" in refusal(UserError, drawn, a, a)


@pytest.mark.slow
def test_html_has_its_data_beside_it_and_nothing_is_written_over(tmp_path: Path, cli: Cli) -> None:
    a, b = (synthetic.write(tmp_path / name, rows) for name, rows in zip("ab", sides(), strict=True))
    out = tmp_path / "figures" / "both.html"
    cli.run("compare", a, b, "--figure", out, status=1)
    assert "from about 1,024 tokens on" in out.read_text(encoding="utf-8")
    assert len(pd.read_csv(out.with_suffix(".csv"))) == 6
    rows = tmp_path / "rows.csv"
    cli.run("export", a, rows)
    before = rows.read_bytes()
    assert "choose another name" in cli.refuse("compare", rows, b, "--figure", tmp_path / "rows.png")
    said = cli.refuse("compare", a, b, "--figure", tmp_path / "rows.html")
    assert "rows.csv, which is not a figure's data; choose another name" in said
    assert rows.read_bytes() == before
    cli.run("compare", a, b, "--figure", out.with_suffix(".png"), status=1)  # the data are its own
    assert out.with_suffix(".png").stat().st_size > 5000
