"""The sweep: from planned trials to rows in the journal. Skip what is done, run, append, report progress.

The parent is the only writer of the journal. Not covered: the command line (launch.py), what is planned (plan.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from vramsweep.harness import machine, outcome, plan, registry, variables
from vramsweep.harness.attempt import ENDED, RECORDING, Launcher, about_writing, environment, steps
from vramsweep.harness.errors import UserError
from vramsweep.harness.flags import flags
from vramsweep.harness.journal import Journal, finished, read, terminal
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.row import Outcome, Row, system
from vramsweep.harness.trial import ID_VERSION, Trial

PLAN = "plan.json"
MIB = 1 << 20


def run(
    planned: Sequence[Planned],
    settings: Settings,
    folder: Path,
    earlier: Sequence[Planned] = (),
    launcher: Launcher | None = None,
) -> tuple[dict[str, Row], int]:
    """Run every trial without an answer; returns the row that counts for each trial, by id, and the exit status.

    `earlier` are the trials of the same command's batches before this one: they stay in the folder's plan. `launcher`
    is theirs too, with its templates; without one it is made, and ended, here.
    """
    try:
        with Journal(folder) as journal, contextlib.ExitStack() as stack:
            if launcher is None:
                launcher = stack.enter_context(Launcher(settings.isolation, folder / "templates"))
            mine = _resumed(planned, settings, folder, journal, earlier, launcher)
    except OSError as error:
        what = f"cannot write under {folder}: {error.strerror}"
        if not about_writing(error):
            what = f"the system refused something that the sweep needs: {error}"
        raise UserError(f"{what}; finished rows are safe, mend it and rerun") from None
    except KeyboardInterrupt:
        print("interrupted; every finished row is kept, the same command goes on from here", file=sys.stderr)
        raise SystemExit(130) from None
    mine = {p.trial_id: mine[p.trial_id] for p in planned if p.trial_id in mine}
    unanswered = [row["outcome"] for row in mine.values() if not outcome.is_answer(row["outcome"])]
    faults = sum(not outcome.is_verdict(kind) for kind in unanswered)
    failed = len(unanswered) - faults
    if failed:
        print(
            f"{failed} trial(s) failed; their logs are under {folder / 'attempts'}; retry_failed=true runs them again"
        )
    if faults:
        print(f"{faults} trial(s) were stopped by a fault of the machine; the same command runs them again")
    if settings.report:
        report(folder)
    return mine, 1 if unanswered or len(mine) < len(planned) else 0


def _resumed(
    planned: Sequence[Planned],
    settings: Settings,
    folder: Path,
    journal: Journal,
    earlier: Sequence[Planned],
    launcher: Launcher,
) -> dict[str, Row]:
    """Run what the journal has no answer for; the row that counts for each trial, by id."""
    if not journal.locked:
        print(f"{folder}: this file system has no locks; run one sweep at a time in this folder", file=sys.stderr)
    rows, unreadable = read(folder)
    if unreadable:
        print(f"{folder}: {unreadable} unreadable line(s) of its journals skipped", file=sys.stderr)
    mine, others = known(rows, planned, settings.any_system)
    todo = placed(plan.pending(planned, mine, settings.retry_failed))
    _write_plan(folder, [*earlier, *planned], settings.any_system)
    done, plural = len(planned) - len(todo), "s" * (len(planned) != 1)
    print(f"{len(planned)} trial{plural}, {done} finished before, {len(todo)} to do → {folder}")
    if others:
        print(f"{other_systems(others)}; any_system=true counts them", file=sys.stderr)
    for line in variables.dropped(os.environ) if todo else ():
        print(line, file=sys.stderr)
    return mine | _run_all(todo, settings, folder, journal, launcher)


def placed(planned: Sequence[Planned]) -> list[Planned]:
    """The same trials; those with more ranks than there are GPUs to see cannot run here, and say so."""

    def checked(item: Planned, visible: int) -> Planned:
        reason = machine.too_many_ranks(visible, item.trial.world_size) if item.trial and _on_cuda(item) else None
        return replace(item, trial=None, reason=reason) if reason else item

    visible = len(machine.visible_gpus(os.environ)) if any(map(_on_cuda, planned)) else 0
    return [checked(item, visible) for item in planned]


def _on_cuda(item: Planned) -> bool:
    return item.trial is not None and item.trial.device.name == "cuda"


def known(rows: Sequence[Row], planned: Sequence[Planned], any_system: bool) -> tuple[dict[str, Row], dict[str, Row]]:
    """The rows that count for planned trials, by id, and those of other systems, which do not (any_system: they do)."""
    return counted(rows, _systems(planned), any_system)


def counted(
    rows: Sequence[Row], wanted: Mapping[str, tuple[str | None, ...]], any_system: bool
) -> tuple[dict[str, Row], dict[str, Row]]:
    """The same for trials by id, each with the system that it would be measured on."""
    mine, others = finished(rows, wanted)
    return (others | mine, {}) if any_system else (mine, others)


def _systems(planned: Sequence[Planned]) -> dict[str, tuple[str | None, ...]]:
    """The system that each trial would be measured on here, by id."""
    seen, facts = machine.visible_gpus(os.environ), machine.facts()
    return {p.trial_id: _system(p, seen, facts) for p in planned}


def other_systems(rows: Mapping[str, Row]) -> str:
    """How many trials have rows of other systems only, and which systems these are."""
    names = sorted({" · ".join(filter(None, system(row))) for row in rows.values()})
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    were = "s were" if len(rows) != 1 else " was"
    return f"{len(rows)} trial{were} measured on another system ({'; '.join(names[:2])}{more}) and run again here"


def _run_all(
    todo: Sequence[Planned], settings: Settings, folder: Path, journal: Journal, launcher: Launcher
) -> dict[str, Row]:
    """Run the trials, and once more those that a fault of the machine stopped, as long as that gets any further.

    Raises UserError once `settings.breaker` trials in a row have failed the same way.
    """
    progress = Progress(len(todo))
    done: dict[str, Row] = {}
    streak: list[Row] = []
    while todo:
        lengths = {p.trial.seq_len for p in todo if p.trial}
        for item in todo:
            row = run_trial(item, settings, folder, journal, launcher, time.sleep)
            done[item.trial_id] = row
            progress.show(row, item)
            streak = _streak(streak, row)
            if settings.breaker and len(streak) >= settings.breaker and _beyond_one_length(streak, lengths):
                raise UserError(_broken(row, len(streak)))
        faults = [item for item in todo if not outcome.is_verdict(done[item.trial_id]["outcome"])]
        todo = faults if len(faults) < len(todo) else []
        progress.total += len(todo)
    return done


def _streak(before: list[Row], row: Row) -> list[Row]:
    """The failures in a row that are the same one, this row's last. Others on the device will leave: no failure."""
    kind, reason = row["outcome"], row["reason"]
    if outcome.is_answer(kind):
        return []
    if kind == Outcome.CONTENDED:
        return before
    same = before and outcome.same_way((before[-1]["outcome"], before[-1]["reason"]), (kind, reason))
    return [*before, row] if same else [row]


