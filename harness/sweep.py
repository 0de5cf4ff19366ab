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
from pathlib import Path

from vramsweep.harness import account, ask_others, machine, outcome, plan, predictions, registry, variables
from vramsweep.harness.attempt import RECORDING, Launcher, about_writing, environment, steps
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import PLAN, Journal, finished, read, terminal
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.progress import Lines, Progress
from vramsweep.harness.row import Outcome, Row, system
from vramsweep.harness.trial import ID_VERSION


def run(
    planned: Sequence[Planned],
    settings: Settings,
    folder: Path,
    earlier: Sequence[Planned] = (),
    launcher: Launcher | None = None,
    progress: Callable[[int], Progress] = Lines,
) -> tuple[dict[str, Row], int]:
    """Run every trial without an answer; returns the row that counts for each trial, by id, and the exit status.

    `earlier` are the trials of the same command's batches before this one: they stay in the folder's plan. `launcher`
    is theirs too, with its templates; without one it is made, and ended, here. `progress` is made with the number of
    trials to do.
    """
    try:
        with Journal(folder) as journal, contextlib.ExitStack() as stack:
            if launcher is None:
                launcher = stack.enter_context(Launcher(settings.isolation, folder / "templates"))
            mine = _resumed(planned, settings, folder, journal, earlier, launcher, progress)
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
    if settings.others:
        asked = {p.trial_id: ask_others.question(p, mine.get(p.trial_id)) for p in planned}
        ask_others.ask({name: one for name, one in asked.items() if one is not None}, (), folder)
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
    progress: Callable[[int], Progress],
) -> dict[str, Row]:
    """Run what the journal has no answer for; the row that counts for each trial, by id."""
    if not journal.locked:
        print(f"{folder}: this file system has no locks; run one sweep at a time in this folder", file=sys.stderr)
    rows, unreadable = read(folder)
    if unreadable:
        print(f"{folder}: {unreadable} unreadable line(s) of its journals skipped", file=sys.stderr)
    mine, others = known(rows, planned, settings.any_system)
    todo = placed(plan.pending(planned, mine, settings.retry_failed))
    _write_plan(folder, [*earlier, *planned], settings)
    done, plural = len(planned) - len(todo), "s" * (len(planned) != 1)
    shown = progress(len(todo))
    shown.began(f"{len(planned)} trial{plural}, {done} finished before, {len(todo)} to do → {folder}")
    if others:
        print(f"{other_systems(others)}; any_system=true counts them", file=sys.stderr)
    for line in variables.dropped(os.environ) if todo else ():
        print(line, file=sys.stderr)
    tried = Counter[str]()
    for row in rows:
        tried[row["trial_id"]] = max(tried[row["trial_id"]], row.get("attempt") or 0)
    with contextlib.closing(shown):
        return mine | _run_all(todo, tried, settings, folder, journal, launcher, shown)


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
    return {p.trial_id: account.system_here(p, seen, facts) for p in planned}


def other_systems(rows: Mapping[str, Row]) -> str:
    """How many trials have rows of other systems only, and which systems these are."""
    names = sorted({" · ".join(filter(None, system(row))) for row in rows.values()})
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    were = "s were" if len(rows) != 1 else " was"
    return f"{len(rows)} trial{were} measured on another system ({'; '.join(names[:2])}{more}) and run again here"


def _run_all(
    todo: Sequence[Planned],
    tried: Mapping[str, int],
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    progress: Progress,
) -> dict[str, Row]:
    """Run the trials, and once more those that a fault of the machine stopped, as long as that gets any further.

    Simulated ones are first predicted together, as many as share a template. Raises UserError once `settings.breaker`
    trials in a row have failed the same way.
    """
    done: dict[str, Row] = {}
    predicted: dict[str, Row] = {}
    streak: list[Row] = []
    together = predictions.batches(todo)
    while todo:
        lengths = {p.trial.seq_len for p in todo if p.trial}
        for item in todo:
            if batch := together.pop(predictions.template(item), None):
                found = predictions.run(batch, tried, settings, folder, journal, launcher, progress)
                predicted |= found
                streak = [] if found else streak
            if item.trial_id in predicted:
                continue
            row = run_trial(item, settings, folder, journal, launcher, time.sleep, tried.get(item.trial_id, 0))
            done[item.trial_id] = row
            progress.show(row, item)
            streak = _streak(streak, row)
            if settings.breaker and len(streak) >= settings.breaker and _beyond_one_length(streak, lengths):
                raise UserError(_broken(row, len(streak)))
        faults = [p for p in todo if p.trial_id in done and not outcome.is_verdict(done[p.trial_id]["outcome"])]
        todo = faults if len(faults) < len(todo) else []
        progress.total += len(todo)
    return done | predicted


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
    tried: int = 0,
) -> Row:
    """Attempt a trial until it has an answer or no retry is left; each attempt is a row, the last one terminal.

    A fault of the machine is no verdict, so its row is not terminal. `tried` attempts have a row already.
    """
    trial = item.trial
    if trial is None:
        return journal.append({"sweep": folder.name} | account.impossible(item))
    base: Row = {"sweep": folder.name, "isolation": launcher.isolation} | account.before(item)
    cards = account.cards(trial)
    environ = environment(plan.worker_conf(trial), trial.device.name, os.environ, machine.uuids(cards))
    number = max(tried, account.attempts(folder / "attempts" / item.trial_id))
    for tries in range(settings.retries + 1):
        number += 1
        place = folder / "attempts" / item.trial_id / str(number)
        row = base | account.begun(number)
        foreign = _foreign(cards, launcher.own_pids, sleep)
        if foreign:
            evidence = outcome.Evidence(foreign=foreign)
        else:
            spec = {"trial": item.resolved, "trial_id": item.trial_id, "attempt": number}
            done = launcher.attempt(spec, place, environ, registry.template(trial), settings.timeout_s)
            evidence = done.evidence
            row |= account.ended(done, environ, base["gpu_name"])
        if (place / RECORDING).exists():
            row["recording"] = str((place / RECORDING).relative_to(folder))
        row = account.judged(row, trial, evidence, account.phase(steps(place)), final=tries == settings.retries)
        row = journal.append(row)
        if tries == settings.retries or not outcome.transient(row["outcome"], evidence):
            break
        sleep(settings.backoff_s * 2**tries)
    return row


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


def _write_plan(folder: Path, planned: Sequence[Planned], settings: Settings) -> None:
    """What `status` holds the journal against: the trials, and the system that each would be measured on; and which
    answer the report begins with."""
    systems = _systems(planned)
    distinct = list(dict.fromkeys(systems.values()))
    record = {
        "command": sys.argv[1:],
        "started_at": account.now(),
        "id_version": ID_VERSION,
        "trials": list(systems),
        "systems": distinct,
        "system": [distinct.index(own) for own in systems.values()],
        "any_system": settings.any_system,
        "answer": settings.answer,
        "pid": os.getpid(),
    }
    (folder / PLAN).write_text(json.dumps(record))
