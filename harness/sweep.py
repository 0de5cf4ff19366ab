"""The sweep: from planned trials to rows in the journal. Skip what is done, run, append, report progress.

The parent is the only writer of the journal. Not covered: the command line (launch.py), what is planned (plan.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from vramsweep.harness import machine, outcome, plan, variables
from vramsweep.harness.attempt import RECORDING, Launcher, about_writing, environment, steps
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import Journal, read, succeeded, terminal
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.row import Outcome, Row

PLAN = "plan.json"
MIB = 1 << 20


def run(planned: Sequence[Planned], settings: Settings, folder: Path) -> tuple[dict[str, Row], int]:
    """Run every trial without a terminal row; returns the plan's terminal rows by id, and the exit status."""
    with Journal(folder) as journal:
        rows, unreadable = read(folder)
        if unreadable:
            print(f"{journal.path}: {unreadable} unreadable line(s) skipped", file=sys.stderr)
        finished = terminal(rows)
        todo = plan.pending(planned, finished, settings.retry_failed)
        _write_plan(folder, planned)
        done, plural = len(planned) - len(todo), "s" * (len(planned) != 1)
        print(f"{len(planned)} trial{plural}, {done} finished before, {len(todo)} to do → {folder}")
        progress = Progress(len(todo))
        for line in variables.dropped(os.environ):
            print(line, file=sys.stderr)
        with Launcher(settings.isolation, folder / "templates") as launcher:
            try:
                for item in todo:
                    row = run_trial(item, settings, folder, journal, launcher, time.sleep)
                    finished[item.trial_id] = row
                    progress.show(row, item)
            except OSError as error:
                what = f"cannot write under {folder}: {error.strerror}"
                if not about_writing(error):
                    what = f"the system refused something that the sweep needs: {error}"
                raise UserError(f"{what}; finished rows are safe, mend it and rerun") from None
            except KeyboardInterrupt:
                print("interrupted; every finished row is kept, the same command goes on from here", file=sys.stderr)
                raise SystemExit(130) from None
    mine = {p.trial_id: finished[p.trial_id] for p in planned}
    failed = sum(not succeeded(row) for row in mine.values())
    if failed:
        print(
            f"{failed} trial(s) failed; their logs are under {folder / 'attempts'}; retry_failed=true runs them again"
        )
    if settings.report:
        sys.stdout.flush()
        subprocess.run([sys.executable, "-m", "vramsweep", "report", str(folder)], check=False)
    return mine, 1 if failed else 0


def run_trial(
    item: Planned,
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    sleep: Callable[[float], None],
) -> Row:
    """Attempt a trial until it has an answer or no retry is left; each attempt is a row, the last one terminal."""
    base = {"sweep": folder.name, "isolation": launcher.isolation} | machine.facts()
    if item.trial is None:
        row = base | plan.invalid_row(item) | {"started_at": _now(), "isolation": None}
        return journal.append(row)
    trial = item.trial
    cards = machine.visible_gpus(dict(os.environ))[: trial.runner.world_size] if trial.device.name == "cuda" else []
    environ = environment(plan.worker_conf(trial), trial.device.name, os.environ, [card.uuid for card in cards])
    number = _attempts(folder / "attempts" / item.trial_id)
    for tries in range(settings.retries + 1):
        number += 1
        place = folder / "attempts" / item.trial_id / str(number)
        row = base | plan.axes(item) | {"trial_id": item.trial_id, "attempt": number, "started_at": _now()}
        foreign = _foreign(cards, launcher.own_pids, sleep)
        if foreign:
            evidence = outcome.Evidence(foreign=foreign)
        else:
            spec = {"trial": item.resolved, "trial_id": item.trial_id, "attempt": number}
            done = launcher.attempt(spec, place, environ, trial.runner.name, settings.timeout_s)
            evidence = done.evidence
            values = dict((evidence.result or {}).get("values", {}))
            spent = values.pop("steps_s", None)
            row |= {"environment": variables.recorded(environ)} | values
            row |= {"duration_s": done.duration_s, "exit_code": evidence.exit_code}
            row |= {"isolation": done.isolation, "cold_reason": done.cold_reason}
            row["overhead_s"] = None if spent is None else done.duration_s - spent
            row["notes"] = [*(row.get("notes") or []), *done.notes] or None
        kind, reason = outcome.classify(evidence)
        final = tries == settings.retries or not outcome.transient(kind, evidence)
        row |= {
            "outcome": kind,
            "reason": reason,
            "terminal": final,
            "phase": None if kind is Outcome.OK else _phase(place),
            "foreign_processes": list(foreign) if cards else None,
            "recording": str((place / RECORDING).relative_to(folder)) if (place / RECORDING).exists() else None,
        }
        row = journal.append(row)
        if final:
            break
        sleep(settings.backoff_s * 2**tries)
    return row


