"""The sweep: from planned trials to rows in the journal. Skip what is done, run, append, report progress.

The parent is the only writer of the journal. Not covered: the command line (harness/config/compose.py), what is planned
(plan.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vramsweep.harness.files.bounded_reads import error_reason, replaced
from vramsweep.harness.machine import gpu_health, gpu_lock, machine
from vramsweep.harness.machine.gpu_occupancy import GpuTaken
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import orphans, worker_environment
from vramsweep.harness.process.attempt import Launcher, attempt_environment, is_write_error, read_steps
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.process.signals import LOG, Finished, Interrupts
from vramsweep.harness.process.worker_files import RECORDING
from vramsweep.harness.rows import outcome, process_identity
from vramsweep.harness.rows.journal import Journal, finished, plan_name, plans, read, terminal
from vramsweep.harness.rows.schema import Outcome, Row, system_of
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial_identity import ID_VERSION
from vramsweep.harness.sweep import batch_prediction, oom_dominance, plan, row_builder, scheduler, shards
from vramsweep.harness.sweep.budget import Budget
from vramsweep.harness.sweep.oom_dominance import OomDominance
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.progress import Progress, choose_progress
from vramsweep.harness.sweep.scheduler import Pool, Slot

SETTLE_S = 0.3  # for a signal to be heard by the launcher too


class Interrupted(SystemExit):
    """The user has stopped a sweep, or their terminal has gone; `at_once` if what ran then was ended."""

    def __init__(self, status: int, at_once: bool) -> None:
        super().__init__(status)
        self.at_once = at_once


def run(
    planned: Sequence[Planned],
    settings: Settings,
    folder: Path,
    earlier: Sequence[Planned] = (),
    launcher: Launcher | None = None,
    began_s: float | None = None,
    command: Sequence[str] = (),
) -> tuple[dict[str, Row], int]:
    """Run every trial without an answer; returns the row that counts for each trial, by id, and the exit status.

    Of a shard, only its share of them. `earlier` are the trials of the same command's batches before this one: they
    stay in the folder's plan. `launcher` is theirs too, with its templates; without one it is made, and ended, here.
    `began_s`: when the command began, by time.monotonic(), from where the budget counts; without it, now. `command`:
    the words that the folder's plan keeps. The status of a sweep that its budget has stopped is that of the trials
    which ran. Raises Interrupted and UserError.
    """
    budget, interrupts = Budget(settings, began_s=began_s), Interrupts(folder / LOG)
    refuse_links(folder)
    shard = shards.parse(settings.shard)
    share = plan.take_share(planned, shard)
    try:
        with Journal(folder, shard.writer) as journal, interrupts.heard(), contextlib.ExitStack() as stack:
            if launcher is None:
                launcher = stack.enter_context(Launcher(settings.isolation, folder / "templates"))
            shards.refuse_other_division(folder, shard)
            whole = [*earlier, *planned]
            mine = _resumed(share, settings, folder, journal, whole, launcher, interrupts, budget, command)
    except OSError as error:
        what = f"cannot write under {folder}: {error_reason(error)}"
        if not is_write_error(error):
            what = f"the system refused something that the sweep needs: {error}"
        raise UserError(f"{what}; finished rows are safe, mend it and rerun") from None
    except KeyboardInterrupt as stop:
        print("interrupted; every finished row is kept, the same command goes on from here", file=sys.stderr)
        if settings.report and isinstance(stop, Finished):
            report(folder)
        raise Interrupted(interrupts.status, at_once=not isinstance(stop, Finished)) from None
    mine = {p.trial_id: mine[p.trial_id] for p in share if p.trial_id in mine}
    unanswered = [row["outcome"] for row in mine.values() if not outcome.is_answer(row["outcome"])]
    faults = sum(not outcome.is_verdict(kind) for kind in unanswered)
    failed = len(unanswered) - faults
    if failed:
        print(
            f"{failed} trial(s) failed; their logs are under {folder / 'attempts'}; retry_failed=true runs them again"
        )
    if faults:
        print(f"{faults} trial(s) were stopped by a fault of the machine; the same command runs them again")
    left_out = budget.left_out(len(share), mine)
    if left_out:
        print(left_out)
    if settings.others:
        print("others=true: other tools are not asked any more; docs/validation.md has what they said")
    if settings.answer in runner_table.FORMER_ANSWERS:
        print(f"answer={settings.answer} has no effect any more; docs/questions.md says where the answer is")
    if settings.report:
        report(folder)
    missing = {p.trial_id for p in share} - mine.keys() - budget.refused.keys()
    return mine, 1 if unanswered or missing else 0


def refuse_links(folder: Path) -> None:
    """Raise UserError where a sweep's folder would lead its attempts elsewhere."""
    for name in ("attempts", "templates"):
        if (folder / name).is_symlink():
            raise UserError(
                f"{folder / name} is a link, which a sweep does not write through; choose another results=DIR"
            )


