"""The browser that draws: it ends with whoever waits for it, and hears nothing of the terminal's Ctrl-C."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import psutil
import pytest
from conftest import ROOT, refusal, wait_for

from vramsweep.analysis.figures.browser import NotDrawn, Picture, draw

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MANY = """
import plotly.graph_objects as go
from pathlib import Path
from vramsweep.analysis.figures.browser import Picture, draw

draw([Picture(go.Figure(go.Scatter(y=[1, n])), Path(f"{n}.png")) for n in range(200)])
"""


def of(mark: str) -> list[psutil.Process]:
    """The processes that were started with the mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("VRAMSWEEP_TEST_PICTURES") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_nothing_of_the_working_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report may be made in a folder that somebody sent."""
    for name in ("plotly", "psutil", "kaleido", "json"):
        (tmp_path / f"{name}.py").write_text("open('mark', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER_PATH", "none")
    assert "Chrome" in refusal(NotDrawn, draw, [Picture(go.Figure(), tmp_path / "a.png")])
    assert not (tmp_path / "mark").exists()


@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
@pytest.mark.parametrize(("name", "why"), [("none/a.png", "No such file"), ("a.gif", "a.gif: allowed are .png, .svg")])
def test_what_is_not_written_is_said(name: str, why: str, tmp_path: Path) -> None:
    plot = go.Figure(go.Scatter(y=[1, 2]))
    with pytest.raises(NotDrawn, match=why):
        draw([Picture(plot, tmp_path / name), Picture(plot, tmp_path / "b.png")])
    assert (tmp_path / "b.png").exists() == (name == "none/a.png")  # one that cannot be written costs no other
    assert not list(tmp_path.rglob("*.part"))
    plot.update_layout(width=1000, height=900)
    draw([Picture(plot, tmp_path / f"b c{suffix}", scale=2) for suffix in (".png", ".svg", ".pdf")])
    begin = {path.suffix: path.read_bytes()[:5] for path in tmp_path.glob("b c*")}
    assert struct.unpack(">II", (tmp_path / "b c.png").read_bytes()[16:24]) == (2000, 1800)
    assert begin == {".png": b"\x89PNG\r", ".svg": b"<svg ", ".pdf": b"%PDF-"}


@pytest.fixture
def place() -> Iterator[Path]:
    """For temporary files, by a short name: a browser's sockets are among them."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


@pytest.mark.skipif(CHROMIUM is None, reason="no browser here")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures("as_in_a_terminal")
def test_nobody_is_left_and_only_the_interruption_is_told(number: signal.Signals, place: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(place), "VRAMSWEEP_TEST_PICTURES": str(tmp_path), "PYTHONPATH": str(ROOT)}
    how: dict[str, Any] = {"cwd": tmp_path, "env": environ, "stderr": subprocess.PIPE, "text": True}
    waiting = subprocess.Popen([sys.executable, "-c", MANY], start_new_session=True, **how)
    wait_for(lambda: any("chrom" in process.name() for process in of(str(tmp_path))))
    time.sleep(0.5)
    assert len(of(str(tmp_path))) > 2  # it, the process that draws, and browsers
    os.killpg(waiting.pid, number)
    _, said = waiting.communicate(timeout=30)
    assert waiting.returncode == -number
    assert said.rstrip().endswith("KeyboardInterrupt" if number == signal.SIGINT else "")
    assert said.count("Traceback") == (number == signal.SIGINT)
    wait_for(lambda: not of(str(tmp_path)), seconds=20)
    assert len(list(tmp_path.glob("*.png"))) < 200
    assert not list(place.iterdir())
