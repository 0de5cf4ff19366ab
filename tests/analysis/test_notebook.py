"""`import vramsweep` in a notebook: the example runs, results show themselves, and what they hold of others is text."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import synthetic
from conftest import ROOT, refusal

import vramsweep
from vramsweep.harness.messages.errors import UserError

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"
EVIL = "<script>alert(1)</script>\x1b[2K"


def rows(lengths: Sequence[int] = (128, 256, 512, 1024, 2048), **fixed: Any) -> pd.DataFrame:
    return vramsweep.load(pd.DataFrame(synthetic.sweep(lengths, (1,), repeats=1, **fixed)))


@pytest.mark.slow
def test_the_example_notebook_runs_as_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", os.environ.get("TMPDIR", "/tmp"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # kept without: they would be of some machine
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = [cell.outputs[-1].data for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
    assert len(shown) == sum(cell.cell_type == "code" for cell in notebook.cells)
    assert sum("text/html" in data for data in shown) >= 8
    assert sum("application/vnd.plotly.v1+json" in data for data in shown) == 2
    pages = " ".join(data.get("text/html", "") for data in shown)
    assert "12 trials (measured on cpu): 12 ok" in pages and "6 trials (predicted, not measured): 6 ok" in pages


@pytest.mark.slow
def test_rows_are_a_frame_that_shows_what_tells_them_apart() -> None:
    found = rows()
    assert len(found) == 10 and found["peak_allocated_bytes"].dtype == "Int64"
    assert "10 trials (measured on cuda): 10 ok" in repr(found) and "allocator" in found._repr_html_()
    assert found.attrs["units"]["peak_allocated_bytes"] == "B"
    assert found.attrs["units"].keys() <= set(found.columns)
    half = found[found["seq_len"] > 300]
    assert isinstance(half, type(found)) and len(half) == 6
    wide = vramsweep.gib(half)
    assert wide["peak_allocated_gib"].max() == half["peak_allocated_bytes"].max() / 2**30
    assert "peak_allocated_bytes" not in wide and wide.attrs["units"]["peak_allocated_gib"] == "GiB"
    told = vramsweep.units(wide)
    assert told.loc["peak_allocated_gib", "unit"] == "GiB" and told.loc["seq_len", "meaning"]
    unknown = vramsweep.gib(rows(device_used_bytes=None))["device_used_gib"]
    assert unknown.isna().all()


@pytest.mark.slow
def test_each_function_gives_what_its_verb_prints(tmp_path: Path) -> None:
    found = rows()
    fits = vramsweep.fit(found, metric="peak_allocated_bytes")
    assert len(fits) == 2 and "hinge" in repr(fits)
    assert set(fits.frame["metric"]) == {"peak_allocated_bytes"}
    at = fits[0].predict(np.array([2048.0]))
    assert at.new_low[0] <= at.value[0] <= at.new_high[0]
    limits = vramsweep.frontier(found, gib=[24])
    assert "tokens fitted" in repr(limits) and limits.frame["largest_ok"].max() == 2048
    compared = vramsweep.compare(found, by="allocator=default,expandable")
    assert "B allocator=expandable" in repr(compared) and not compared.worse
    assert set(compared.frame["verdict"]) >= {"SMALLER"}
    figure = vramsweep.figure(found, "memory_by_length")
    assert isinstance(figure, go.Figure) and "synthetic" in figure.layout.annotations[-1].text
    for shown in (fits, limits, compared):
        assert "<table" in shown._repr_html_() and "as the command prints it" in shown._repr_html_()
    written = vramsweep.report(found, tmp_path / "out")
    assert written.path == tmp_path / "out" / "report.html" and written.path.is_file()


@pytest.mark.slow
def test_predicted_limits_are_not_said_to_have_run() -> None:
    predicted = rows((128, 256, 512), device="simulated", simulated_gpu="l4-24gb", gpu_name=None)
    text = repr(vramsweep.frontier(predicted, gib=[24]))
    assert "tokens predicted to fit" in text and "fitted" not in text and "measured" not in text


@pytest.mark.slow
def test_what_rows_hold_is_text_in_every_display() -> None:
    found = rows((128, 256, 512), model=EVIL, flags=[EVIL])
    fits = vramsweep.fit(found, metric="peak_allocated_bytes")
    compared = vramsweep.compare(found, by="allocator=default,expandable")
    for shown in (found, fits, vramsweep.frontier(found, gib=[24]), compared):
        assert "<script" not in str(shown._repr_html_())
        assert "\x1b" not in f"{shown!r}{shown._repr_html_()}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda r: vramsweep.load("none"), "there is no file"),
        (lambda r: vramsweep.fit(r[["seq_len"]]), "filter rows, not columns"),
        (lambda r: vramsweep.fit(r, metric="memory"), "allowed: peak_allocated_bytes"),
        (lambda r: vramsweep.fit(r, axis="x"), "allowed: seq_len, micro_batch, tokens"),
        (lambda r: vramsweep.fit(r[r["seq_len"] == 128]), "three values of seq_len"),
        (lambda r: vramsweep.frontier(r, gib=[0]), "sizes above 0"),
        (lambda r: vramsweep.compare(r), "two sets of rows"),
        (lambda r: vramsweep.compare(r, r, tolerance=2), "a share such as 0.001"),
        (lambda r: vramsweep.figure(r, "x"), "they have memory_by_phase, frontier,"),
        (lambda r: vramsweep.report(r), "name the folder to write to"),
        (lambda r: vramsweep.predict(model="tiny", seq_len=[]), "an empty list leaves nothing"),
        (lambda r: vramsweep.predict(model="tiny", name="x"), "predict(folder=...)"),
    ],
)
def test_a_mistake_is_told_in_a_line_or_two(call: Any, words: str) -> None:
    said = refusal(UserError, call, rows((128, 256, 512)))
    assert words in said and said.count("\n") <= 1


def test_importing_it_costs_neither_torch_nor_pandas() -> None:
    heavy = "('torch', 'pandas', 'plotly')"
    code = f"import sys, vramsweep; dir(vramsweep); print([name for name in {heavy} if name in sys.modules])"
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
