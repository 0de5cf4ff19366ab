"""A sweep that is tortured, and the counts of what was lost.

All its processes, from the launcher on, carry the sweep's mark in their environment. So we can find those that run,
tell what each one is, and count those that outlive their launcher. Linux only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from vramsweep.harness.rows import journal, outcome
from vramsweep.harness.rows.schema import Row

ROOT = Path(__file__).resolve().parents[2]
TARGETS = Path(__file__).with_name("misbehave.py")
MARK = "VRAMSWEEP_TORTURE"
GONE_S = 30.0  # for orphans of a killed launcher: its guard gets ten seconds, and Python has to start
ENDS_S = 300.0  # for a sweep of a few short trials
USUAL = (
    "model=tiny", "device=cpu", "runner=custom", f"runner.target={TARGETS}:good", "protocol=brief", "sweep=none",
    "report=false", "retries=30", "backoff_s=0", "breaker=0", "timeout_s=60", "retry_failed=true",
)  # fmt: skip
SLOTS = (*USUAL, "slots=3")
# Predicted together: several processes of one sweep work at once.
SEVERAL = ("model=tiny", "device=simulated", "sweep=none", "report=false", "retries=30", "backoff_s=0", "breaker=0")


@dataclass
class Count:
    """The results of a fault: how often it was injected, rows lost and doubled, orphans, and how often the sweep still
    reached its end."""

    injected: int = 0
    lost: int = 0
    doubled: int = 0
    orphans: int = 0
    resumed: int = 0
    said: list[str] = field(default_factory=list)  # everything that went wrong, as text

    @property
    def well(self) -> bool:
        """Return whether nothing was lost, doubled or orphaned, and every sweep resumed."""
        return not (self.lost or self.doubled or self.orphans) and self.resumed == self.injected

    def say(self, text: str) -> None:
        """Note something that went wrong."""
        self.said.append(text)

    def lose(self, text: str, number: int = 1) -> None:
        """Note something that went wrong, and count `number` rows as lost."""
        self.lost += number
        self.said.append(text)


class Sweep:
    """One sweep in its own folder, run by the command line that a user would give."""

    spent = False  # the system refuses what Python itself needs: then Python prints a traceback, not we

    def __init__(self, folder: Path, words: Sequence[str], count: Count, trials: int | None) -> None:
        self.place, self.count, self.trials = folder / "t", count, trials
        self.words = [*words, f"results={folder}", "name=t"]
        self.mark = uuid.uuid4().hex
        self.injected = 0
        self.launcher: subprocess.Popen[bytes] | None = None
        self._out = folder / "out.txt"
        self._err = folder / "err.txt"
        folder.mkdir(parents=True, exist_ok=True)
        self._before = b""
        self._rows = 0

    def start(self, prefix: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> None:
        """Start the sweep, or resume it."""
        self._before, self._rows = self.journal(), len(self.rows())
        command = [*prefix, sys.executable, "-m", "vramsweep", "sweep", "-m", *self.words]
        given = {**os.environ, MARK: self.mark, "PYTHONUNBUFFERED": "1", **(environ or {})}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.launcher = subprocess.Popen(
                command, cwd=ROOT, env=given, stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
                preexec_fn=lambda: [signal.signal(n, signal.SIG_DFL) for n in (1, 2)],  # nohup ignores 1
            )  # fmt: skip

    def journal(self) -> bytes:
        """Return the journal's bytes; empty if there is no journal yet."""
        try:
            return journal.files(self.place)[0].read_bytes()
        except OSError:
            return b""

    def rows(self) -> list[Row]:
        """Return the journal's rows that can be parsed."""
        return [row for row in map(journal.parsed, filter(None, self.journal().split(b"\n"))) if row is not None]

    def said(self) -> str:
        """Return what the launcher wrote to stderr."""
        return self._err.read_text(errors="replace")

    def processes(self) -> dict[int, list[str]]:
        """Return the running processes of this sweep, with their command lines."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.cmdline()
        return found

    def role(self, name: str) -> list[int]:
        """Return a role's pids: launcher, fork server, attempt's init, worker, rank, guard, report, all."""
        assert self.launcher is not None
        found = self.processes()
        if name == "all":
            return list(found)
        if name == "launcher":
            return [pid for pid in found if pid == self.launcher.pid]
        own = self.launcher.pid
        parents: dict[int, int] = {}
        for pid in found:
            with contextlib.suppress(psutil.Error):
                parents[pid] = psutil.Process(pid).ppid()
        of = {pid: " ".join(words) for pid, words in found.items()}
        templates = {
            pid for pid, words in of.items() if "runners.worker.serve_forks" in words and parents.get(pid) == own
        }
        inits = {
            pid for pid, words in of.items() if parents.get(pid) in templates
            or ("runners.worker.worker" in words and parents.get(pid) == own)
        }  # fmt: skip
        workers = {pid for pid in found if parents.get(pid) in inits}
        roles = {
            "fork server": templates, "init": inits, "worker": workers,
            "rank": {pid for pid in found if parents.get(pid) in workers},
            "guard": {pid for pid, words in of.items() if "harness.process.orphans" in words},
            "report": {pid for pid, words in of.items() if "vramsweep report" in words},
        }  # fmt: skip
        return sorted(roles[name])

    def early(self) -> bool:
        """Return whether the launcher ended before its first output, so while Python was still starting."""
        return not self._out.read_bytes()

    def ended(self) -> bool:
        """Return whether the launcher has ended."""
        return self.launcher is not None and self.launcher.poll() is not None

    def wait(self, seconds: float = ENDS_S) -> int | None:
        """Wait for the launcher and count what it left; return its exit status, None if killed after `seconds`."""
        assert self.launcher is not None
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.launcher.wait(seconds)
        if code is None:
            self.count.lose(f"no end within {seconds:g} s: {self.said()[-300:]}")
            self.launcher.kill()
            self.launcher.wait()
        self._look()
        return code

    def _look(self) -> None:
        """Kill and count an ended launcher's orphans; note rows gone that were in the journal or shown as finished."""
        until = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid, words in left.items():
            self.count.orphans += 1
            self.count.say(f"orphan: {' '.join(words)[:200]}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not self.journal().startswith(self._before):
            self.count.lose("the journal does not begin as it did")
        told = sum(line.startswith(b"[") for line in self._out.read_bytes().splitlines())
        short = told - (len(self.rows()) - self._rows)
        if short > 0:
            self.count.lose(f"{short} rows were shown as finished and are not in the journal", short)
        page = self.place / "report.html"
        if page.exists() and not page.read_bytes().rstrip().endswith(b"</html>"):
            self.count.lose("half a report")
        pythons_own = self.spent or (self.early() and self.said().rstrip().endswith("KeyboardInterrupt"))
        if "Traceback" in self.said() and not pythons_own:
            self.count.lose(self.said()[-600:])

    def finish(self, attempts: int = 3) -> None:
        """Resume the sweep undisturbed until it is done, `attempts` times at most, and judge it."""
        code: int | None = 0
        if self.launcher is not None and not self.ended():
            code = self.wait()
        for _ in range(attempts):
            if self.done():
                break
            self.start()
            code = self.wait()
        rows = [row for row in self.rows() if row["terminal"]]
        answers = Counter(row["trial_id"] for row in rows if outcome.is_answer(row["outcome"]))
        self.count.doubled += sum(number - 1 for number in answers.values())
        if self.done():
            self.count.resumed += self.injected
        else:
            missing = max(1, (self.trials or 0) - len(answers))
            self.count.lose(
                f"exit status {code}, {len(answers)} of {self.trials} trials: {self.said()[-300:]}", missing
            )

    def done(self) -> bool:
        """Return whether every trial has ended with `ok`."""
        last = {row["trial_id"]: row["outcome"] for row in self.rows() if row["terminal"]}
        return len(last) == self.trials and set(last.values()) == {"ok"}

    def inject(self) -> None:
        """Count an injected fault."""
        self.injected += 1
        self.count.injected += 1


@dataclass
class Arena:
    """A folder for tortured sweeps. The same seed gives the same draws, but the machine decides the exact moments."""

    folder: Path
    random: Random
    number: int = 0

    def sweep(self, count: Count, *words: str, trials: int | None = 12, base: Sequence[str] = USUAL) -> Sweep:
        """Return a new sweep of `trials` trials, which by default differ in seed or, if predicted, in length."""
        self.number += 1
        axis = "seq_len" if base is SEVERAL else "seed"
        of = f"{axis}={','.join(str(8 * n) for n in range(1, (trials or 1) + 1))}"
        named = {word.partition("=")[0] for word in words}
        named |= {"runner.target"} if "runner" in named else set()
        kept = [word for word in (*base, of) if word.partition("=")[0] not in named]
        return Sweep(self.folder / str(self.number), [*kept, *words], count, trials)
