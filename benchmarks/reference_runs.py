"""Predictions of reference runs (published_readings.py), next to what was published.

Every run is a simulated trial of one sweep, so an interrupted sweep resumes. A run is predicted again without known
differences if its trace used any.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import published_readings
from published_readings import PHASES, Reading, Run
from pydantic import BaseModel, ValidationError

from vramsweep.harness.config import compose
from vramsweep.harness.files.bounded_reads import error_reason, read_content
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import version_differences
from vramsweep.harness.spec.fit_text import describe_trial
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import run_trials
from vramsweep.harness.sweep.plan import Planned, Settings, plan_trial

PREDICTED = (Outcome.OK, Outcome.OOM, Outcome.HOST_OOM)
SOME = 5  # runs with which words of the command are tried, if these alone are no trial
TOLD = 50  # runs that are planned between two lines of progress
UNTIMED = "no estimated times"  # beginning of a row's note on it
OTHER_TOOLS = "other-tools.json"  # next to the files of runs
MOVING = 0.01  # least share of activations in a peak that counts as depending on batch and length
SPEED = ("world_size", "estimated_compute_s", "estimated_attention_s", "estimated_memory_s", "estimated_launch_s",
         "estimated_communication_s", "estimated_launches", "calibrated_step_s", "calibrated_step_low_s",
         "calibrated_step_high_s")  # fmt: skip


@dataclass(frozen=True)
class ReadingRequest:
    """A run and what is to be predicted of it. `plain` is the trial without known differences, None if there are none.
    `reason` says why nothing is predicted: what the file says, or what is wrong with its words."""

    run: Run
    item: Planned | None = None
    plain: Planned | None = None
    reason: str | None = None


class OtherTools(BaseModel, extra="forbid"):
    """Estimates of other tools of what runs need, in bytes by file name, run and tool (None: no answer), and each
    tool's source. The tools were run once, so this is published data, like the runs."""

    sources: dict[str, str] = {}
    runs: dict[str, dict[str, dict[str, int | None]]] = {}

    @classmethod
    def beside(cls, files: Iterable[Path]) -> OtherTools:
        """Read estimates in the folders of these files; empty if there are none. Raises UserError for another form."""
        found = cls()
        for path in dict.fromkeys(file.parent / OTHER_TOOLS for file in files):
            try:
                one = cls.model_validate_json(read_content(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValidationError) as error:
                first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error_reason(error)
                raise UserError(f"{path} has no estimates of other tools: {first}; fix or rename the file") from None
            found.sources.update(one.sources)
            found.runs.update(one.runs)
        return found

    def of(self, run: Run) -> dict[str, int | None] | None:
        """Return the estimates for one run."""
        return self.runs.get(Path(run.file).name, {}).get(run.name)


def read(files: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs of all files, each file once, and their mistakes; a bad file does not drop the others. Raises
    UserError if no run is left."""
    runs: list[Run] = []
    mistakes: list[str] = []
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            print(f"{file} is named twice; it is read once", file=sys.stderr)
            continue
        seen.add(file.resolve())
        try:
            found, wrong = published_readings.read(file)
        except UserError as error:
            found, wrong = [], [str(error)]
        runs += found
        mistakes += wrong
    if not runs:
        raise UserError("\n".join(mistakes))
    return runs, mistakes


def resolve(runs: Sequence[Run], words: Sequence[str]) -> tuple[list[ReadingRequest], Settings]:
    """Return what is to be predicted of each run. Raises UserError for mistaken words of the command line."""
    settings = _settings(runs, words)
    asked: list[ReadingRequest] = []
    for number, run in enumerate(runs):
        if number % TOLD == 0:  # planning takes some tenths of a second a run
            print(f"planning: {number} of {len(runs)} runs", flush=True)
        one = ReadingRequest(run, reason=run.cannot)
        if run.cannot is None:
            try:
                item, _ = _planned(_words(run, words))
                one = ReadingRequest(run, item, _plain(item)) if item.trial else replace(one, reason=item.reason)
            except UserError as error:
                one = replace(one, reason=str(error))
        asked.append(one)
    return asked, replace(settings, report=False, action="run")


def _settings(runs: Sequence[Run], words: Sequence[str]) -> Settings:
    """Return the sweep's settings by the command line. Raises UserError for mistaken words, before every run reports
    them. The words are tried alone and with those of some runs, because some need a run's."""
    alone, settings = _tried(["device=simulated", *words])
    if alone is None and settings is not None:
        return settings
    for run in [run for run in runs if run.cannot is None][:SOME]:
        beside, theirs = _tried(_words(run, words))
        if beside is None and theirs is not None:
            return theirs
        if beside == alone:
            settings = None
    if settings is None:
        raise UserError(str(alone))
    return settings


def _tried(words: Sequence[str]) -> tuple[str | None, Settings | None]:
    """Return why these words are no trial, and the sweep's settings in them, if any."""
    try:
        item, settings = _planned(words)
    except UserError as error:
        return str(error), None
    return item.reason, settings


def _words(run: Run, words: Sequence[str]) -> Sequence[str]:
    """Return the run's words, with the versions that known differences are about, and those of the command line."""
    known = {one.package for one in version_differences.DIFFERENCES}
    versions = [
        f"+versions.{name}={published_readings.quoted(text)}" for name, text in run.versions.items() if name in known
    ]
    return published_readings.later(["device=simulated", *run.overrides, *versions, *words])


def _planned(words: Sequence[str]) -> tuple[Planned, Settings]:
    """Return the one trial of these words. Raises UserError if they are none, or one that is not predicted."""
    asked = compose.resolve(words)
    if len(asked.trials) != 1 or asked.settings is None:
        raise UserError(f"its overrides name {len(asked.trials)} trials; a published run must be one trial")
    (item,) = asked.trials
    if item.trial is not None and item.trial.device.name != "simulated":
        raise UserError(f"device={item.trial.device.name}: published runs can only be predicted, on device=simulated")
    return item, asked.settings


def _plain(item: Planned) -> Planned | None:
    """Return the trial as the installed versions run it, if known differences make that another one; else None."""
    assert item.trial is not None
    if not version_differences.find_differences(item.trial):
        return None
    return plan_trial(item.trial.model_copy(update={"versions": {}}))


def predict(asked: Sequence[ReadingRequest], settings: Settings, folder: Path) -> tuple[dict[str, Row], int]:
    """Predict the runs, then again without known differences those that used any, and print each run's readings as it
    ends; return the rows by trial id, and the status of the sweep."""
    items = {one.item.trial_id: one.item for one in asked if one.item is not None}
    began_s = time.monotonic()
    with Launcher(settings.isolation, own_files(folder) / "templates") as launcher:

        def run(wanted: Mapping[str, Planned]) -> tuple[dict[str, Row], int]:
            earlier = [item for trial_id, item in items.items() if trial_id not in wanted]
            return run_trials.run(
                list(wanted.values()), settings, folder, earlier, launcher, began_s,
                describe=lambda row: "; ".join(filter(None, (progress_text(one, row) for one in asked))),
            )  # fmt: skip

        rows, status = run(items)
        plain = [one.plain for one in asked if one.plain is not None and _used_differences(one, rows)]
        again = {item.trial_id: item for item in plain if item.trial_id not in items}
        more, worse = run(again) if again else ({}, 0)
    return rows | more, max(status, worse)


def _used_differences(one: ReadingRequest, rows: Mapping[str, Row]) -> bool:
    row = rows.get(one.item.trial_id) if one.item is not None else None
    return row is not None and bool(row["differences"])


def progress_text(one: ReadingRequest, row: Row) -> str:
    """Return a run's name and readings, predicted and published, with the error, in a line; "" if the row is not of the
    run or predicts nothing."""
    ids = [item and item.trial_id for item in (one.item, one.plain)]
    if row["trial_id"] not in ids or row["outcome"] not in PREDICTED:
        return ""
    plain = " without known differences" * (row["trial_id"] != ids[0])
    trial = None if one.item is None else one.item.trial
    told = (_reading_text(reading, measured(reading, trial), one.run, row) for reading in one.run.readings)
    return f"{escape_text(one.run.name)}{plain}: {', '.join(told)}"


def _reading_text(reading: Reading, published: float | None, run: Run, row: Row) -> str:
    kind = " ".join(filter(None, [reading.phase, reading.quantity]))
    if reading.quantity == "outcome":
        return f"{kind} {row['outcome']} predicted, {reading.text} published"
    form = format_size if reading.quantity in published_readings.MEMORY else "{:.3g} s a step".format
    known = "unknown" if published is None else form(published)
    if (found := predicted(reading, run, row, most=False)) is None:
        return f"{kind} not predicted, {known} published"
    error = "" if published is None else f" ({found / published - 1:+.1%})"
    return f"{kind} {form(found)} predicted, {known} published{error}"


def why(one: ReadingRequest, rows: Mapping[str, Row]) -> str | None:
    """Return why nothing is predicted of a run."""
    if one.item is None:
        return one.reason
    if (row := rows.get(one.item.trial_id)) is None:
        return "not predicted"
    return None if row["outcome"] in PREDICTED else f"{row['outcome']}: {row['reason']}"


def reasons(asked: Sequence[ReadingRequest], rows: Mapping[str, Row]) -> list[str]:
    """Return why runs are not predicted, once for several runs of a file, with the place of the first."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for one in asked:
        if (reason := why(one, rows)) is not None:
            found[one.run.file, reason].append(one.run)
    return [
        f"{mine[0].place}: {mine[0].name}{f' and {len(mine) - 1} more' if len(mine) > 1 else ''}: {reason}"
        for (_, reason), mine in found.items()
    ]


def lines(one: ReadingRequest, rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Return each reading of a run next to its predictions, in bytes and seconds a step. If there is none, `reason`
    says why. `mistake`: the run could not be predicted though its file does not say so."""
    row = rows.get(one.item.trial_id) if one.item is not None else None
    plain = rows.get(one.plain.trial_id) if one.plain is not None and _used_differences(one, rows) else None
    run, reason = one.run, why(one, rows)
    shared = {
        "source": run.source, "title": run.title, "place": run.place, "run": run.name, "grade": run.grade,
        "note": run.note, "mistake": reason is not None and run.cannot is None,
        "outcome": None if row is None else row["outcome"],
        "trial_id": None if one.item is None else one.item.trial_id,
        "label": None if one.item is None or one.item.trial is None else describe_trial(one.item.trial),
        "versions": dict(run.versions), "differences": (row or {}).get("differences") or [],
        "trace_basis": (row or {}).get("trace_basis"),
        "context_bytes": run.context if run.context is not None else CONTEXT_BYTES,
        "context_said": run.context is not None,
        "gpu": (row or {}).get("simulated_gpu"), "precision": (row or {}).get("precision"),
        **{name: (row or {}).get(name) for name in SPEED}, **peak_composition(row),
    }  # fmt: skip
    trial = None if one.item is None else one.item.trial
    return [
        shared
        | {key: value for key, value in asdict(reading).items() if key not in ("value", "text", "note")}
        | {
            "reading_note": reading.note,
            "reason": reason or unpredicted(reading, run, row),
            "measured": measured(reading, trial),
            "measured_outcome": reading.text,
            "predicted": predicted(reading, run, row, most=False),
            "predicted_most": predicted(reading, run, row, most=True),
            "predicted_plain": predicted(reading, run, plain, most=False),
        }
        for reading in run.readings
    ]


def peak_composition(row: Row | None) -> dict[str, Any]:
    """Return a predicted peak's phase, its bytes of states, and whether it depends on batch and length; null if nothing
    was predicted. States are weights, buffers, gradients and optimizer state."""
    peaks = {phase: (row or {}).get(f"{phase}_peak_allocated_bytes") for phase in PHASES}
    known = {phase: peak for phase, peak in peaks.items() if peak is not None}
    if row is None or row["outcome"] != Outcome.OK or not known or row["peak_parameters_bytes"] is None:
        return {"peak_phase": None, "states_bytes": None, "moves": None}
    # the later of equal phases, because what stays from one phase to the next does not depend on batch and length
    phase = max(known, key=lambda name: (known[name], PHASES.index(name)))
    states = sum(row[f"peak_{part}_bytes"] for part in ("parameters", "buffers", "gradients", "optimizer_state"))
    share = row["peak_activations_bytes"] / row["peak_allocated_bytes"]
    return {"peak_phase": phase, "states_bytes": states, "moves": phase in ("forward", "backward") and share >= MOVING}


def measured(reading: Reading, trial: Trial | None) -> float | None:
    """Return the reading in bytes, or seconds a step; None for an outcome, or if the step's tokens are not known."""
    if reading.value is None or reading.quantity not in ("tokens/s", "samples/s"):
        return reading.value
    if trial is None:
        return None
    rate = reading.value * (trial.world_size if reading.unit == "per card" else 1)
    tokens = trial.tokens_per_step()
    return (tokens if reading.quantity == "tokens/s" else tokens / trial.seq_len) / rate


def predicted(reading: Reading, run: Run, row: Row | None, most: bool) -> float | None:
    """Return the prediction in bytes, or estimated seconds a step; with `most` the upper bound, if there is another.

    If memory runs out, reserved is what it would be without a limit; nothing else is known there.
    """
    column = None if row is None else _column(reading, str(row["outcome"]), most)
    value: float | None = None if row is None or column is None else row.get(column)
    context = run.context if run.context is not None else CONTEXT_BYTES
    return value if value is None or reading.quantity != "device" else value + context


def _column(reading: Reading, outcome: str, most: bool) -> str | None:
    """Return the column of a row with this outcome that predicts the reading; None if there is none."""
    counter = "reserved" if reading.quantity == "device" else reading.quantity
    if outcome == Outcome.OOM and counter == "reserved" and reading.phase is None and not most:
        return "unlimited_peak_reserved_bytes"
    if outcome != Outcome.OK or reading.quantity == "outcome":
        return None
    if reading.quantity not in published_readings.MEMORY:
        return "estimated_step_no_overlap_s" if most else "estimated_step_s"
    if reading.phase is not None:
        return None if most else f"{reading.phase}_peak_{counter}_bytes"
    return f"peak_{counter}_most_bytes" if most else f"peak_{counter}_bytes"


def unpredicted(reading: Reading, run: Run, row: Row | None) -> str | None:
    """Return why there is nothing to compare a reading with, of a run that is predicted."""
    if row is None or reading.quantity == "outcome" or predicted(reading, run, row, most=False) is not None:
        return None
    if row["outcome"] == Outcome.HOST_OOM:
        return "predicted to run out of the host's memory"
    if row["outcome"] == Outcome.OOM:
        needed = row["unlimited_peak_reserved_bytes"]
        would = "" if needed is None else f": without a limit it would reserve {format_size(needed)}"
        return f"predicted to run out of memory{would}"
    if reading.quantity in published_readings.MEMORY:
        return f"no {_column(reading, Outcome.OK, most=False)} is predicted"
    return next((note for note in row["notes"] or () if note.startswith(UNTIMED)), UNTIMED)