def _beyond_one_length(streak: Sequence[Row], lengths: Collection[int]) -> bool:
    """The longest trials come first, and only they may be too slow or too long: the next length shows it."""
    return len(lengths) < 2 or len({row["seq_len"] for row in streak}) > 1


def _broken(row: Row, count: int) -> str:
    again = "" if outcome.runs_again(row["outcome"], asked=False) else " with retry_failed=true"
    return (
        f"{count} trials in a row ended in the same way, so the sweep stops here: {row['outcome']}: {row['reason']}. "
        f"All rows are kept; mend it and run the same command{again} (breaker=0 never stops)"
    )


def report(folder: Path) -> None:
    """Figures, tables and report of the sweep in `folder`, if anything in it is finished; that process says its own."""
    if not terminal(read(folder)[0]):
        return
    sys.stdout.flush()
    subprocess.run([sys.executable, "-m", "vramsweep", "report", str(folder)], check=False)


def run_trial(
    item: Planned,
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    sleep: Callable[[float], None],
) -> Row:
    """Attempt a trial until it has an answer or no retry is left; each attempt is a row, the last one terminal.

    A fault of the machine is no verdict, so its row is not terminal.
    """
    base = {"sweep": folder.name, "isolation": launcher.isolation} | machine.facts() | plan.axes(item)
    trial = item.trial
    cards = _cards(trial) if trial else []
    if trial is None:
        return journal.append(base | plan.invalid(item) | {"started_at": _now(), "isolation": None})
    base |= _provenance(trial, cards)
    environ = environment(plan.worker_conf(trial), trial.device.name, os.environ, machine.uuids(cards))
    number = _attempts(folder / "attempts" / item.trial_id)
    for tries in range(settings.retries + 1):
        number += 1
        place = folder / "attempts" / item.trial_id / str(number)
        row: Row = base | {"attempt": number, "started_at": _now(), "host_load": machine.host_load(), "node_trials": []}
        foreign = _foreign(cards, launcher.own_pids, sleep)
        if foreign:
            evidence = outcome.Evidence(foreign=foreign)
        else:
            spec = {"trial": item.resolved, "trial_id": item.trial_id, "attempt": number}
            done = launcher.attempt(spec, place, environ, registry.template(trial), settings.timeout_s)
            evidence = done.evidence
            row |= {"environment": variables.recorded(environ)} | measured(evidence)
            row |= {"duration_s": done.duration_s, "exit_code": evidence.exit_code}
            row |= {"isolation": done.isolation, "cold_reason": done.cold_reason}
            row["gpu_name"] = base["gpu_name"] or row["gpu_name"]  # with several, the system is the first one's
            spent = row.pop("steps_s", None)
            late = outcome.remark(evidence)  # then it is not known what it spent after the measured steps
            row["overhead_s"] = None if spent is None or late else done.duration_s - spent
            notes = [*(row.get("notes") or []), *done.notes, late]
            row["notes"] = [note for note in notes if note] or None
        kind, reason = outcome.classify(evidence)
        final = tries == settings.retries or not outcome.transient(kind, evidence)
        after = row.get("foreign_processes")  # what the worker saw; None where the driver did not tell
        row |= {
            "outcome": kind,
            "reason": reason,
            "terminal": final and outcome.is_verdict(kind),
            "phase": None if kind is Outcome.OK else _phase(place),
            "foreign_processes": sorted({*foreign, *(after or [])}) if foreign or after is not None else None,
            "recording": str((place / RECORDING).relative_to(folder)) if (place / RECORDING).exists() else None,
        }
        measured_here = kind in (Outcome.OK, Outcome.OOM) and trial.device.name != "simulated"
        row["flags"] = flags(row) if measured_here else None
        row = journal.append(row)
        if final:
            break
        sleep(settings.backoff_s * 2**tries)
    return row