def _attempts(folder: Path) -> int:
    """The highest number of an attempt so far; a killed parent leaves attempts without a row."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)


def _phase(place: Path) -> str | None:
    """Where an attempt stopped, from the records it left."""
    records = steps(place)
    if not records:
        return "start"
    if "phase" in records[-1]:  # a simulated run says more
        step = records[-1].get("at_step")
        return "load" if step is None else f"step {step}, {records[-1]['phase']}"
    done = [r["step"] for r in records if "step" in r]
    if done:
        return f"step {done[-1] + 1}"
    return "step 0" if records[-1].get("event") == "train" else "load"


def _foreign(
    cards: Sequence[machine.Gpu], own: Callable[[], set[int]], sleep: Callable[[float], None]
) -> tuple[int, ...]:
    """Compute processes on the trial's GPUs that are not ours; those of the last attempt may take a moment to go."""
    uuids = {card.uuid for card in cards}
    found: tuple[int, ...] = ()
    for wait in (0.2, 0.5, 1.0, 0.0):
        seen = [pid for card in machine.gpus() if card.uuid in uuids for pid in card.processes] if uuids else []
        ours = own() if seen else set()
        found = tuple(pid for pid in seen if pid not in ours)
        if not found:
            return ()
        sleep(wait)
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write_plan(folder: Path, planned: Sequence[Planned]) -> None:
    record = {
        "command": sys.argv[1:],
        "started_at": _now(),
        "trials": [p.trial_id for p in planned],
        "pid": os.getpid(),
    }
    (folder / PLAN).write_text(json.dumps(record))


class Progress:
    """One line for each finished trial: done/total, what came out, oom, failed, ETA."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.began = total, 0, time.monotonic()
        self.counts: Counter[str] = Counter()

    def show(self, row: Row, item: Planned) -> None:
        """Count the row and print its line."""
        self.done += 1
        self.counts["failed" if not succeeded(row) else row["outcome"]] += 1
        left = (time.monotonic() - self.began) / self.done * (self.total - self.done)
        label = item.trial.label() if item.trial else str(item.resolved.get("model", {}).get("name"))
        print(
            f"[{self.done}/{self.total}] {row['outcome']:<9} {label} · {_result(row)} · oom {self.counts['oom']}"
            f" · failed {self.counts['failed']} · ETA {duration(left)}",
            flush=True,
        )


def _result(row: Row) -> str:
    if row["outcome"] != Outcome.OK:
        return str(row["reason"])
    allocated, speed = row.get("peak_allocated_bytes"), row.get("tokens_per_s")
    memory = "memory unknown" if allocated is None else f"{allocated / MIB:,.1f} MiB allocated"
    if speed is None:
        reserved = row.get("peak_reserved_bytes")
        return memory if reserved is None else f"{memory}, {reserved / MIB:,.1f} MiB reserved"
    return f"{memory}, {speed:,.0f} tokens/s"


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
