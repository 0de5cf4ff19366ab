"""One command's sweep: the trials, folder, launcher and rows that all its batches share."""

import contextlib
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from vramsweep.harness.files import file_names
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.console import Activity
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import signals
from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.sweep import plan, resume, run_trials, shards
from vramsweep.harness.sweep.plan import Planned, Settings

Answer = Row | float | None


@dataclass
class Session(contextlib.AbstractContextManager["Session"]):
    """The state that the batches of one command share. Use it as a context manager, which ends its launcher.

    `words` are the command line's, after the `verb`. `suffix` ends the folder's name (None: the device). `divisible`:
    the verb's sweep may be divided into shards. `folder` is the first batch's, because all batches are one sweep.
    `preset` names a preset of cases. `detected` is the device that `auto` stood for, if it was asked; `auto`: it is the
    sweep's. `launcher` outlives a batch, because its fork servers take time to start. `notes` are lines for readers of
    the plan.
    """

    words: Sequence[str] = ()
    suffix: str | None = None
    divisible: bool = False
    verb: str = "sweep"
    preset: str | None = None
    detected: str | None = None
    settings: Settings | None = None
    folder: Path = Path()
    planned: dict[str, Planned] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    status: int = 0
    auto: bool = False
    launcher: Launcher | None = None
    notes: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)  # the budget covers the whole command

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self.launcher is not None:
            self.launcher.close()

    @property
    def trials(self) -> list[Planned]:
        """Trials of all batches so far."""
        return list(self.planned.values())

    @property
    def command(self) -> list[str]:
        """Command line words, the verb first."""
        return ["sweep" if self.verb == "run" else self.verb, *self.words]  # `run` has turned its words into a sweep's

    @property
    def slurm(self) -> shards.Slurm | None:
        """Options of the Slurm jobs that are to run the sweep; None if this command runs it."""
        settings = self.settings
        return shards.slurm(settings.cluster) if settings and settings.action == "run" and not settings.shard else None

    def add(self, configs: Sequence[Mapping[str, Any]], whole: bool = True) -> list[list[Planned]]:
        """Take configurations into the sweep; return each one's trials, one a repeat.

        `whole`: the command has no others. Raises UserError for settings that contradict each other.
        """
        settings = self.settings = plan.settings(configs)
        self._refuse_parts(whole)
        with Activity(f"checking the settings of {len(configs) * settings.repeats:,} trials"):
            expanded = plan.expand_trials(configs, settings.repeats)
            earlier, batch = self.planned, plan.order_trials(expanded)
        devices = {config["device"]["name"] for config in configs if isinstance(config.get("device"), Mapping)}
        self.auto = {self.detected} == devices  # with a list, Hydra composes the default too
        self.place(settings, batch, "slurm" if self.slurm and self.auto else self.suffix)
        if settings.action == "run" and whole:  # before a folder is made: the likely cause is a mistyped value
            refuse_invalid(p.reason for p in (batch if self.slurm else resume.reject_too_many_ranks(batch)))
            if devices == {"cuda"} and not self.slurm and not journal.files(self.folder)[0].exists():
                device, why = machine.choose_device(os.environ)  # before a worker is started to find that out
                if device != "cuda":
                    instead = "to predict, replace device=cuda with gpu=h100-80gb"
                    raise UserError(f"device=cuda: {why} (`vramsweep doctor`); {instead}")
        if self.auto and devices == {"simulated"} and not earlier and not self.slurm:
            _refuse_blind_node(settings)
            print("no usable CUDA device: predicting memory on device=simulated (device=cpu measures)", file=sys.stderr)
        self.planned = earlier | {p.trial_id: p for p in batch}
        return expanded

    def first_trials(self, configs: Sequence[Mapping[str, Any]]) -> tuple[list[Planned], Settings]:
        """Return the first trial of each configuration, before any is run, for a sweeper that chooses among them; and
        the settings. Raises UserError if the sweep cannot come in batches."""
        settings = self.settings = plan.settings(configs)
        self._refuse_parts(whole=False)
        planned = [one for one, *_ in plan.expand_trials(configs, 1)]
        self.place(settings, planned)
        return planned, settings

    def place(self, settings: Settings, planned: Sequence[Planned], suffix: str | None = None) -> Path:
        """Return the folder of the command's sweep, which is named after its first trials."""
        self.settings = settings
        if self.folder == Path():
            self.folder = Path(settings.results) / (settings.name or _name(planned, self.preset, suffix or self.suffix))
        return self.folder

    def start(self) -> Launcher:
        """Return the launcher of all the command's batches, started at the first call."""
        assert self.settings is not None
        if self.launcher is None:
            signals.on_sigterm()
            logs = own_files(self.folder) / "templates" / (shards.parse(self.settings.shard).writer or "")
            self.launcher = Launcher(self.settings.isolation, logs)
        return self.launcher

    def run(self, expanded: Sequence[Sequence[Planned]]) -> list[Answer]:
        """Run the trials of configurations that `add` returned; return the answer of each.

        An answer is the terminal row of the first repeat, None if it was not run. With `objective` it is that column's
        median over the repeats, None if a repeat has no value (out of memory, invalid, failed). None tells an
        optimising sweeper that the trial failed. Optuna's counts a value that is no number as a failure and continues,
        while NaN ends its study.
        """
        settings = self.settings
        assert settings is not None
        batch = plan.order_trials(expanded)
        own = {p.trial_id for p in batch}
        earlier = [p for p in self.trials if p.trial_id not in own]
        once = dataclasses.replace(settings, report=False)
        rows, status = run_trials.run(batch, once, self.folder, earlier, self.start(), self.began_s, self.command)
        self.rows |= rows
        self.status = max(self.status, status)
        return [answer_of([rows.get(p.trial_id) for p in of_one], settings.objective) for of_one in expanded]

    def answer(self, configs: Sequence[Mapping[str, Any]]) -> list[Answer]:
        """Answer a batch of configurations now; with None if the command only plans."""
        expanded = self.add(configs, whole=False)
        running = self.settings is not None and self.settings.action == "run"
        return self.run(expanded) if running else [None] * len(configs)

    def run_aside(self, planned: Sequence[Planned], suffix: str) -> dict[str, Row]:
        """Run trials that this sweep needs to know of, in the folder NAME-suffix next to its own; return rows by id."""
        assert self.settings is not None
        signals.on_sigterm()
        alone = dataclasses.replace(self.settings, report=False, others=False, skip_dominated=False)
        place = self.folder.with_name(f"{self.folder.name}-{suffix}")
        return run_trials.run(planned, alone, place, command=self.command)[0]

    def _refuse_parts(self, whole: bool) -> None:
        """Raise UserError if a command cannot be divided, because its next step depends on rows of all trials."""
        settings = self.settings
        if settings is None or not (settings.shard or shards.slurm(settings.cluster)):
            return
        if not whole:
            raise UserError(
                "a sweeper that runs in batches needs the rows of all trials; leave out cluster= and shard="
            )
        if not self.divisible and (settings.action == "run" or self.suffix is not None):
            raise UserError("cluster= and shard= divide only the trials of sweep and run; leave them out here")


