"""Simulated trials in batches: one attempt predicts many, and each becomes a row as soon as it is there.

Its worker (runners/worker/batch_server.py) traces what is needed and forks processes that write their answers to files.
Each line is a trial's: {"trial_id": id, "result": as a result file holds it, "record": the last phase, "duration_s":
seconds or null}. A trial that stays unanswered gets an attempt of its own (trial_loop.py).
"""

import math
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vramsweep.harness.files import plain_json
from vramsweep.harness.files.bounded_reads import LIMIT, open_regular
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.process.attempt import AttemptResult, Launcher, attempt_environment, check_result, read_progress
from vramsweep.harness.process.worker_files import LOGS, PREDICTIONS
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.journal import Journal
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import runner_table
from vramsweep.harness.sweep import row_builder, shards
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.progress import Progress

FOLDER = "shared"  # next to the trials' own folders of attempts
ISOLATION = "shared"


def together(folder: str) -> bool:
    """Return whether a folder of attempts is one of trials that are predicted together, by whatever writer."""
    return folder == FOLDER or folder.startswith(f"{FOLDER}-")


def template(item: Planned) -> str | None:
    """Name the trials that can be predicted together with this one, because they import the same. None for a trial that
    runs by itself."""
    simulated = item.trial is not None and item.trial.device.name == "simulated"
    return runner_table.imports_name(item.trial) if simulated and item.trial else None


def batches(todo: Sequence[Planned]) -> dict[str | None, list[Planned]]:
    """Group the trials to predict together, by fork server. A trial alone is omitted; it runs as any other."""
    found: dict[str | None, list[Planned]] = defaultdict(list)
    for item in todo:
        found[template(item)].append(item)
    return {name: items for name, items in found.items() if name is not None and len(items) > 1}


def run(
    items: Sequence[Planned],
    tried: Mapping[str, int],
    settings: Settings,
    folder: Path,
    journal: Journal,
    launcher: Launcher,
    progress: Progress,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Row]:
    """Predict trials of one fork server in one attempt; return the rows of those that it answered, by id.

    `tried` has the number of the last attempt at each trial in the journal. `check` is called now and then, with all
    predictions so far in the journal; what it raises ends the attempt.
    """
    assert items[0].trial is not None
    name = runner_table.fork_server_name(items[0].trial)
    writer = shards.parse(settings.shard).writer
    root = own_files(folder) / "attempts" / (f"{FOLDER}-{writer}" if writer else FOLDER)
    place = root / str(row_builder.count_attempts(root) + 1)
    environ = attempt_environment("", "simulated", os.environ)
    left = {item.trial_id: item for item in items}
    lengths, began = dict[Path, int](), row_builder.started_columns(0)
    rows: dict[str, Row] = {}

    def take() -> None:
        """Journal what has been predicted since the last time."""
        progress.works(None, read_progress(place))
        ready: dict[str, Row] = {}
        for answer in _new_answers(place, lengths):
            trial_id = answer["trial_id"]
            if trial_id not in left or trial_id in ready:
                continue
            beginning = {"sweep": folder.name} | began | {"attempt": tried.get(trial_id, 0) + 1}
            row = _row(left[trial_id], answer, beginning, environ, launcher.cold_reasons.get(name))
            if row is not None:
                ready[trial_id] = row
        for row in journal.extend(ready.values()):
            rows[row["trial_id"]] = row
            progress.show(row, left.pop(row["trial_id"]))

    def look() -> None:
        take()
        check()

    spec = {
        "trials": [{"trial_id": item.trial_id, "trial": item.resolved} for item in items],
        "timeout_s": settings.timeout_s,
    }
    longest = 2 * len(items) * settings.timeout_s  # each traced, and predicted, one after the other
    try:
        done = launcher.attempt(spec, place, environ, name, longest, look)
    finally:
        take()  # an interrupted sweep keeps what is there
        progress.works(None, {"text": ""})
    if left:
        reason = outcome.classify(done.evidence)[1]
        why = f": {reason}" if reason else ""
        print(
            f"{len(left)} of {len(items)} predictions need an attempt of their own{why}; each runs by itself now "
            f"({place / LOGS[1]} may say why)",
            file=sys.stderr,
        )
    return rows


def _new_answers(place: Path, lengths: dict[Path, int]) -> Iterator[dict[str, Any]]:
    """Yield the answers in an attempt's folder since the last time; an incomplete line is left for the next time.

    `lengths` are the bytes that were read of each file, and are updated.
    """
    for path in sorted(place.glob(PREDICTIONS)):
        try:
            with open_regular(path, links=False) as file:
                file.seek(lengths.get(path, 0))
                text = file.read(LIMIT)
        except OSError:  # not a file that the worker's processes write
            continue
        whole = text[: text.rfind(b"\n") + 1]
        lengths[path] = lengths.get(path, 0) + len(whole)
        yield from (one for one in plain_json.read_objects(whole) if isinstance(one.get("trial_id"), str))


def _row(
    item: Planned, answer: Mapping[str, Any], began: Row, environ: Mapping[str, str], cold_reason: str | None
) -> Row | None:
    """Return the row of an answer, as an attempt of the trial's own would have it; None if the answer is not valid."""
    result, _ = check_result(answer.get("result"))
    duration, record = answer.get("duration_s"), answer.get("record")
    whole = isinstance(duration, float | None) and math.isfinite(duration or 0) and isinstance(record, dict | None)
    if result is None or not whole or item.trial is None:
        return None
    evidence = outcome.Evidence(exit_code=0, result=result)
    row = row_builder.initial_columns(item) | began
    done = AttemptResult(evidence, duration or 0.0, ISOLATION, cold_reason)
    row |= row_builder.process_columns(done, environ, row["gpu_name"])
    row |= {"duration_s": duration, "exit_code": None}  # it had no process of its own
    phase = row_builder.phase([record] if record else [])
    row = row_builder.classified_row(row, item.trial, evidence, phase, final=True)
    return row if outcome.is_answer(row["outcome"]) else None
