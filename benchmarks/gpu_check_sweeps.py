"""State and helpers that the parts of the GPU check share (gpu_check.py): the folder, the deadline, the rows so far.

Each sweep is a command in its own process, as a user's is. One that runs out of time is ended, its finished rows are
kept, and a later run continues it. gpu_check.py decides what is measured, and in which order.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from vramsweep.harness.machine import machine
from vramsweep.harness.process.attempt import attempt_environment
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import Row

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Check:
    """State of a check: its folders, the device, the deadline, the rows so far, the overrides of its sweeps."""

    out: Path
    scratch: Path
    device: str
    deadline: float
    rows: list[Row] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    log: str = ""  # of earlier runs
    cut_short: set[str] = field(default_factory=set)  # sweeps that ran out of time

    @property
    def real(self) -> bool:
        """Return whether this runs on a GPU, not as a rehearsal on a CPU."""
        return self.device == "cuda"

    def left(self) -> float:
        """Return the seconds until the part must have ended, at least 1."""
        return max(1.0, self.deadline - time.monotonic())

    def keep(self, rows: list[Row]) -> None:
        """Add the rows of a sweep; those of a continued sweep replace its earlier ones."""
        names = {r["sweep"] for r in rows}
        self.rows = [r for r in self.rows if r["sweep"] not in names] + rows

    def sweep(self, name: str, *overrides: str) -> list[Row]:
        """Measure one sweep on the device and return its terminal rows. `predicted` predicts these overrides later.

        Raises RuntimeError if the sweep left no row.
        """
        if overrides not in self.asked:
            self.asked.append(overrides)
        self.seed(name)
        rows = self.run_sweep(name, f"device={self.device}", *overrides)
        if not rows:
            raise RuntimeError(f"sweep {name} wrote no row: {last_line((self.scratch / f'{name}.log').read_text())}")
        self.keep(rows)
        return rows

    def take_up(self) -> None:
        """Take up the rows and logs that a killed run left in `scratch`. Predictions are made anew."""
        for folder in [path for path in self.scratch.iterdir() if path.is_dir()]:
            rows = [row for row in swept(folder) if row["device"] == self.device]
            if rows:
                self.keep(rows)
            else:
                shutil.rmtree(folder)
        for log in self.scratch.glob("*.log"):
            if (text := self.ending(log)) not in self.log:
                self.log += text
            log.unlink()

    def seed(self, name: str) -> None:
        """Give a sweep the rows that an earlier run left of it, so that it continues with the others."""
        folder = self.scratch / name
        if kept := [row for row in self.rows if row["sweep"] == name and not folder.exists()]:
            folder.mkdir()
            (folder / journal.NAME).write_text("".join(json.dumps(row) + "\n" for row in kept))

    def run_sweep(self, name: str, *overrides: str) -> list[Row]:
        """Run one sweep and return its terminal rows; end it when the time is up and keep the rows so far."""
        words = ["-m", *overrides, f"name={name}", f"results={self.scratch}", "report=false", "retries=1"]
        words += ["backoff_s=1", "timeout_s=120"]
        log = self.scratch / f"{name}.log"
        with log.open("a") as stream:
            stream.write(f"\n== {name}: {' '.join(overrides)}\n")
            stream.flush()
            if self.run([sys.executable, "-m", "vramsweep", "sweep", *words], stream) is None:
                self.cut_short.add(name)
                stream.write("ended: no time left\n")
        return swept(self.scratch / name)

    def run(self, words: Sequence[str], stream: IO[str]) -> int | None:
        """Run a command in the time left; return its exit status, or None if it had to be ended."""
        process = subprocess.Popen(words, cwd=ROOT, stdout=stream, stderr=stream)
        try:
            return process.wait(self.left())
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None

    def python(self, arguments: Sequence[str], conf: str = "") -> subprocess.CompletedProcess[str]:
        """Run Python in a worker's environment. Raises RuntimeError if it is not done in time."""
        cards = machine.visible_gpus(os.environ)[:1] if self.real else []
        try:
            return subprocess.run(
                [sys.executable, *arguments],
                env=attempt_environment(conf, self.device, os.environ, machine.uuids(cards)),
                cwd=ROOT, capture_output=True, text=True, check=False, timeout=self.left(),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not done within its {error.timeout:.0f} s") from None

    def finish_log(self) -> None:
        """Write log.txt: logs of earlier runs, then the end of each sweep's log, because a whole log could fill the
        folder."""
        logs = sorted(self.scratch.glob("*.log"), key=lambda path: path.stat().st_mtime)
        (self.out / "log.txt").write_text(self.log + "".join(map(self.ending, logs)))

    def ending(self, log: Path) -> str:
        """Return the end of a log, without paths of this machine."""
        return log.read_text(errors="replace")[-40_000:].replace(f"{self.scratch}{os.sep}", "")


def swept(folder: Path) -> list[Row]:
    """Return the terminal rows of a sweep's folder; none if it has no journal."""
    return list(journal.terminal(journal.read(folder)[0]).values()) if journal.files(folder)[0].exists() else []


def last_line(text: str) -> str:
    """Return the last line of a program's output, or "no output"."""
    return (text.strip().splitlines() or ["no output"])[-1]


def ended_ok(rows: list[Row]) -> list[Row]:
    """Return the rows that ended ok. Raises RuntimeError, with the first reason, if none did."""
    ok = [r for r in rows if r["outcome"] == "ok"]
    if not ok:
        raise RuntimeError(f"no row is ok: {rows[0]['outcome']}, {rows[0]['reason']}")
    return ok


def outcomes(rows: list[Row]) -> dict[str, int]:
    """Count rows by outcome."""
    return {name: sum(r["outcome"] == name for r in rows) for name in sorted({str(r["outcome"]) for r in rows})}