def measured(evidence: outcome.Evidence) -> Row:
    """The columns that the worker filled; what it does not know the parent may."""
    values: Row = (evidence.result or {}).get("values", {})
    return {name: value for name, value in values.items() if value is not None}


def _cards(trial: Trial) -> list[machine.Gpu]:
    """The GPUs that the trial's ranks would run on."""
    return machine.visible_gpus(os.environ)[: trial.world_size] if trial.device.name == "cuda" else []


def _provenance(trial: Trial, cards: Sequence[machine.Gpu]) -> Row:
    """What the parent knows of the system under test, so that rows whose worker died say it too."""
    return {
        "gpu_name": cards[0].name if cards else None,
        "gpu_uuid": cards[0].uuid if cards else None,
        "driver_version": cards[0].driver if cards else None,
        "deepspeed_version": machine.version("deepspeed") if trial.sharding in registry.ZERO else None,
    }


def _system(item: Planned, seen: Sequence[machine.Gpu], facts: Row) -> tuple[str | None, ...]:
    """The system that a trial would be measured on now, with the GPUs seen here, as `row.system` says it of rows."""
    if item.trial is None:
        return ()
    device = item.trial.device.name
    return system(facts | _provenance(item.trial, seen if device == "cuda" else []) | {"device": device})


def _attempts(folder: Path) -> int:
    """The highest number of an attempt so far; a killed parent leaves attempts without a row."""
    return max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)


def _phase(place: Path) -> str | None:
    """Where an attempt stopped, from the records it left."""
    records = [record for record in steps(place) if record.get("event") != ENDED]
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
    found: tuple[int, ...] = ()
    for wait in (0.2, 0.5, 1.0, 0.0):
        seen = [pid for card in machine.again(cards) for pid in card.processes or ()] if cards else []
        ours = own() if seen else set()
        found = tuple(pid for pid in seen if pid not in ours)
        if not found:
            return ()
        sleep(wait)
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write_plan(folder: Path, planned: Sequence[Planned], any_system: bool) -> None:
    """What `status` holds the journal against: the trials, and the system that each would be measured on."""
    systems = _systems(planned)
    distinct = list(dict.fromkeys(systems.values()))
    record = {
        "command": sys.argv[1:],
        "started_at": _now(),
        "id_version": ID_VERSION,
        "trials": list(systems),
        "systems": distinct,
        "system": [distinct.index(own) for own in systems.values()],
        "any_system": any_system,
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
        kind = row["outcome"]
        self.counts["failed" if outcome.is_verdict(kind) and not outcome.is_answer(kind) else kind] += 1
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
