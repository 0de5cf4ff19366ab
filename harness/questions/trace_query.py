"""Questions about a predicted trial's trace, answered by a separate attempt (runners/worker/query_server.py).

A folder may be someone else's. Its rows may name a target, a command, a model of a folder or a hub, or data. None of
these is run, read or asked for only because somebody looks at the rows. Whoever names the same trial in words has
chosen it.

runners/predict defines the questions (memory_timeline.py, explain.py); verbs show answers (timeline.py, explain.py).
The timeline of a sweep's trial is kept next to its traces, in `timelines/`, as long as its row is the same.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vramsweep.harness.files import file_names, plain_json
from vramsweep.harness.files.bounded_reads import replaced
from vramsweep.harness.files.sweep_folder import kept_traces
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import worker_environment
from vramsweep.harness.process.attempt import Launcher, ask_attempt, attempt_environment
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import command_template, length_distribution, trial_parser
from vramsweep.harness.spec.techniques.schema import value_of
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_identity import SIMULATION

SECONDS = 1800.0
MOST = 4  # timelines of a sweep if no trial is named
Answer = dict[str, Any]
Record = dict[str, Any]  # trial_id; about: the trial; timeline (runners.predict.memory_timeline.Timeline; bytes)
FORMAT = 2  # of kept timelines; raise it when their layout changes


def find_trial(verb: str, words: Sequence[str]) -> tuple[str, Trial] | None:
    """Return the one predicted trial that these words name, and its id; None if they only ask for help.

    device=simulated is understood if no other device is named. Raises UserError.
    """
    from vramsweep.harness.config import compose  # and Hydra, which a refusal does not need

    if not (planned := compose.resolve(spelled(words), verb).trials):
        return None
    if len(planned) != 1:
        raise UserError(f"{verb} takes one trial, not {len(planned)}; give each setting one value")
    if planned[0].trial is None:
        raise UserError(planned[0].reason)
    simulated(verb, planned[0].trial)
    return planned[0].trial_id, planned[0].trial


def simulated(verb: str, trial: Trial) -> None:
    """Raise UserError for a trial that is measured."""
    if trial.device.name != "simulated":
        raise UserError(
            f"{verb} shows a predicted step, so replace device={trial.device.name} with gpu=NAME. For a recording of a "
            "real run (record=true) use: vramsweep replay FILE --figure OUT.html"
        )


def name_a_trial(words: Sequence[str]) -> bool:
    """Return whether these are settings of a trial, not a sweep's folder."""
    return "=" in words[0] or words[0].startswith("-")


def spelled(words: Sequence[str]) -> list[str]:
    """Add device=simulated to the words of a verb that only predicts, if they name no device."""
    given = any(word.partition("=")[0] == "device" for word in words)
    return list(words) if given else ["device=simulated", *words]


def finished(folder: Path, ids: Sequence[str]) -> list[Row]:
    """Return the rows of a sweep's trials of these ids; without any, what `chosen` takes of those that are predicted.

    Raises UserError.
    """
    rows = journal.terminal(journal.read(folder)[0])
    if unknown := [one for one in ids if one not in rows]:
        near = suggestions.did_you_mean(unknown[0], rows)
        raise UserError(f"{folder} has no finished trial {unknown[0]}; `vramsweep report {folder}` lists the ids{near}")
    if ids:
        return [rows[one] for one in ids]
    whole = (row for row in rows.values() if isinstance(row.get("trial"), dict))
    return chosen(row for row in whole if row.get("device") == "simulated")


def chosen(rows: Iterable[Row]) -> list[Row]:
    """Return, for each model and runner, the predicted row with the largest peak that fits, and the one with the
    smallest that does not."""
    predicted = list(rows)
    found: list[Row] = []
    for kind in dict.fromkeys((row.get("model"), row.get("runner")) for row in predicted):
        own = [row for row in predicted if (row.get("model"), row.get("runner")) == kind]
        fits = [row for row in own if row.get("outcome") == "ok" and row.get("peak_reserved_bytes")]
        full = [row for row in own if row.get("outcome") == "oom" and row.get("unlimited_peak_reserved_bytes")]
        found += sorted(fits, key=lambda row: -row["peak_reserved_bytes"])[:1]
        found += sorted(full, key=lambda row: row["unlimited_peak_reserved_bytes"])[:1]
    return found[:MOST]


def read_trial(verb: str, row: Row) -> Trial:
    """Return a row's trial. Raises UserError if it was not predicted."""
    if not isinstance(row.get("trial"), dict):
        raise UserError(f"the row of trial {row['trial_id']} has no settings; give them on the command line")
    try:
        found = Trial.model_validate(row["trial"])
    except ValidationError:
        found = trial_parser.parse(row["trial"])  # which says what is wrong
    simulated(verb, found)
    return found if name_outside(found) else trial_parser.parse(row["trial"])  # parsing would read its files


def name_outside(trial: Trial) -> str | None:
    """Return what tracing the trial would run or read that is not ours; None if there is nothing."""
    if trial.model.trust_remote_code:
        return f"run the Python files of {trial.model.path}"
    data = length_distribution.lengths_file(trial.data) if length_distribution.names_lengths(trial.data) else trial.data
    for verb, name, what in (
        ("run", "runner.command", trial.runner.command),
        ("run", "runner.target", trial.runner.target),
        ("read", "model.path", trial.model.path),
        ("read", "ds_config", trial.ds_config),
        ("read", "data", data),
    ):
        if what is not None and what != "synthetic":
            return f"{verb} {name}={what}"
    return None


