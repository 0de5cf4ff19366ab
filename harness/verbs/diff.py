"""`vramsweep diff A B`: what of the memory at the peak differs between two runs, and which code requested it.

trace_diff.py compares the runs.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.allocator.peak_blocks import find_live
from vramsweep.harness.allocator.recording import load
from vramsweep.harness.allocator.replay import replay_as_recorded
from vramsweep.harness.files.commit_files import export_commit
from vramsweep.harness.files.sweep_folder import kept_traces
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import choose_unit, format_in, format_size
from vramsweep.harness.questions import trace_query
from vramsweep.harness.questions.trace_diff import (
    Change,
    Moment,
    Run,
    find_changes,
    find_parts,
    needs_more,
    read_answer,
    read_measured,
)
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.verbs.parsers import PARSERS

MOST = 10  # changes printed
RECORDED = "recorded"
_COMMIT = re.compile(r"(?P<revision>.+?):(?P<path>[^:]+\.py):(?P<function>\w+)")
_TARGET = re.compile(r"[^:]+\.py:\w+")
_USAGE = "vramsweep diff 'model=NAME seq_len=N' 'model=NAME seq_len=M' [KEY=VALUE ...]"


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep diff`; return 1 if B needs more memory, else 0. Raises UserError for a user's mistake."""
    arguments, words = PARSERS["diff"]().parse_settings(argv)
    named, shared = words[:2], words[2:]
    if len(named) < 2 or any("=" not in word for word in shared):
        raise UserError(f"diff needs A, B and then settings of both; quote several settings as one: {_USAGE}")
    recorded = [Path(name).is_file() for name in named]
    if any(recorded) and not all(recorded):
        other = named[recorded.index(False)]
        raise UserError(f"a recording shows neither module nor category, so compare it with a recording, not {other}")
    if all(recorded) and shared:
        raise UserError(f"two recordings take no settings; leave out {' '.join(shared)}")
    a, b = (read_recording(name) if all(recorded) else read_run(name, shared) for name in named)
    if arguments.json:
        print(json.dumps(record(a, b)))
    else:
        console = Console()
        for line in describe(a, b):
            console.print(line, soft_wrap=True)
    return 1 if needs_more(a, b) else 0


def read_recording(name: str) -> Run:
    """Return the run of a recording, from its blocks at the peak. Raises UserError."""
    recording = load(Path(name))
    start = undo(recording)
    row = replay_as_recorded(recording, start)
    assert row.holders is not None  # of every replay from the recorded state
    storages = []
    for block in find_live(recording, start, row.holders.event):
        place, _, function = (block.where or "").partition(" ")
        line, operator = (place, function) if ":" in place else ("", block.where or "unknown")
        size, count = block.bytes * block.count, block.count
        known = {"category": "blocks", "module": "", "operator": operator, "line": line}
        storages.append(known | {"bytes": size, "count": count})
    rounding = row.holders.rounding
    parts = {"blocks": row.holders.allocated - rounding, "rounding": rounding}
    when = f"after event {row.holders.event}"
    return Run(name, RECORDED, Moment(row.holders.allocated, parts, storages), row.peak_reserved, when)


def read_run(name: str, shared: Sequence[str]) -> Run:
    """Return the run that a user names: settings, a target, a commit's target, or a row. Raises UserError."""
    if (commit := _COMMIT.fullmatch(name)) is not None and "=" not in name:
        with tempfile.TemporaryDirectory() as folder:
            export_commit(commit["revision"], Path(folder))
            target = f"runner.target={folder}/{commit['path']}:{commit['function']}"
            places = [place for place in (Path(folder), Path(folder) / "src") if place.is_dir()]
            return _predict(name, [*shared, "runner=custom", target], places)
    if _TARGET.fullmatch(name):
        return _predict(name, [*shared, "runner=custom", f"runner.target={name}"])
    if trace_query.name_a_trial([name]) and not Path(name).exists():
        return _predict(name, [*shared, *shlex.split(name)])
    row, folder = _find_row(name)
    if shared:
        raise UserError(f"{name} is a row, which has its settings; leave out {' '.join(shared)}")
    if row.get("device") != "simulated":
        if row.get("outcome") != "ok":
            raise UserError(f"{name} ended {row.get('outcome')}, so its peak is unknown; name a trial that is ok")
        return read_measured(name, row)
    trial_id = str(row["trial_id"])
    trial = trace_query.read_trial("diff", row)
    return _read(name, trace_query.of_trial("peak", "diff", trial_id, trial, kept_traces(folder)))


def _predict(name: str, words: Sequence[str], importable: Sequence[Path] = ()) -> Run:
    if (found := trace_query.find_trial("diff", words)) is None:
        raise UserError(f"{name} names no trial: {_USAGE}")
    trial: Trial = found[1]
    [answer] = trace_query.ask("peak", [trial], None, True, importable)
    return _read(name, answer)


