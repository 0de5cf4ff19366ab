"""Timelines of predicted steps, of one trial or of a sweep's rows.

The timeline of a sweep's trial is kept next to its traces, in `timelines/`, as long as its row is the same.
runners/predict/memory_timeline.py makes timelines, analysis/figures draws them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vramsweep.harness.files import file_names, plain_json
from vramsweep.harness.files.bounded_reads import replaced
from vramsweep.harness.files.sweep_folder import kept_traces
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions import trace_query
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_identity import SIMULATION

Record = dict[str, Any]  # trial_id; about: the trial; timeline (runners.predict.memory_timeline.Timeline; bytes)
FORMAT = 2  # of kept timelines; raise it when their layout changes


def trace_timeline(trial_id: str, trial: Trial) -> Record:
    """Trace a trial and return its timeline. Raises UserError, also if the step allocates nothing."""
    if (found := trace_query.of_trial("timeline", "timeline", trial_id, trial, None)) is None:
        raise UserError("the step allocates nothing, so it has no timeline")
    return {"trial_id": trial_id, "about": trace_query.describe_trial(trial), "timeline": found}


def read_timelines(folder: Path, ids: Sequence[str], trace: bool) -> list[Record]:
    """Return timelines of a sweep's trials, or of those that `trace_query.finished` takes if none is named.

    A trial without a kept trace is left out, or traced with `trace`. Raises UserError.
    """
    own = [(row, trace_query.read_trial("timeline", row)) for row in trace_query.finished(folder, ids)]
    traces = kept_traces(folder)
    folder = traces.parent
    found = [_read_kept(folder, row) for row, _ in own]
    if missing := [i for i, one in enumerate(found) if one is None]:
        answers = trace_query.ask("timeline", [own[i][1] for i in missing], traces, trace=False)
        for i, answer in zip(missing, answers, strict=True):
            if answer is None and trace:
                answer = trace_query.of_trial("timeline", "timeline", own[i][0]["trial_id"], own[i][1], traces)
            if answer is not None:
                _keep(folder, own[i][0], answer)
            found[i] = answer
    pairs = ((*of, one) for of, one in zip(own, found, strict=True) if one is not None)
    return [{"trial_id": r["trial_id"], "about": trace_query.describe_trial(t), "timeline": one} for r, t, one in pairs]


def _timeline_path(folder: Path, row: Row) -> Path:
    return folder / "timelines" / f"{file_names.make_safe(row['trial_id'])}.json"


def _mark(row: Row) -> list[Any]:
    return [FORMAT, SIMULATION, row.get("started_at")]


def _read_kept(folder: Path, row: Row) -> dict[str, Any] | None:
    stored = plain_json.read_object(_timeline_path(folder, row))
    if stored is None or stored.get("of") != _mark(row):
        return None
    found = stored.get("timeline")
    return found if isinstance(found, dict) and isinstance(found.get("peak"), dict) else None


def _keep(folder: Path, row: Row, timeline: Mapping[str, Any]) -> None:
    place = _timeline_path(folder, row)
    if file_names.is_inside(folder, str(place.relative_to(folder))) is None:  # a link leads out of the folder
        return
    try:
        place.parent.mkdir(exist_ok=True)
        with replaced(place) as aside:
            aside.write_text(json.dumps({"of": _mark(row), "timeline": timeline}))
    except OSError:
        pass  # the folder is read-only; the timeline is made again next time