def _resumed(
    planned: Sequence[Planned],
    settings: Settings,
    folder: Path,
    journal: Journal,
    whole: Sequence[Planned],
    launcher: Launcher,
    interrupts: Interrupts,
    budget: Budget,
    command: Sequence[str],
) -> dict[str, Row]:
    """Run what the journals have no answer for; the row that counts for each trial, by id; `whole`: the sweep's."""
    rows, unreadable = read(folder)
    if unreadable:
        print(f"{folder}: {unreadable} unreadable line(s) of its journals skipped", file=sys.stderr)
    todo, mine, notes = remaining_trials(rows, planned, settings)
    dominators = None
    if settings.skip_dominated:
        dominators = OomDominance(finished_rows(rows, whole, settings.any_system)[0].values())
        todo = oom_dominance.order([p for p in todo if not _still_skipped(p, mine, dominators)])
    _end_leftovers(folder, launcher.run)
    _write_plan(folder, whole, settings, launcher.run, {p.trial_id for p in planned}, command)
    done, plural = len(planned) - len(todo), "s" * (len(planned) != 1)
    progress = choose_progress(len(todo), whole)
    part = f"shard {settings.shard}: " if settings.shard else ""
    progress.began(f"{part}{len(planned)} trial{plural}, {done} finished before, {len(todo)} to do → {folder}")
    otherwise = machine.counted_otherwise(os.environ) if any(map(_on_cuda, todo)) else None
    dropped = worker_environment.describe_dropped(os.environ) if todo else ()
    for line in [*notes, *dropped, *filter(None, [otherwise])]:
        print(line, file=sys.stderr)
    tried = Counter[str]()
    for row in rows:
        tried[row["trial_id"]] = max(tried[row["trial_id"]], row.get("attempt") or 0)
    budget.learn(finished_rows(rows, whole, settings.any_system)[0].values())
    interrupts.answer = progress.note
    with contextlib.closing(progress):
        return mine | _run_all(
            todo, tried, settings, folder, journal, launcher, progress, interrupts, budget, dominators
        )


def _still_skipped(item: Planned, mine: Mapping[str, Row], dominators: OomDominance) -> bool:
    """Whether its row says that it was skipped, and still would be, for this or another reason."""
    skipped = item.trial_id in mine and mine[item.trial_id]["outcome"] == Outcome.SKIPPED
    return skipped and dominators.reason(item) is not None


def reject_too_many_ranks(planned: Sequence[Planned]) -> list[Planned]:
    """The same trials; those with more ranks than there are GPUs to see cannot run here, and say so."""

    def checked(item: Planned, visible: int) -> Planned:
        reason = machine.too_many_ranks(visible, item.trial.world_size) if item.trial and _on_cuda(item) else None
        return replace(item, trial=None, reason=reason) if reason else item

    visible = len(machine.visible_gpus(os.environ)) if any(map(_on_cuda, planned)) else 0
    return [checked(item, visible) for item in planned]


def _on_cuda(item: Planned) -> bool:
    return item.trial is not None and item.trial.device.name == "cuda"


def remaining_trials(
    rows: Sequence[Row], planned: Sequence[Planned], settings: Settings
) -> tuple[list[Planned], dict[str, Row], list[str]]:
    """The trials to do, as they can run here; the rows that count, by id; and what to say of rows that do not."""
    mine, others = finished_rows(rows, planned, settings.any_system)
    outdated = row_builder.find_outdated(planned, others | mine)
    notes = [f"{n} trial{'s were' if n > 1 else ' was'} {why}" for why, n in Counter(outdated.values()).items()]
    if others := {trial_id: row for trial_id, row in others.items() if trial_id not in outdated}:
        notes.append(f"{other_systems(others)}; any_system=true counts them")
    todo = reject_too_many_ranks(plan.pending_trials(planned, mine, settings.retry_failed, outdated))
    # once more: some cannot run here, as before
    return plan.pending_trials(todo, mine, settings.retry_failed, outdated), mine, notes


def finished_rows(
    rows: Sequence[Row], planned: Sequence[Planned], any_system: bool
) -> tuple[dict[str, Row], dict[str, Row]]:
    """The rows that count for planned trials, by id, and those of other systems, which do not (any_system: they do)."""
    return rows_for_system(rows, _systems(planned), any_system)


