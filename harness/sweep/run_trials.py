"""One sweep, from planned trials to rows in the journal: skip finished trials, run the rest, report progress.

This process, the parent of all workers, is the only writer of the journal.
"""

import contextlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from vramsweep.harness.files.bounded_reads import error_reason
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import worker_environment
from vramsweep.harness.process.attempt import Launcher, is_write_error
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.process.signals import LOG, Finished, Interrupts, ignore_hangup
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.journal import Journal, files, read, terminal
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import runner_table
from vramsweep.harness.sweep import oom_dominance, plan, resume, row_builder, shards
from vramsweep.harness.sweep.budget import Budget
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.progress import choose_progress
from vramsweep.harness.sweep.trial_loop import run_all


class Interrupted(SystemExit):
    """The user has stopped a sweep, or the terminal has closed; `at_once`: trials that were running have been ended."""

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
    interrupts: Interrupts | None = None,
    describe: Callable[[Row], str] | None = None,
) -> tuple[dict[str, Row], int]:
    """Run every trial without an answer; return the row that counts for each trial, by id, and the exit status.

    A shard runs only its share. `earlier` are trials of this command's earlier batches, which the folder's plan keeps.
    All batches share `launcher` and its fork servers; if it is None, it is made and ended here. The budget counts from
    `began_s`, the start of the command by time.monotonic(); None means now. `command` has the words that the folder's
    plan keeps. `interrupts` says when to stop, by default the user's signals do. `describe`: see Progress. If the
    budget stops a sweep, the status is that of the trials that ran. Raises Interrupted and UserError.
    """
    budget, interrupts = Budget(settings, began_s=began_s), interrupts or Interrupts(own_files(folder) / LOG)
    resume.refuse_links(folder)
    shard, whole = shards.parse(settings.shard), [*earlier, *planned]
    share = plan.take_share(planned, shard)

    def resumed(journal: Journal, launcher: Launcher) -> dict[str, Row]:
        """Run this shard's trials without an answer in the journals; return the row that counts for each, by id."""
        rows, unreadable = read(folder)
        if unreadable:
            print(f"{folder}: {unreadable} unreadable line(s) of its journals skipped", file=sys.stderr)
        todo, mine, notes = resume.remaining_trials(rows, share, settings)
        counted, _ = resume.rows_for_system(rows, row_builder.systems_here(whole), settings.any_system)
        dominators = None
        if settings.skip_dominated:
            dominators = oom_dominance.OomDominance(counted.values())
            skipped = {trial_id for trial_id, row in mine.items() if row["outcome"] == Outcome.SKIPPED}
            # a trial that would be skipped again, for that or another reason, stays skipped
            again = [p for p in todo if p.trial_id not in skipped or dominators.reason(p) is None]
            todo = oom_dominance.order(again)
        resume.end_leftovers(folder, launcher.run)
        resume.write_plan(folder, whole, settings, launcher.run, {p.trial_id for p in share}, command)
        done, plural = len(share) - len(todo), "s" * (len(share) != 1)
        progress = choose_progress(len(todo), whole)
        progress.describe = describe or progress.describe
        part = f"shard {settings.shard}: " if settings.shard else ""
        progress.began(f"{part}{len(share)} trial{plural}, {done} finished before, {len(todo)} to do → {folder}")
        otherwise = machine.counted_otherwise(os.environ) if any(map(resume.on_cuda, todo)) else None
        dropped = worker_environment.describe_dropped(os.environ) if todo else ()
        for line in [*notes, *dropped, *filter(None, [otherwise])]:
            print(line, file=sys.stderr)
        tried = Counter[str]()
        for row in rows:
            tried[row["trial_id"]] = max(tried[row["trial_id"]], row.get("attempt") or 0)
        budget.learn(counted.values())
        interrupts.answer = progress.note
        with contextlib.closing(progress):
            return mine | run_all(
                todo, tried, settings, folder, journal, launcher, progress, interrupts, budget, dominators
            )

    try:
        with Journal(own_files(folder), shard.writer) as journal, interrupts.heard(), contextlib.ExitStack() as stack:
            if launcher is None:
                launcher = stack.enter_context(Launcher(settings.isolation, own_files(folder) / "templates"))
            shards.refuse_other_division(folder, shard)
            mine = resumed(journal, launcher)
    except OSError as error:
        what = f"cannot write under {folder}: {error_reason(error)}"
        if not is_write_error(error):
            what = f"the system refused a resource that the sweep needs: {error}"
        raise UserError(f"{what}; finished rows are kept; fix the problem and run the same command again") from None
    except KeyboardInterrupt as stop:
        print("interrupted; finished rows are kept; run the same command again to resume", file=sys.stderr)
        if settings.report and isinstance(stop, Finished):
            report(folder)
        raise Interrupted(interrupts.status, at_once=not isinstance(stop, Finished)) from None
    mine = {p.trial_id: mine[p.trial_id] for p in share if p.trial_id in mine}
    unanswered = [row["outcome"] for row in mine.values() if not outcome.is_answer(row["outcome"])]
    faults = sum(not outcome.is_verdict(kind) for kind in unanswered)
    if failed := len(unanswered) - faults:
        logs = own_files(folder) / "attempts"
        print(f"{failed} trial(s) failed; their logs are under {logs}; retry_failed=true runs them again")
    if faults:
        print(f"{faults} trial(s) were stopped by a fault of the machine; the same command runs them again")
    if left_out := budget.left_out(len(share), mine):
        print(left_out)
    if settings.others:
        print("others=true has no effect; docs/accuracy.md has the results of other tools")
    if settings.answer in runner_table.FORMER_ANSWERS:
        print(f"answer={settings.answer} has no effect; docs/settings.md names the table to read instead")
    if settings.report:
        report(folder)
    missing = {p.trial_id for p in share} - mine.keys() - budget.refused.keys()
    return mine, 1 if unanswered or missing else 0


def report(folder: Path, brief: bool = False) -> int:
    """Write figures, tables and report of the sweep in `folder` if anything is finished there; return the exit status.

    A separate process does so and prints what it wrote; with `brief` only where, because the screen has the rest.
    """
    if not terminal(read(folder)[0]):
        return 0
    page = folder / "report.html"
    there = brief and page.is_file() and (folder / "rows.csv").is_file()
    if there and all(one.stat().st_mtime < page.stat().st_mtime for one in files(folder)):
        print(f"\nreport    {page} (kept, because no row has changed; `vramsweep report {folder}` rewrites it)")
        return 0
    sys.stdout.flush()
    command = build_command("vramsweep", "report", str(folder), *["--brief"] * brief)
    with ignore_hangup():
        return subprocess.run(command, check=False).returncode
