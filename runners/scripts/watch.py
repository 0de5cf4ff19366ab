"""`vramsweep.watch()`: an ordinary row of a training that runs in this very process, written when the block ends.

    with vramsweep.watch("mine", seq_len=512, micro_batch=4):
        train()

The observer follows every optimizer step in the block: `warmup_steps`, one whose FLOPs are counted, one whose phases
are separated; all others are measured. With several ranks each has its own block, and rank 0 writes the row. Ranks meet
where the block ends, or just before their process group is destroyed in it. An exception that leaves the block is the
row's outcome and is raised further. Afterwards torch is as it was. In a training that vramsweep started itself the
block does nothing, because that training has a row already.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.files import file_names, redaction
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.machine import machine
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError, describe
from vramsweep.harness.process import worker_environment
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.rows.quality_flags import flags
from vramsweep.harness.rows.schema import BY_NAME, Outcome, Row
from vramsweep.harness.spec import command_template, trial_identity
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.sweep import row_builder
from vramsweep.runners.measure.peak_counters import SHARED
from vramsweep.runners.rank import process_end
from vramsweep.runners.scripts import observed_row
from vramsweep.runners.scripts.hook.sitecustomize import ATTEMPT
from vramsweep.runners.scripts.observation_files import WATCH
from vramsweep.runners.scripts.observer import Observer

WARMUP_STEPS = 3
TRIES = 50  # tries to get the journal's lock, 0.1 s apart
_watching: list[Watch] = []


class Watch(contextlib.AbstractContextManager["Watch"]):
    """The context manager of the block. `row` is the row written at its end; None if none was written."""

    def __init__(
        self, name: str = "watch", *, results: str = "results", warmup_steps: int = WARMUP_STEPS, **settings: Any
    ) -> None:
        """Check and keep the arguments: `name` is the folder under `results`, `settings` are those of the training.

        Settings of a trial (seq_len, micro_batch, precision, ...) fill their columns; others are options of the row.
        Raises UserError for a value that a setting cannot have, or that a row cannot hold.
        """
        self.row: Row | None = None
        if why := file_names.name_problem(name):
            raise UserError(f"vramsweep.watch: name={name[:60]!r}: {why}; it must name one folder in {results}")
        self._place = Path(results) / name
        self._warmup_steps = warmup_steps
        self._told = set(settings) & {*command_template.UNSAID, *command_template.TOLD}
        self._trial = _trial(settings, self._told, warmup_steps)
        self._observer: Observer | None = None
        self._left_alone = ATTEMPT in os.environ

    def __enter__(self) -> Watch:
        if self._left_alone:
            return self
        if _watching:
            raise UserError("vramsweep.watch: this process is already being watched; end that block first")
        self._began, self._started_at = time.monotonic(), row_builder.now()
        self._folder = Path(tempfile.mkdtemp(prefix="vramsweep-"))
        asked = {
            "warmup_steps": self._warmup_steps,
            "precision": self._trial.precision if "precision" in self._told else None,
            "worker": os.getpid(),
            "variables": {name: os.environ.get(name) for name in worker_environment.ALLOCATOR},
        }
        (self._folder / WATCH).write_text(json.dumps(asked))
        self._observer = Observer(self._folder)
        self._observer.install()
        SHARED.forget()
        self._ranks: list[observed_row.Seen] = []  # reports of all ranks, once they have met
        if torch.distributed.is_available():
            destroy = torch.distributed.destroy_process_group
            self._observer.hooks.patch(torch.distributed, "destroy_process_group", self._meeting_before(destroy))
        _watching.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        observer, self._observer = self._observer, None
        if observer is None:
            return
        _watching.remove(self)
        ended = error if isinstance(error, Exception) else None  # sys.exit and Ctrl-C end a training that went well
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        try:
            if not self._ranks:
                self._meet(observer, alone=not well)  # a rank that failed or was stopped waits for no other
            self._write(json.loads(observer.file.read_text()), ended)
        except Exception as problem:
            said = str(problem) if isinstance(problem, UserError) else f"{type(problem).__name__}: {problem}"
            warnings.warn(f"vramsweep.watch wrote no row: {said}", stacklevel=2)
        finally:
            observer.uninstall()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _meeting_before(self, destroy: Callable[..., None]) -> Callable[..., None]:
        """Return a stand-in for torch.distributed.destroy_process_group that first lets the ranks meet a last time."""

        @functools.wraps(destroy)
        def run(group: Any = None) -> None:
            every = group is None or group is torch.distributed.group.WORLD
            if every and self._observer is not None and sys.exc_info()[0] is None:
                with contextlib.suppress(Exception):  # the block's end reports it
                    self._meet(self._observer, alone=False)
            destroy(group)

        return run

    def _meet(self, observer: Observer, alone: bool) -> None:
        """Gather the reports of all ranks, or of this one alone. Raises UserError if there is no process group."""
        observer.block_ended()
        own = json.loads(observer.file.read_text())
        if alone or own["world_size"] == 1:
            self._ranks = [own]
            return
        if not torch.distributed.is_initialized():
            raise UserError(f"the {own['world_size']} ranks no longer have a process group; destroy it after the block")
        every: list[Any] = [None] * own["world_size"]
        with torch.cuda.device(own["card"]) if "card" in own else contextlib.nullcontext():  # NCCL's is the current one
            torch.distributed.all_gather_object(every, own)
        self._ranks = every

    def _write(self, own: observed_row.Seen, error: Exception | None) -> None:
        if own["rank"] != 0 and error is None:
            return
        if own["problem"]:
            raise RuntimeError(own["problem"])
        measured = len(self._ranks) == own["world_size"] and all("columns" in one for one in self._ranks)
        if error is None and len(self._ranks) < own["world_size"]:
            raise UserError(f"the block ended before its {own['world_size']} ranks could exchange results")
        if error is None and not measured:
            needed = self._warmup_steps + 4
            raise UserError(f"the block had {own['steps']} optimizer steps, but a row needs {needed}")
        row = self._base(own)
        if measured:
            found = observed_row.columns(self._trial, self._ranks, self._told)
            row |= {name: value for name, value in found.items() if value is not None}
        row.pop("steps_s", None)
        if error is not None:
            kind, reason = outcome.classify(outcome.Evidence(exit_code=1, result=process_end.error_result(error)))
            row |= {"outcome": kind, "reason": reason, "phase": f"step {own['index'] or 0}"}
        row["flags"] = flags(row) if row["outcome"] in (Outcome.OK, Outcome.OOM) else None
        self.row = _append(self._place, row)

    def _base(self, own: observed_row.Seen) -> Row:
        """Return the columns of the row that do not depend on what was measured."""
        device = trials.DeviceAxis(name="cuda" if "card" in own else "cpu")
        self._trial = trial = self._trial.model_copy(update={"device": device, "world_size": own["world_size"]})
        resolved = trial.model_dump(mode="json")
        axes = {name: resolved[name] for name in self._told if name in BY_NAME}
        return {
            **machine.machine_facts(),
            **axes,
            "sweep": self._place.name,
            "trial_id": trial_identity.trial_id(resolved | {"began": [self._started_at, self._began]}),
            "attempt": 1,
            "terminal": True,
            "started_at": self._started_at,
            "outcome": Outcome.OK,
            "isolation": "cold",
            "duration_s": time.monotonic() - self._began,
            "model": trial.model.name,
            "runner": trial.runner.name,
            "allocator": trial.allocator.name,
            "allocator_conf": trial.allocator.conf,
            "device": device.name,
            "protocol": trial.protocol.name,
            "repeat": 0,
            "host_load": machine.host_load(),
            "environment": worker_environment.recorded_variables(os.environ),
            "trial": resolved,
        }


def _append(place: Path, row: Row) -> Row:
    """Add the row to the journal. Raises UserError, as when another training holds the lock through all tries."""
    for _ in range(TRIES):
        with contextlib.suppress(UserError), Journal(own_files(place)) as journal:
            return journal.append(row)
        time.sleep(0.1)
    with Journal(own_files(place)) as journal:
        return journal.append(row)


def _trial(settings: dict[str, Any], told: set[str], warmup_steps: int) -> trials.Trial:
    """Return a trial with the known settings of this training. Raises UserError for an impossible value."""
    values = {name: settings.get(name, default) for name, default in command_template.UNSAID.items()}
    for name in told:
        allowed = catalog.values(name)
        if allowed:
            suggestions.check_listed(f"vramsweep.watch: {name}={values[name]}", name, values[name], allowed)
    own = {name: value for name, value in settings.items() if name not in told}
    for name, value in own.items():
        try:
            json.dumps(to_jsonable_python(value), allow_nan=False)
        except (PydanticSerializationError, ValueError):
            what = f"{name} is of type {type(value).__name__}"
            raise UserError(f"vramsweep.watch: {what}, which a row cannot store; give text or numbers") from None
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    try:
        canonical = allocator_config.parse(conf).render()
    except allocator_config.AllocatorConfigError as error:
        raise UserError(f"vramsweep.watch: PYTORCH_CUDA_ALLOC_CONF: {error}") from None
    command = shlex.join(sys.argv)
    values |= {
        "model": {"name": command_template.program(shlex.join(["python", *sys.argv[:1]]))},
        "allocator": {"name": canonical or "default", "conf": canonical},
        "runner": {
            "name": "watch",
            "command": shlex.join(sys.argv[:1]) if redaction.secret_problem(command) else command,
            "stop": False,
            "options": own,
        },
        "device": {"name": "cpu"},
        "protocol": {"name": "watch", "warmup_steps": warmup_steps, "measured_steps": 1},
        **{name: settings[name] for name in command_template.TOLD if name in settings},
    }
    try:
        return trials.Trial.model_validate(values)  # not parse: its rules say what vramsweep can run, and this runs
    except ValidationError as error:
        first = error.errors()[0]
        wrong = f"{first['loc'][-1]}={describe(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise UserError(f"vramsweep.watch: {wrong}") from None