def rows_for_system(
    rows: Sequence[Row], wanted: Mapping[str, tuple[str | None, ...]], any_system: bool
) -> tuple[dict[str, Row], dict[str, Row]]:
    """The same for trials by id, each with the system that it would be measured on."""
    mine, others = finished(rows, wanted)
    return (others | mine, {}) if any_system else (mine, others)


def _systems(planned: Sequence[Planned]) -> dict[str, tuple[str | None, ...]]:
    """The system that each trial would be measured on here, by id."""
    seen, facts = machine.visible_gpus(os.environ), machine.machine_facts()
    return {p.trial_id: row_builder.system_here(p, seen, facts) for p in planned}


def other_systems(rows: Mapping[str, Row]) -> str:
    """How many trials have rows of other systems only, and which systems these are."""
    names = sorted({" · ".join(filter(None, system_of(row))) for row in rows.values()})
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    were = "s were" if len(rows) != 1 else " was"
    return f"{len(rows)} trial{were} measured on another system ({'; '.join(names[:2])}{more}) and run again here"


def _run_all(
    todo: Sequence[Planned],
    tried: Counter[str],
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    progress: Progress,
    interrupts: Interrupts,
    budget: Budget,
    dominators: OomDominance | None = None,
) -> dict[str, Row]:
    """Run the trials, and once more those that a fault of the machine stopped, as long as that gets any further.

    Simulated ones are first predicted together, as many as share a template. Only what the budget allows is started,
    and with `dominators` what neither they nor others that run out of memory here dominate: that is skipped, unless it
    is predicted. One that failed and may not again is tried again at once, on another card where there is one. Raises
    UserError once `settings.breaker` trials in a row have failed the same way, and Finished or KeyboardInterrupt; what
    runs then comes to its end before, but for KeyboardInterrupt.
    """
    done: dict[str, Row] = {}

    def refused(item: Planned) -> bool:
        if budget.allows(item, time.monotonic()) is not None:
            return True
        why = dominators.reason(item) if dominators else None
        if why is not None:
            done[item.trial_id] = journal.append(
                {"sweep": folder.name} | row_builder.unstarted_row(item, Outcome.SKIPPED, why)
            )
            progress.show(done[item.trial_id], item)
        return why is not None

    impossible = [item for item in todo if item.trial is None]
    invalid = (row_builder.unstarted_row(item, Outcome.INVALID, item.reason) for item in impossible)
    done |= {one["trial_id"]: one for one in journal.extend({"sweep": folder.name} | row for row in invalid)}
    for item in impossible:
        progress.show(done[item.trial_id], item)
    left = [p for p in todo if dominators is None or dominators.reason(p) is None]
    for batch in batch_prediction.batches(left).values():
        allowed = [item for item in batch if budget.allows(item, time.monotonic()) is None]
        if allowed:
            with interrupts.finishing():
                done |= batch_prediction.run(
                    allowed, tried, settings, folder, journal, launcher, progress, interrupts.check
                )
    budget.learn(done.values())
    todo = [item for item in todo if item.trial_id not in done]
    room = scheduler.list_resources(todo, settings.slots)
    health = gpu_health.GpuHealth(place.card for place in room)

    def run(item: Planned, slot: Slot) -> Row:
        progress.starts(item)
        return run_trial(item, settings, folder, journal, launcher, slot, tried[item.trial_id], tries[item.trial_id])

    while todo:
        lengths = {p.trial.seq_len for p in todo if p.trial}
        waiting, streak, mistake, tries = list(todo), list[Row](), None, Counter[str]()
        pool = Pool(launcher.threads, room, settings.exclusive, interrupts.check, health)
        with interrupts.finishing(), pool as running:
            while True:
                while mistake is None and not interrupts.asked and running.start(waiting, run, refused):
                    pass
                if not running:
                    break
                item, row = running.wait()
                if row is None:
                    continue
                done[item.trial_id] = row
                tried[item.trial_id], progress.cards = row["attempt"], health.warnings()
                tries[item.trial_id] += 1
                if not row["terminal"] and tries[item.trial_id] <= settings.retries:
                    waiting.insert(0, item)
                    continue
                budget.learn([row])
                progress.show(row, item)
                if dominators is not None:
                    dominators.add(row)
                streak = _same_failures(streak, row)
                long = settings.breaker and len(streak) >= settings.breaker and _spans_lengths(streak, lengths)
                if long and not health.explains(row):
                    mistake = mistake or UserError(_broken(row, len(streak)))
        if mistake is not None:
            raise mistake
        faults = [p for p in todo if p.trial_id in done and not outcome.is_verdict(done[p.trial_id]["outcome"])]
        todo = faults if len(faults) < len(todo) else []
        progress.total += len(todo)
    return done


