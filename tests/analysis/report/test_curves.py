"""Lines and parabolas as people know them: against numpy's and scipy's, in frames and figures; several files."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import Cli, parametrized
from scipy import stats

import vramsweep
from vramsweep.analysis.data.importers import open_together
from vramsweep.analysis.figures import layout
from vramsweep.analysis.report.content import Fitting, collect
from vramsweep.harness.messages.errors import UserError

X = np.arange(100, 2100, 100)
ACTIVE = np.maximum(10000, 8000 + 2.5 * X) + 20 * np.sin(X)  # MiB: neither a line nor a parabola
HALF = 0.5


def write(path: Path, active: Any = ACTIVE, speed: Any = 9000.0) -> Path:
    lines = zip(X, np.round(active).astype(int), np.round(active * 1.2).astype(int), speed / X, strict=True)
    path.write_text("".join(f"{x}, {a}, {r}, {s}\n" for x, a, r, s in lines))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> pd.DataFrame:
    return vramsweep.load(write(tmp_path / "a.csv"))


def test_line_and_parabola_are_numpy_s_and_r2_is_scipy_s(rows: pd.DataFrame) -> None:
    (fit,) = fits = vramsweep.fit(rows, metric="peak_active_bytes", start=500)
    frame = fits.frame.set_index("model")
    x, y = X[X >= 500].astype(float), np.round(ACTIVE[X >= 500]) * 2**20
    line = stats.linregress(x, y)
    assert frame.loc["straight line", "r2"] == pytest.approx(line.rvalue**2, abs=1e-12)
    a, b = line.intercept / 2**20, line.slope / 2**20
    assert frame.loc["straight line", "equation"] == f"y = {b:.4f}x + {a:.4f} (MiB)"
    left = y - np.polyval(np.polyfit(x, y, 2), x)
    assert frame.loc["quadratic", "rms"] == pytest.approx(np.sqrt(np.mean(left**2)), rel=1e-6)
    assert frame.loc["quadratic", "worst"] == pytest.approx(np.abs(left).max(), rel=1e-6)
    assert frame["chosen"].sum() == 1 and fit.r2 == frame[frame["chosen"]]["r2"].iloc[0]
    assert fit.equation in repr(fit) and fit.equation in fit.summary() and "R² 0." in fit.summary()


@pytest.mark.parametrize("one", [700, 700.0, np.int64(700)])
def test_a_number_is_predicted_as_an_array_is(rows: pd.DataFrame, one: Any) -> None:
    (fit,) = vramsweep.fit(rows, metric="peak_active_bytes")
    whole = fit.predict(np.array([700.0, 4000.0]))
    assert list(whole.extrapolated) == [False, True]
    single = fit.predict(one)
    assert np.ndim(single.value) == 0 and single.value == pytest.approx(whole.value[0])
    for many in ([700, 4000], (700, 4000), pd.Series([700, 4000])):
        assert fit.predict(many).value == pytest.approx(whole.value)
    assert fit.predict([[700], [4000]]).new_high.shape == (2, 1)


def test_a_fit_draws_its_line_and_parabola(rows: pd.DataFrame) -> None:
    (fit,) = vramsweep.fit(rows, metric="peak_active_bytes")
    line = np.polyfit(X.astype(float), np.round(ACTIVE) / 1024, 1)
    figure = fit.figure(["linear"])
    drawn = {trace.legendgroup: trace for trace in figure.data if trace.legendgroup in ("linear", "quadratic")}
    assert drawn["linear"].visible is None and drawn["quadratic"].visible == "legendonly"
    assert np.asarray(drawn["linear"].y) == pytest.approx(np.polyval(line, np.asarray(drawn["linear"].x)), rel=1e-6)


def test_what_nobody_asked_for_is_behind_the_legend_and_in_no_picture(rows: pd.DataFrame) -> None:
    table, _ = open_together([Path(rows.attrs["source"])], None, None, ())
    for curves in ((), ("quadratic",)):
        figures = {one.name: one for one in collect(table, fitting=Fitting(500, None, curves)).figures}
        figure = figures["memory_by_length"]
        shown = {t.legendgroup for t in layout.static(figure).plot.data} & {"linear", "quadratic"}
        assert shown == set(curves)
        assert {"linear", "quadratic"} <= {t.legendgroup for t in figure.plot.data}
        assert figure.data["seq_len"].min() == 500


def test_fit_draws_into_the_files_that_are_named_and_over_no_input(tmp_path: Path, cli: Cli) -> None:
    file, out = write(tmp_path / "a.csv"), tmp_path / "new" / "fit.svg"
    words = ("fit", file, "--metric", "peak_active_bytes", "--from", 500, "--to", 1500, "--curves", "linear")
    for suffix, begin in {".html": b"<!doctype html>", ".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF"}.items():
        place = out.with_suffix(suffix)
        assert f"Peak active against sequence length: {place}\n" in cli.run(*words, "--figure", place).out
        assert place.read_bytes().startswith(begin)
    drawn = out.read_text(encoding="utf-8")
    there = [one in drawn for one in ("straight line", "row − fit", "1,400", "a.csv, 11 rows", "2,000", "quadratic")]
    assert there == [True, True, True, True, False, False]
    cli.json("fit", file, "--figure", out)  # all that the rows have: active, reserved, step time
    assert {one.name for one in out.parent.glob("*.svg")} == {"fit.svg", "fit_2.svg", "fit_3.svg"}
    assert f"fit 2 would replace {out.with_stem('fit_2')}; move" in cli.refuse("fit", file, "--figure", out)
    journal = (synthetic.write(tmp_path, synthetic.curve((256, 512, 1024))) / "journal.jsonl").read_bytes()
    for name in ("b.svg", "b_2.svg"):
        (own := tmp_path / name).write_bytes(journal)
        assert "is the input file and would be overwritten" in cli.refuse("fit", own, "--figure", tmp_path / "b.svg")
        assert own.read_bytes() == journal
    assert "fit.gif must end in one of .html, .png, .svg, .pdf" in cli.refuse(*words, "--figure", "fit.gif")
    assert "add --figure FILE" in cli.refuse(*words)


def test_two_files_are_one_sweep_of_two_allocators(tmp_path: Path, cli: Cli) -> None:
    files = write(tmp_path / "a.csv"), write(tmp_path / "b.csv", ACTIVE * HALF, 9900.0)
    done = cli.run("report", *files, "--names", "default,expandable", "--images", "none", "--out", tmp_path / "r")
    assert "expandable instead of default" in done.out
    written = pd.read_csv(tmp_path / "r" / "rows.csv")
    assert written.groupby("allocator").size().to_dict() == {"default": len(X), "expandable": len(X)}
    assert set(written["foreign"]) == {"a.csv and b.csv"}
    drawn = pd.read_csv(tmp_path / "r" / "figures" / "allocators.csv")
    assert set(drawn["group"]) == {"default", "expandable"}
    fits = pd.read_csv(tmp_path / "r" / "figures" / "fits.csv")
    at_last = fits[fits["chosen"] & fits["metric"].eq("peak_active_bytes")].set_index("settings")["at_last"]
    assert at_last["expandable"] / at_last["default"] == pytest.approx(HALF, rel=0.01)


@parametrized("names_of_files")
def test_names_that_do_not_fit_are_refused(tmp_path: Path, names: str, said: str) -> None:
    files = [write(tmp_path / "a.csv"), write(tmp_path / "b.csv")]
    with pytest.raises(UserError, match=said):
        open_together(files, names, None, ())


def test_another_column_may_set_files_apart(tmp_path: Path) -> None:
    files = [write(tmp_path / "a.csv"), write(tmp_path / "b.csv")]
    table, _ = open_together(files, "precision=fp32,bf16", None, ())
    assert table.frame.groupby("precision").size().to_dict() == {"bf16": len(X), "fp32": len(X)}