def of_trial(question: str, verb: str, trial_id: str, trial: Trial, traces: Path | None) -> Answer | None:
    """Return the answer about a row's trial, or without `traces` about the user's own. Raises UserError if it needs
    what a row names, and no trace is kept."""
    outside = None if traces is None else name_outside(trial)
    [answer] = ask(question, [trial], traces, trace=outside is None)
    if answer is None and outside is not None:
        raise UserError(
            f"no trace of trial {trial_id} is kept, and tracing would {outside}, as its row says. If you want that, "
            f"give its settings yourself: vramsweep {verb} runner={trial.runner.name} ..."
        )
    return answer


def describe_trial(trial: Trial) -> dict[str, Any]:
    """Return what a reader of an answer wants to know of the trial; None of a size that its command does not take."""
    unseen = command_template.unseen_settings(trial) if trial.runner.command is not None else ()
    names = ("model", "seq_len", "micro_batch", "precision", "runner", "sharding", "world_size", "allocator")
    about = {name: value_of(trial, name) for name in names}
    return about | dict.fromkeys({"seq_len", "micro_batch"} & set(unseen)) | {"gpu": trial.device.gpu}


def ask(
    question: str, asked: Sequence[Trial], traces: Path | None, trace: bool, importable: Sequence[Path] = ()
) -> list[Answer | None]:
    """Return the answers, in order. An answer is None if the trial allocates nothing, or has no trace in the folder
    `traces` and `trace` is false. With `traces` the trials are those of a folder's rows. Without, they are the user's
    own, traced for this once, by a process that imports from the folders `importable` first. Raises UserError."""
    environ = attempt_environment("", "simulated", os.environ)
    if importable:
        environ["PYTHONPATH"] = os.pathsep.join([*map(str, importable), *filter(None, [environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as root, Launcher("cold", Path(root) / "templates") as launcher:
        spec = {
            "question": question,
            "trials": [trial.model_dump(mode="json") for trial in asked],
            "traces": str((traces or Path(root)).absolute()),
            "trace": trace,
        }
        known = environ if traces is None else worker_environment.unknown(environ)
        answers: list[Answer | None] = ask_attempt(
            launcher, spec, Path(root) / "attempt", known, "", SECONDS, "take a smaller trial",
            "the step could not be traced: ",
        )  # fmt: skip
    return answers


def trace_timeline(trial_id: str, trial: Trial) -> Record:
    """Trace a trial and return its timeline. Raises UserError, also if the step allocates nothing."""
    if (found := of_trial("timeline", "timeline", trial_id, trial, None)) is None:
        raise UserError("the step allocates nothing, so it has no timeline")
    return {"trial_id": trial_id, "about": describe_trial(trial), "timeline": found}


def read_timelines(folder: Path, ids: Sequence[str], trace: bool) -> list[Record]:
    """Return timelines of a sweep's trials, or of those that `finished` takes if none is named.

    A trial without a kept trace is left out, or traced with `trace`. Raises UserError.
    """
    own = [(row, read_trial("timeline", row)) for row in finished(folder, ids)]
    traces = kept_traces(folder)
    folder = traces.parent
    found = [_read_kept(folder, row) for row, _ in own]
    if missing := [i for i, one in enumerate(found) if one is None]:
        answers = ask("timeline", [own[i][1] for i in missing], traces, trace=False)
        for i, answer in zip(missing, answers, strict=True):
            if answer is None and trace:
                answer = of_trial("timeline", "timeline", own[i][0]["trial_id"], own[i][1], traces)
            if answer is not None:
                _keep(folder, own[i][0], answer)
            found[i] = answer
    pairs = ((*of, one) for of, one in zip(own, found, strict=True) if one is not None)
    told = ((r["trial_id"], describe_trial(t) | {"seq_len": r["seq_len"]}, one) for r, t, one in pairs)
    return [{"trial_id": trial_id, "about": about, "timeline": one} for trial_id, about, one in told]


def _timeline_path(folder: Path, row: Row) -> Path:
    return folder / "timelines" / f"{file_names.make_safe(row['trial_id'])}.json"


def _mark(row: Row) -> list[Any]:
    return [FORMAT, SIMULATION, row.get("started_at")]


def _read_kept(folder: Path, row: Row) -> Answer | None:
    stored = plain_json.read_object(_timeline_path(folder, row))
    if stored is None or stored.get("of") != _mark(row):
        return None
    found = stored.get("timeline")
    return found if isinstance(found, dict) and isinstance(found.get("peak"), dict) else None


def _keep(folder: Path, row: Row, timeline: Mapping[str, Any]) -> None:
    place = _timeline_path(folder, row)
    if file_names.is_inside(folder, str(place.relative_to(folder))) is None:  # a link leads out of the folder
        return
    with contextlib.suppress(OSError):  # the folder is read-only; the timeline is made again next time
        place.parent.mkdir(exist_ok=True)
        with replaced(place) as aside:
            aside.write_text(json.dumps({"of": _mark(row), "timeline": timeline}))
