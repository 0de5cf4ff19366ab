"""`vramsweep timeline`: what a predicted step holds from event to event, of one trial or of a sweep's rows.

Traces are replayed in a process of the runners (runners/timeline_worker.py), the figure is drawn in one of the
analysis. What comes of a sweep's trial is kept beside its traces, in `timelines/`, as long as its row is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness import journal, launch
from vramsweep.harness import trial as trials
from vramsweep.harness.attempt import environment
from vramsweep.harness.errors import UserError
from vramsweep.harness.row import Row
from vramsweep.harness.trial import SIMULATION, Trial

FORMAT = 1  # of what is kept; raise it when a timeline's layout changes
MOST = 4  # timelines of a sweep whose trials nobody named
SECONDS = 1800.0
_USAGE = (
    "vramsweep timeline model=NAME seq_len=N device=simulated ... | vramsweep timeline results/SWEEP [TRIAL_ID ...]"
)


@dataclass(frozen=True)
class Record:
    """A trial's timeline as plain data (runners.timeline.Timeline; bytes), and what it is of."""

    trial_id: str
    about: dict[str, Any]
    timeline: dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """The verb; returns the exit status. Raises UserError for what the user can mend."""
    parser = argparse.ArgumentParser(
        prog="vramsweep timeline",
        usage=_USAGE,
        description="What a predicted step holds from event to event, and what holds its peak.",
        epilog="Of a sweep whose trials are not named: for each model and runner the largest row that fits, and the "
        "smallest that does not. A GPU's own recording: vramsweep replay FILE --figure OUT.html.",
    )
    parser.add_argument("--out", type=Path, metavar="OUT.html", help="the page (default: timeline.html, in the sweep)")
    parser.add_argument("--json", action="store_true", help="print the data instead of drawing it")
    parser.add_argument("--kept", action="store_true", help="only of traces that the sweep kept: trace nothing")
    parser.add_argument("words", nargs="*", metavar="WORD")
    arguments, more = parser.parse_known_args(argv)
    words = [*arguments.words, *more]
    if not words:
        raise UserError(f"timeline of what? {_USAGE}")
    if "=" in words[0] or words[0].startswith("-"):
        planned, _ = launch.resolve(words)
        if not planned:
            return 0
        records, place = [of_trial(*_only(planned))], Path()
    else:
        place = Path(words[0])
        records = of_sweep(place, words[1:], trace=not arguments.kept)
        if not records and not arguments.json:
            raise UserError(
                f"{place} has no predicted row with a trace; sweep with device=simulated, or leave --kept out"
            )
    if arguments.json:
        print(json.dumps([vars(record) for record in records]))
        return 0
    out = arguments.out or place / "timeline.html"
    draw([vars(record) for record in records], out)
    print(out)
    return 0


def _only(planned: Sequence[Any]) -> tuple[str, Trial]:
    if len(planned) != 1:
        raise UserError(f"timeline draws one trial, and these are {len(planned)}; give each setting one value")
    if planned[0].trial is None:
        raise UserError(planned[0].reason)
    return planned[0].trial_id, planned[0].trial


def of_trial(trial_id: str, trial: Trial) -> Record:
    """The timeline of a trial that is traced for it. Raises UserError."""
    _simulated(trial)
    with tempfile.TemporaryDirectory() as folder:
        found = _ask([trial], Path(folder), trace=True)[0]
    if found is None:
        raise UserError("the step allocates nothing, so it has no timeline")
    return Record(trial_id, about(trial), found)


def of_sweep(folder: Path, ids: Sequence[str], trace: bool) -> list[Record]:
    """Timelines of a sweep's trials, or of those that `chosen` takes; a trial without a kept trace is left out, or
    traced. Raises UserError."""
    rows = journal.terminal(journal.read(folder)[0])
    if unknown := [one for one in ids if one not in rows]:
        raise UserError(f"{folder} has no finished trial {unknown[0]}; `vramsweep report {folder}` lists the ids")
    wanted = [rows[one] for one in ids] if ids else chosen(rows.values())
    own = [(row, trials.parse(row["trial"])) for row in wanted]
    for _, trial in own:
        _simulated(trial)
    found = [_kept(folder, row) for row, _ in own]
    missing = [i for i, one in enumerate(found) if one is None]
    if missing:
        answers = _ask([own[i][1] for i in missing], folder / "traces", trace=False)
        for i, answer in zip(missing, answers, strict=True):
            if answer is None and trace:
                answer = _ask([own[i][1]], folder / "traces", trace=True)[0]
            if answer is not None:
                _keep(folder, own[i][0], answer)
            found[i] = answer
    return [
        Record(row["trial_id"], about(trial), one)
        for (row, trial), one in zip(own, found, strict=True)
        if one is not None
    ]


