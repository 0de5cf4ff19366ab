"""From the words of a command line to rows and their report: the code that `sweep`, `run` and `predict` share.

Words become configurations (harness/config/compose.py), and these become trials and rows (harness/sweep/session.py).
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.journal_lock import Lock
from vramsweep.harness.sweep import run_trials, slurm_jobs, sweep_status
from vramsweep.harness.sweep.plan import Planned
from vramsweep.harness.sweep.session import Session, refuse_impossible_rows
from vramsweep.harness.verbs import plan

REPORTING = ".reporting"  # locked by the shard that writes the report


def run_sweep(argv: Sequence[str], verb: str = "sweep") -> int:
    """Run the sweep that a command line names, whole or a shard of it, and write its report.

    Returns 0 if every trial has an answer, 1 if some failed, 130 if interrupted. Raises UserError for a mistake, or if
    no trial can run.
    """
    swept = sweep_words(argv, verb, divisible=True)
    write_report(swept)
    return swept.status


main = run_sweep  # of the verb sweep


def sweep_words(argv: Sequence[str], verb: str, suffix: str | None = None, divisible: bool = False) -> Session:
    """Run the sweep that a command line names; return it with its rows and its exit status.

    `suffix` ends its folder's name (None: the device); `divisible`: it may be divided into shards. Raises UserError.
    """
    from vramsweep.harness.config.compose import compose  # here, because it imports Hydra, which no refusal needs
    from vramsweep.harness.config.overrides import FULL_ERROR, variable

    session = Session(argv, suffix, divisible, verb)
    with session:
        try:
            if configs := compose(argv, verb, "run", session):
                with variable(FULL_ERROR, None):  # because workers must not inherit it
                    _run(session, session.add(configs))
            if session.settings is not None:
                if session.settings.action == "plan":
                    plan.show_session(session)
                refuse_impossible_rows(session)
        except run_trials.Interrupted as end:
            session.status = int(end.code or 0)
            if end.at_once:
                session.settings = None  # so that nothing is reported
        except SystemExit as end:  # because Hydra ends so
            session.status, session.settings = end.code if isinstance(end.code, int) else 1, None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            session.status, session.settings = 130, None
    return session


def _run(session: Session, expanded: Sequence[Sequence[Planned]]) -> None:
    settings = session.settings
    assert settings is not None
    if session.slurm is not None:
        slurm_jobs.submit(
            session.trials, settings, session.slurm, session.folder, session.words, session.auto, run_sweep
        )
        session.settings = dataclasses.replace(settings, report=False)  # because the last of the jobs writes it
    elif settings.action == "run":
        session.run(expanded)


def write_report(session: Session, brief: bool = False) -> None:
    """Write the report of a sweep that was run, if it is wanted; `brief`: print only its path.

    Raises KeyboardInterrupt, which ends it.
    """
    settings = session.settings
    if settings is not None and settings.action == "run" and settings.report:
        whole = settings.shard is None
        failed = run_trials.report(session.folder, brief) if whole else _report_once(session.folder)
        session.status = session.status or int(bool(failed))


def _report_once(folder: Path) -> int:
    """Write the report of a sweep in shards from the shard with the last row of all; return its exit status."""
    found = sweep_status.read_status(folder)
    if found.done != found.total:
        rows = f"{found.done} of {found.total} trials have rows"
        print(f"{rows}; the shard that ends last writes the report, or run `vramsweep report`")
        return 0
    status, place = 0, own_files(folder) / REPORTING
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with contextlib.suppress(UserError):  # another shard saw the last row too, and reports
            lock = Lock(place, descriptor)
            status = run_trials.report(folder)
            lock.release()
    finally:
        os.close(descriptor)
    return status