def _same_failures(before: list[Row], row: Row) -> list[Row]:
    """The failures in a row that are the same one, this row's last. Others on the device will leave: no failure."""
    kind, reason = row["outcome"], row["reason"]
    if outcome.is_answer(kind):
        return []
    if kind == Outcome.CONTENDED:
        return before
    same = before and outcome.is_same_failure((before[-1]["outcome"], before[-1]["reason"]), (kind, reason))
    return [*before, row] if same else [row]


def _spans_lengths(streak: Sequence[Row], lengths: Collection[int]) -> bool:
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
    subprocess.run(build_command("vramsweep", "report", str(folder)), check=False)


def run_trial(
    item: Planned,
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    slot: Slot,
    tried: int = 0,
    tries: int = 0,
) -> Row:
    """Attempt a trial once; the row is terminal if it has an answer or no retry is left.

    A fault of the machine is no verdict, so its row is not terminal. `tried` attempts have a row already, `tries` of
    them in this round.
    """
    trial = item.trial
    if trial is None:
        return journal.append({"sweep": folder.name} | row_builder.unstarted_row(item, Outcome.INVALID, item.reason))
    base: Row = {"sweep": folder.name, "isolation": launcher.isolation} | row_builder.initial_columns(item, slot.cards)
    environ = attempt_environment(plan.worker_conf(trial), trial.device.name, os.environ, machine.uuids(slot.cards))
    if tries:
        slot.sleep(settings.backoff_s * 2 ** (tries - 1))
    number = max(tried, row_builder.count_attempts(folder / "attempts" / item.trial_id)) + 1
    place = folder / "attempts" / item.trial_id / str(number)
    row = base | row_builder.started_columns(number)
    with gpu_lock.lock_gpus(slot.cards, slot.sleep, settings.timeout_s) as others:
        taken = GpuTaken(held=others) if others else launcher.occupancy.taken(slot.cards, launcher.own_pids, slot.sleep)
        if taken:
            evidence = outcome.Evidence(foreign=taken.processes, held=taken.held)
        else:
            spec = {"trial": item.resolved, "trial_id": item.trial_id, "attempt": number, "cpus": slot.cpus}
            template = runner_table.fork_server_name(trial)
            done = launcher.attempt(spec, place, environ, template, settings.timeout_s, slot.check)
            evidence = done.evidence
            if evidence.result is None and (evidence.exit_code or -1) < 0:
                time.sleep(SETTLE_S)  # who ends workers and launcher at once ends no trial
                slot.check()
            row |= row_builder.process_columns(done, environ, base["gpu_name"])
    if (place / RECORDING).exists():
        row["recording"] = str((place / RECORDING).relative_to(folder))
    row["node_trials"] = sorted(slot.beside)
    final = tries == settings.retries
    return journal.append(row_builder.classified_row(row, trial, evidence, row_builder.phase(read_steps(place)), final))


def _end_leftovers(folder: Path, run: str) -> None:
    """End what the last launchers in this folder have left on this machine, if they and their guards were killed."""
    for earlier in plans(folder):
        last, launcher = earlier.get("run"), earlier.get("launcher")
        # a copied folder, or another node's shard, names one that runs elsewhere
        gone = isinstance(launcher, dict) and process_identity.is_alive(launcher) is False
        left = dict(orphans.marked_processes(last)) if gone and isinstance(last, str) and last != run else {}
        if not left:
            continue
        stuck = orphans.end_marked(str(last))
        pids = ", ".join(map(str, sorted(left)))
        came = orphans.describe_stuck(stuck) if stuck else f"which were ended: {pids}"
        print(f"{folder}: the sweep before was killed and had left processes behind, {came}", file=sys.stderr)


def _write_plan(
    folder: Path,
    planned: Sequence[Planned],
    settings: Settings,
    run: str,
    own: Collection[str],
    command: Sequence[str],
) -> None:
    """What `status` holds the journal against: the trials, which of them are this command's own, and the system that
    each would be measured on; which answer the report begins with; and the mark of the processes that are started."""
    systems = _systems(planned)
    distinct = list(dict.fromkeys(systems.values()))
    record = {
        "command": list(command),
        "started_at": row_builder.now(),
        "id_version": ID_VERSION,
        "trials": list(systems),
        "own": [at for at, trial_id in enumerate(systems) if trial_id in own],
        "systems": distinct,
        "system": [distinct.index(own) for own in systems.values()],
        "any_system": settings.any_system,
        "answer": settings.answer,
        "price_per_hour": settings.price_per_hour,
        "pid": os.getpid(),
        "launcher": process_identity.own_identity(),
        "run": run,
        "shard": settings.shard,
    }
    place = folder / plan_name(shards.parse(settings.shard).writer)
    with replaced(place) as aside:
        aside.write_text(json.dumps(record))