def chosen(rows: Iterable[Row]) -> list[Row]:
    """For each model and runner, the predicted row with the largest peak that fits and the one that misses by least."""
    predicted = [row for row in rows if row.get("device") == "simulated" and isinstance(row.get("trial"), dict)]
    found = []
    for kind in dict.fromkeys((row.get("model"), row.get("runner")) for row in predicted):
        own = [row for row in predicted if (row.get("model"), row.get("runner")) == kind]
        fits = [row for row in own if row.get("outcome") == "ok" and row.get("peak_reserved_bytes")]
        full = [row for row in own if row.get("outcome") == "oom" and row.get("unlimited_peak_reserved_bytes")]
        found += sorted(fits, key=lambda row: -row["peak_reserved_bytes"])[:1]
        found += sorted(full, key=lambda row: row["unlimited_peak_reserved_bytes"])[:1]
    return found[:MOST]


def about(trial: Trial) -> dict[str, Any]:
    """What a reader of the figure wants to know of the trial."""
    return {
        "model": trial.model.name,
        "seq_len": trial.seq_len,
        "micro_batch": trial.micro_batch,
        "precision": trial.precision,
        "runner": trial.runner.name,
        "sharding": trial.sharding,
        "world_size": trial.world_size,
        "allocator": trial.allocator.name,
        "gpu": trial.device.gpu,
    }


def draw(data: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw the records as a self-contained page, in a process of its own. Raises UserError when that fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.json"
        file.write_text(json.dumps(data))
        command = [sys.executable, "-m", "vramsweep", "draw", str(file), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"the figure could not be drawn: {_last(done.stderr)}")


def _simulated(trial: Trial) -> None:
    if trial.device.name != "simulated":
        raise UserError(
            "a timeline is of a predicted step: give device=simulated device.gpu=NAME; of a GPU's own recording "
            "(record=true): vramsweep replay FILE --figure OUT.html"
        )


def _ask(asked: Sequence[Trial], traces: Path, trace: bool) -> list[dict[str, Any] | None]:
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        values = [trial.model_dump(mode="json") for trial in asked]
        request.write_text(json.dumps({"trials": values, "traces": str(traces.absolute()), "trace": trace}))
        command = [sys.executable, "-m", "vramsweep.runners.timeline_worker", str(request), str(answer)]
        try:
            done = subprocess.run(
                command,
                env=environment("", "simulated", os.environ),
                capture_output=True,
                text=True,
                check=False,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"no timeline within {SECONDS:.0f} s; take a smaller trial") from None
        if done.returncode != 0 or not answer.is_file():
            raise UserError(f"the step could not be traced: {_last(done.stderr)}")
        said = json.loads(answer.read_text())
    if "error" in said:
        raise UserError(said["error"])
    timelines: list[dict[str, Any] | None] = said["timelines"]
    return timelines


def _place(folder: Path, row: Row) -> Path:
    return folder / "timelines" / f"{row['trial_id']}.json"


def _mark(row: Row) -> list[Any]:
    return [FORMAT, SIMULATION, row.get("started_at")]


def _kept(folder: Path, row: Row) -> dict[str, Any] | None:
    try:
        stored = json.loads(_place(folder, row).read_text())
    except (OSError, ValueError):
        return None
    found: dict[str, Any] | None = stored["timeline"] if stored.get("of") == _mark(row) else None
    return found


def _keep(folder: Path, row: Row, timeline: Mapping[str, Any]) -> None:
    place = _place(folder, row)
    try:
        place.parent.mkdir(exist_ok=True)
        aside = place.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps({"of": _mark(row), "timeline": timeline}))
        aside.rename(place)
    except OSError:
        pass  # a folder that is only read; it is made again next time


def _last(text: str) -> str:
    return next(reversed(text.strip().splitlines()), "no reason given")