def answer_of(rows: Sequence[Row | None], objective: str | None) -> Answer:
    """Return the answer that the rows of one configuration's repeats give."""
    if objective is None:
        return rows[0]
    values = [row[objective] for row in rows if row is not None and row[objective] is not None]
    return float(statistics.median(values)) if len(values) == len(rows) else None


def refuse_invalid(
    reasons: Iterable[str | None], could: str = "can", where: str = "; `vramsweep plan` lists them"
) -> None:
    """Raise UserError if every trial has a reason why it cannot run, or was found to be impossible."""
    first, *more = dict.fromkeys(reasons)
    if first is not None and None not in more:
        others = f" (and {len(more)} more reasons{where})" if more else ""
        raise UserError(f"no trial {could} run: {first}{others}")


def refuse_impossible_rows(session: Session) -> None:
    """Raise UserError if no trial of any batch can run, by the plan or by its row."""
    refuse_invalid(p.reason for p in session.trials)
    if session.settings is not None and session.settings.action == "run" and session.settings.shard is None:
        rows = [session.rows.get(name, {}) for name in session.planned]
        invalid = (str(row["reason"]) if row.get("outcome") == Outcome.INVALID else None for row in rows)
        refuse_invalid(invalid, "could", ", in the rows")


def _refuse_blind_node(settings: Settings) -> None:
    """Raise UserError in a job for a GPU on a node without one, because it would predict where all others measure."""
    slurm = shards.slurm(settings.cluster) if settings.shard else None
    if slurm and slurm.gpus != 0:
        raise UserError(
            f"device=auto: {platform.node()} has no usable CUDA device, but this job is for GPUs; `vramsweep doctor` "
            "there says why (device=cpu measures without a GPU, device=simulated predicts)"
        )


def _name(planned: Sequence[Planned], preset: str | None, suffix: str | None) -> str:
    """Name a sweep's folder after its preset of cases, else after its models and runners."""

    def of(key: str) -> str:
        return "+".join(sorted({str((p.resolved.get(key) or {}).get("name")) for p in planned}))

    return file_names.make_safe(f"{preset or of('model') + '-' + of('runner')}-{suffix or of('device')}")
