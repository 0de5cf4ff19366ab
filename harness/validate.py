"""`vramsweep validate FILE...`: predict reference runs (reference.py), and put what was published beside it.

Every run is a simulated trial of one sweep, so an interrupted one goes on where it was. A run of versions that known
differences tell from the installed ones is predicted twice, with and without them. What comes out, a line a reading,
is `readings.json` in the sweep's folder; the tables and the figure are drawn from it (analysis/validation.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from vramsweep.harness import differences, launch, machine, reference, sweep
from vramsweep.harness import trial as trials
from vramsweep.harness.attempt import environment
from vramsweep.harness.errors import UserError
from vramsweep.harness.gpus import CONTEXT_BYTES
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.progress import Few, bar
from vramsweep.harness.reference import PHASES, Reading, Run
from vramsweep.harness.row import Outcome, Row
from vramsweep.harness.trial import Trial

READINGS = "readings.json"
PACKAGES = ("vramsweep", "torch", "transformers", "accelerate", "deepspeed")
OTHERS = "others.jsonl"
TRACKED = 1  # runs of a source that MemTracker is asked about
SPEED = ("world_size", "estimated_compute_s", "estimated_memory_s", "estimated_launch_s", "estimated_communication_s",
         "estimated_launches")  # fmt: skip
MOVING = 0.01  # share of the peak that activations must be for it to count as moving with batch and length
HELP = """\
predict runs that others measured and published, and show how far the predictions are off

  vramsweep validate benchmarks/published/*.yaml
  vramsweep validate my-run.yaml --out validation.md --figure validation.png

benchmarks/published/README.md describes the files. Words such as timeout_s=1200, name= or results= go to every run.
The same command goes on where one was interrupted. Status: 0; 1, where a file or a run could not be read or predicted;
2, a mistake; 130, interrupted."""


@dataclass(frozen=True)
class Asked:
    """A run and what is to be predicted of it; `plain` is the same without known differences, None where there are
    none. `reason` says why nothing is; it is a `mistake` where the overrides mean nothing."""

    run: Run
    item: Planned | None = None
    plain: Planned | None = None
    reason: str | None = None
    mistake: bool = False


def main(argv: Sequence[str]) -> int:
    """`validate`; returns the exit status. Raises UserError where nothing can be predicted."""
    parser = argparse.ArgumentParser(
        prog="vramsweep validate",
        usage="%(prog)s FILE ... [--out OUT.md] [--figure OUT.png] [KEY=VALUE ...]",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, metavar="OUT.md", help="the tables as Markdown")
    parser.add_argument("--figure", type=Path, metavar="OUT.png", help="the figure; PNG, SVG or PDF")
    parser.add_argument(
        "--others", action="store_true", help="also what other tools say: a second a run, and some minutes a source"
    )
    parser.add_argument("--json", action="store_true", help="print the readings instead of tables")
    parser.add_argument("words", nargs="*", metavar="FILE")
    arguments = parser.parse_intermixed_args(argv)
    words = [word for word in arguments.words if "=" in word]
    files = [Path(word) for word in arguments.words if "=" not in word]
    if not files:
        raise UserError("validate which runs? Name files, as benchmarks/published/*.yaml")
    runs, mistakes = read(files)
    asked, settings = resolve(runs, words)
    mistakes += [f"{one.run.place}: {one.run.name}: {one.reason}" for one in asked if one.mistake]
    folder = Path(settings.results) / (settings.name or "validation")
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        rows, status = predict(asked, settings, folder)
    said, sources = others(asked, rows, folder) if arguments.others else ({}, {})
    record = {
        "made": {name: machine.version(name) for name in PACKAGES},
        "mistakes": mistakes,
        "others": sources,
        "readings": [line | {"others": said.get(line["trial_id"])} for one in asked for line in lines(one, rows)],
    }
    (folder / READINGS).write_text(json.dumps(record, indent=1))
    for text in mistakes:
        print(f"left out: {text}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(record, indent=1))
    else:
        show(folder, arguments.out, arguments.figure)
    return max(status, int(bool(mistakes)))


def read(files: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """The runs of all files, and what is wrong with any; the other files count. Raises UserError if no run is left."""
    runs: list[Run] = []
    mistakes: list[str] = []
    for file in files:
        try:
            found, wrong = reference.read(file)
        except UserError as error:
            found, wrong = [], [str(error)]
        runs += found
        mistakes += wrong
    if not runs:
        raise UserError("\n".join(mistakes))
    return runs, mistakes


def resolve(runs: Sequence[Run], words: Sequence[str]) -> tuple[list[Asked], Settings]:
    """What is to be predicted of each run. Raises UserError if that is nothing."""
    asked: list[Asked] = []
    settings: Settings | None = None
    for run in runs:
        if run.cannot is not None:
            asked.append(Asked(run, reason=run.cannot))
            continue
        try:
            all_words = reference.later(["device=simulated", *run.overrides, *_versions(run), *words])
            planned, mine = launch.resolve(all_words)
            item = _only(planned)
        except UserError as error:
            asked.append(Asked(run, reason=str(error), mistake=True))
            continue
        if item.trial is None:
            asked.append(Asked(run, reason=item.reason))
            continue
        settings = settings or mine
        asked.append(Asked(run, item, _plain(item)))
    if settings is None:
        reasons = "\n".join(f"{one.run.place}: {one.run.name}: {one.reason}" for one in asked)
        raise UserError(f"none of the runs can be predicted:\n{reasons}")
    return asked, replace(settings, report=False, action="run")


def _versions(run: Run) -> list[str]:
    """Words for the versions of a run that known differences are about."""
    known = {one.package for one in differences.DIFFERENCES}
    return [f"+versions.{package}={version}" for package, version in run.versions.items() if package in known]


def _only(planned: Sequence[Planned]) -> Planned:
    if len(planned) != 1:
        raise UserError(f"its overrides name {len(planned)} trials; a reference run is one")
    item = planned[0]
    if item.trial is not None and item.trial.device.name != "simulated":
        raise UserError(f"device={item.trial.device.name}: reference runs are predicted, on device=simulated")
    return item


def _plain(item: Planned) -> Planned | None:
    """The same trial as the installed versions run it, where known differences say that this is another."""
    assert item.trial is not None
    if not differences.holding(item.trial):
        return None
    trial = item.trial.model_copy(update={"versions": {}})
    resolved = trial.model_dump(mode="json")
    return Planned(trials.trial_id(resolved), resolved, trial, None)


def predict(asked: Sequence[Asked], settings: Settings, folder: Path) -> tuple[dict[str, Row], int]:
    """The rows of all that is to be predicted, by trial id, and the status of the sweep that it is."""
    wanted = {item.trial_id: item for one in asked for item in (one.item, one.plain) if item is not None}
    return sweep.run(list(wanted.values()), settings, folder, progress=bar if Console().is_terminal else Few)


def others(
    asked: Sequence[Asked], rows: Mapping[str, Row], folder: Path
) -> tuple[dict[str, dict[str, int | None]], dict[str, str]]:
    """What other tools say that the predicted runs need, in bytes by trial id and tool, and where each tool is from.

    What is in the folder already is not asked for again. The tool that takes minutes is asked about `TRACKED` runs of
    each source, of those whose peak moves.
    """
    wanted: dict[str, Any] = {}
    by_title: dict[str, list[str]] = defaultdict(list)
    for one in asked:
        row = rows.get(one.item.trial_id) if one.item is not None else None
        if one.item is None or row is None or row["outcome"] != Outcome.OK or row["parameters"] is None:
            continue
        trainable = row["trainable_parameters"]
        wanted[one.item.trial_id] = {
            "trial": one.item.resolved,
            "parameters": row["parameters"],
            "trainable": row["parameters"] if trainable is None else trainable,
        }
        if held(row)["moves"]:
            by_title[one.run.title].append(one.item.trial_id)
    tracked = [ids[len(ids) * n // TRACKED] for ids in by_title.values() for n in range(min(TRACKED, len(ids)))]
    file = folder / OTHERS
    found, complete, sources = _said(file)
    left = {name: values for name, values in wanted.items() if name not in found or name in set(tracked) - complete}
    if left:
        request = folder / "others.json"
        request.write_text(json.dumps({"trials": left, "tracked": tracked}))
        print(f"asking other tools about {len(left)} runs; they say it in {file}", flush=True)
        with (folder / "others.log").open("a") as log:
            subprocess.run(
                [sys.executable, "-m", "vramsweep.runners.others", str(request), str(file)],
                env=environment("", "simulated", os.environ), stdout=log, stderr=log, check=False,
            )  # fmt: skip
        found, _, sources = _said(file)
    return found, sources


def _said(file: Path) -> tuple[dict[str, dict[str, int | None]], set[str], dict[str, str]]:
    """What the file holds: answers by trial id, the ids whose answer is all there will be, and where tools are from."""
    found: dict[str, dict[str, int | None]] = {}
    complete: set[str] = set()
    sources: dict[str, str] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # a line that was cut off
            said = json.loads(line)
            sources |= said.get("sources", {})
            if "trial_id" in said:
                found[said["trial_id"]] = found.get(said["trial_id"], {}) | said["others"]
                complete |= {said["trial_id"]} if said["tracked"] else set()
    return found, complete, sources


def lines(one: Asked, rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Each reading of a run beside its predictions, in bytes and seconds a step; null where there is none, `reason`
    says why."""
    row = rows.get(one.item.trial_id) if one.item is not None else None
    plain = rows.get(one.plain.trial_id) if one.plain is not None else None
    reason = one.reason
    if reason is None and (row is None or row["outcome"] not in (Outcome.OK, Outcome.OOM, Outcome.HOST_OOM)):
        reason = "not predicted" if row is None else f"{row['outcome']}: {row['reason']}"
    run = one.run
    shared = {
        "source": run.source, "title": run.title, "place": run.place, "run": run.name, "grade": run.grade,
        "note": run.note, "reason": reason, "outcome": None if row is None else row["outcome"],
        "trial_id": None if one.item is None else one.item.trial_id,
        "label": None if one.item is None or one.item.trial is None else one.item.trial.label(),
        "versions": dict(run.versions), "differences": (row or {}).get("differences") or [],
        "trace_basis": (row or {}).get("trace_basis"),
        "context_bytes": run.context if run.context is not None else CONTEXT_BYTES,
        "context_said": run.context is not None,
        "gpu": (row or {}).get("simulated_gpu"), "precision": (row or {}).get("precision"),
        **{name: (row or {}).get(name) for name in SPEED}, **held(row),
    }  # fmt: skip
    trial = None if one.item is None else one.item.trial
    return [
        shared
        | {key: value for key, value in asdict(reading).items() if key not in ("value", "text", "note")}
        | {
            "reading_note": reading.note,
            "measured": measured(reading, trial),
            "measured_outcome": reading.text,
            "predicted": predicted(reading, run, row, most=False),
            "predicted_most": predicted(reading, run, row, most=True),
            "predicted_plain": predicted(reading, run, plain, most=False),
        }
        for reading in run.readings
    ]


def held(row: Row | None) -> dict[str, Any]:
    """Of a predicted peak: in which phase it is, what of it weights, buffers, gradients and optimizer state are, and
    whether it moves with batch and length; null where nothing was predicted."""
    peaks = {phase: (row or {}).get(f"{phase}_peak_allocated_bytes") for phase in PHASES}
    known = {phase: peak for phase, peak in peaks.items() if peak is not None}
    if row is None or row["outcome"] != Outcome.OK or not known or row["peak_parameters_bytes"] is None:
        return {"peak_phase": None, "states_bytes": None, "moves": None}
    # the later of two that are equal: what stays as it is from one phase to the next did not move
    phase = max(known, key=lambda name: (known[name], PHASES.index(name)))
    states = sum(row[f"peak_{part}_bytes"] for part in ("parameters", "buffers", "gradients", "optimizer_state"))
    share = row["peak_activations_bytes"] / row["peak_allocated_bytes"]
    return {"peak_phase": phase, "states_bytes": states, "moves": phase in ("forward", "backward") and share >= MOVING}


def measured(reading: Reading, trial: Trial | None) -> float | None:
    """In bytes, or seconds a step; None for an outcome, and where the step's tokens are not known."""
    if reading.value is None or reading.quantity not in ("tokens/s", "samples/s"):
        return reading.value
    if trial is None:
        return None
    rate = reading.value * (trial.world_size if reading.unit == "per card" else 1)
    tokens = trial.tokens_per_step()
    return (tokens if reading.quantity == "tokens/s" else tokens / trial.seq_len) / rate


def predicted(reading: Reading, run: Run, row: Row | None, most: bool) -> float | None:
    """In bytes, or seconds a step as estimated; with `most` the upper bound, where there is another."""
    if row is None or row["outcome"] != Outcome.OK or reading.quantity == "outcome":
        return None
    if reading.quantity in reference.MEMORY:
        counter = "reserved" if reading.quantity == "device" else reading.quantity
        column = f"{reading.phase}_peak_{counter}_bytes" if reading.phase else f"peak_{counter}_bytes"
        if most:
            column = "" if reading.phase else f"peak_{counter}_most_bytes"
        value: float | None = row.get(column)
        context = run.context if run.context is not None else CONTEXT_BYTES
        return value if value is None or reading.quantity != "device" else value + context
    found: float | None = row["estimated_step_no_overlap_s" if most else "estimated_step_s"]
    return found


def show(folder: Path, out: Path | None, figure: Path | None) -> None:
    """Tables and figure, by a process of the analysis. Raises UserError if that fails."""
    words = [
        word for name, path in (("--out", out), ("--figure", figure)) if path is not None for word in (name, str(path))
    ]
    sys.stdout.flush()
    done = subprocess.run([sys.executable, "-m", "vramsweep", "errors", str(folder / READINGS), *words], check=False)
    if done.returncode:
        raise UserError(f"the tables could not be made from {folder / READINGS}")