def _read(name: str, answer: dict[str, Any] | None) -> Run:
    if answer is None:
        raise UserError(f"{name} allocates nothing, so there is nothing to compare")
    return read_answer(name, answer)


def _find_row(name: str) -> tuple[dict[str, Any], Path]:
    """Return the row that results/SWEEP/ID or results/SWEEP:ID names, or the only one of a folder, and the folder."""
    if Path(name).is_dir():
        rows, folder = trace_query.finished(Path(name), []), Path(name)
        if len(rows) != 1:
            known = ", ".join(str(row["trial_id"]) for row in rows[:4]) or "none is predicted"
            raise UserError(f"{name} has several trials; name one as {name}:TRIAL_ID (largest: {known})")
        return rows[0], folder
    for split in (":", "/"):
        place, _, trial_id = name.rpartition(split)
        if place and Path(place).is_dir():
            return trace_query.finished(Path(place), [trial_id])[0], Path(place)
    raise UserError(f"{name}: no such file, sweep's folder or target; name settings, results/SWEEP:TRIAL_ID, "
                    "a recording, or REV:path/to/file.py:build")  # fmt: skip


def describe(a: Run, b: Run) -> Iterator[str]:
    """Yield the lines that a reader sees, at most twenty."""
    for letter, run in (("A", a), ("B", b)):
        yield f"{letter}: {run.name} ({', '.join(filter(None, (run.kind, run.when, '' if run.fits else 'does not fit')))})"
    yield f"peak allocated {_describe_sizes(a.peak.allocated, b.peak.allocated)}"
    yield f"peak reserved  {_describe_sizes(a.reserved, b.reserved)}"
    if a.peak.storages is None or b.peak.storages is None:
        yield "A measured row shows no tensors, so only sums are compared. By phase, allocated:"
        for phase in (phase for phase in a.phases if phase in b.phases):
            yield f"  {phase:<10} {_describe_sizes(a.phases[phase].allocated, b.phases[phase].allocated)}"
        return
    changes = find_changes(a.peak.storages, b.peak.storages)
    parts = (f"{name.replace('_', ' ')} {_sign(size)}" for name, size in find_parts(a.peak, b.peak).items())
    yield f"by part: {', '.join(parts) or 'no difference'}"
    yield from (f"  {_sign(one.difference):>10}  {_describe_change(one)}" for one in changes[:MOST])
    if rest := changes[MOST:]:
        yield f"  {_sign(sum(one.difference for one in rest)):>10}  in {len(rest)} further changes; --json lists them"


def _describe_change(one: Change) -> str:
    at = 0 if one.kind == "gone" else 1
    number = f" x {one.count[at]}" if one.count[at] > 1 else ""
    many = f" x {one.count[0]} -> {one.count[1]}" if all(one.count) and one.count[0] != one.count[1] else number
    who = " ".join(filter(None, (one.module, one.operator)))
    made = f", made in {one.lines[at]}" if one.lines[at] else ""
    was = f", {one.kind} ({format_size(one.bytes[0])} -> {format_size(one.bytes[1])})" if all(one.count) else ""
    return f"{one.category.replace('_', ' ')}, {who}{many}{made}{was or f', {one.kind}'}"


def _describe_sizes(a: int | None, b: int | None) -> str:
    if a is None or b is None:
        return " -> ".join("unknown" if size is None else format_size(size) for size in (a, b))
    unit = choose_unit(max(a, b))
    return f"{format_in(unit, a)} -> {format_in(unit, b)} {unit}: {_sign(b - a) if a != b else 'no difference'}"


def _sign(size: int) -> str:
    return f"{'+' if size > 0 else '-'}{format_size(abs(size))}"


def record(a: Run, b: Run) -> dict[str, Any]:
    """Return what `--json` prints; sizes are in bytes, differences are B minus A, null if not known."""
    phases = {phase: _record(a.phases[phase], b.phases[phase]) for phase in a.phases if phase in b.phases}
    sides = {
        name: {"name": run.name, "kind": run.kind, "when": run.when, "fits": run.fits, "reserved": run.reserved}
        for name, run in (("a", a), ("b", b))
    }
    return {**sides, "needs_more": needs_more(a, b), "peak": _record(a.peak, b.peak), "phases": phases}


def _record(a: Moment, b: Moment) -> dict[str, Any]:
    known = a.storages is not None and b.storages is not None
    changes = find_changes(a.storages or (), b.storages or ())
    listed = [asdict(one) | {"difference": one.difference, "kind": one.kind} for one in changes]
    return {
        "allocated": [a.allocated, b.allocated],
        "parts": find_parts(a, b) if known else None,
        "changes": listed if known else None,
    }
