"""`vramsweep diff A B`: what of the memory at the peak differs between two runs, and which code requested it.

trace_diff.py compares the runs.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.allocator.peak_blocks import find_live
from vramsweep.harness.allocator.recording import load
from vramsweep.harness.allocator.replay import replay_as_recorded
from vramsweep.harness.config import typed_words
from vramsweep.harness.files.sweep_folder import kept_traces
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import choose_unit, format_in, format_size
from vramsweep.harness.questions import trace_diff, trace_query
from vramsweep.harness.questions.trace_diff import Change, Moment, Run
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.verbs.cli import read_parser

MOST = 10  # changes printed
_COMMIT = re.compile(r"([^=]+):([^:=]+\.py:\w+)")  # a revision and a target
_QUOTED = "quote all settings of one side together, as in vramsweep diff 'seq_len=512' 'seq_len=1024 micro_batch=2'"


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep diff`; return 1 if B needs more memory, else 0. Raises UserError for a user's mistake."""
    arguments = read_parser("diff").parse_args(argv)
    names, shared = (arguments.a, arguments.b), arguments.settings
    recorded = [Path(name).is_file() for name in names]
    if any(recorded) and (not all(recorded) or shared):
        raise UserError("a recording shows no modules; compare it only with a recording, without settings")
    with contextlib.ExitStack() as stack:  # until the end, files of a commit are there
        readers = [find_run(name, shared, stack) for name in names]
        a, b = (read() for read in readers)  # only now, because a mistake in B need not wait for A
    if arguments.json:
        print(json.dumps(record(a, b)))
    else:
        console = Console()
        for line in describe(a, b):
            console.print(line, soft_wrap=True)
    return 1 if trace_diff.needs_more(a, b) else 0


def read_recording(name: str) -> Run:
    """Return the run of a recording, from its blocks at the peak. Raises UserError."""
    recording = load(Path(name))
    start = undo(recording)
    row = replay_as_recorded(recording, start)
    assert row.holders is not None  # of every replay from the recorded state
    storages = []
    for block in find_live(recording, start, row.holders.event):
        line, _, function = (block.where or "").partition(" ")
        maker = {"operator": function, "line": line} if ":" in line else {"operator": block.where or "", "line": ""}
        sizes = {"bytes": block.bytes * block.count, "count": block.count}
        storages.append({"category": "blocks", "module": ""} | maker | sizes)
    parts = {"blocks": row.holders.allocated - row.holders.rounding, "rounding": row.holders.rounding}
    peak = {"allocated": row.holders.allocated, "parts": parts, "storages": storages}
    kind = "predicted or replayed" if recording.simulated else "recorded"
    return Run(name, kind, f"after event {row.holders.event}", row.peak_reserved, peak, {})


def find_run(name: str, shared: Sequence[str], stack: contextlib.ExitStack) -> Callable[[], Run]:
    """Return what reads the run of a recording, of settings, of a commit's target or of a row. Raises UserError."""
    if Path(name).is_file():
        return partial(read_recording, name)
    if (commit := _COMMIT.fullmatch(name)) is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        export_commit(commit[1], folder)
        if not (folder / commit[2].partition(":")[0]).is_file():
            raise UserError(f"{name}: the commit has no such file; the path begins at the repository's top")
        target = ["runner=custom", f"runner.target={folder}/{commit[2]}"]
        return partial(_trace, name, _find_trial(name, [*shared, *target]), [folder, folder / "src"])
    if trace_query.name_a_trial([name]) and not Path(name).exists():
        try:
            own = shlex.split(name)
        except ValueError as error:
            raise UserError(f"{name}: {error}; {_QUOTED}") from None
        return partial(_trace, name, _find_trial(name, [*shared, *own]))
    split = ":" if ":" in name else "/"
    folder, trial_id = Path(name.rpartition(split)[0]), name.rpartition(split)[2]
    if split not in name or not folder.is_dir() or Path(name).is_dir():
        raise UserError(f"{name} is no trial; give settings, results/SWEEP:TRIAL_ID, or REV:path/to/file.py:build")
    if shared:
        raise UserError(f"{name} is a row, which has its own settings; leave out {' '.join(shared)}")
    [row] = trace_query.finished(folder, [trial_id])
    if row.get("device") == "simulated":
        trial, traces = trace_query.read_trial("diff", row), kept_traces(folder)
        return lambda: _read_answer(name, trace_query.of_trial("peak", "diff", trial_id, trial, traces))
    if row.get("outcome") != "ok":
        raise UserError(f"{name} ended {row.get('outcome')}, so its peak is unknown; name a trial that is ok")
    return partial(trace_diff.read_measured, name, row)


def _find_trial(name: str, words: Sequence[str]) -> Trial:
    read, notes = typed_words.understand("explain", words, read_parser("explain"))  # it takes the same settings
    if notes:
        print(f"note: {'; '.join(notes)}", file=sys.stderr)
    if (found := trace_query.find_trial("diff", read)) is None:
        raise UserError(f"{name} names no trial; {_QUOTED}")
    return found[1]


def _trace(name: str, trial: Trial, importable: Sequence[Path] = ()) -> Run:
    [answer] = trace_query.ask("peak", [trial], None, True, importable)
    return _read_answer(name, answer)


def _read_answer(name: str, answer: dict[str, Any] | None) -> Run:
    if answer is None:
        raise UserError(f"{name} allocates nothing, so there is nothing to compare")
    return trace_diff.read_answer(name, answer)


def describe(a: Run, b: Run) -> Iterator[str]:
    """Yield the lines that a reader sees, at most twenty."""
    for letter, run in (("A", a), ("B", b)):
        yield f"{letter}: {run.name} ({run.kind}{', peak ' * bool(run.when)}{run.when})"
    yield f"peak allocated {_describe_sizes(a.peak['allocated'], b.peak['allocated'])}"
    yield f"peak reserved  {_describe_sizes(a.reserved, b.reserved)}"
    parts, changes = trace_diff.compare_parts(a.peak, b.peak), trace_diff.compare_storages(a.peak, b.peak)
    if parts is None or changes is None:
        yield "A measured row shows no tensors, so only sums are compared. Allocated in each phase:"
        for phase in (phase for phase in a.phases if phase in b.phases):
            yield f"  {phase:<10}{_describe_sizes(a.phases[phase]['allocated'], b.phases[phase]['allocated'])}"
        return
    texts = (f"{name.replace('_', ' ')} {_sign(size)}" for name, size in parts.items())
    yield f"by part: {', '.join(texts) or 'no difference'}"
    yield from (f"  {_sign(one['difference']):>10}  {_describe_change(one)}" for one in changes[:MOST])
    if rest := changes[MOST:]:
        total = sum(one["difference"] for one in rest)
        yield f"  {_sign(total):>10}  in {len(rest)} more changes, which --json lists"


def _describe_change(one: Change) -> str:
    line, size, count = (one[name][0 if one["kind"] == "gone" else 1] for name in ("line", "bytes", "count"))
    number = f" x {count}" if count > 1 else ""
    happened = one["kind"]
    if happened in ("larger", "smaller"):
        number = f" x {one['count'][0]} -> {count}" if one["count"][0] != count else number
        happened += f": {format_size(one['bytes'][0])} -> {format_size(size)}"
    who = " ".join(filter(None, (one["module"], one["operator"]))) or "unknown"
    return f"{one['category'].replace('_', ' ')}, {who}{number}{line and f', made in {line}'} ({happened})"


def _describe_sizes(a: int | None, b: int | None) -> str:
    if a is None or b is None:
        return " -> ".join("unknown" if size is None else format_size(size) for size in (a, b))
    unit = choose_unit(max(a, b))
    return f"{format_in(unit, a)} -> {format_in(unit, b)} {unit}: {_sign(b - a) if a != b else 'no difference'}"


def _sign(size: int) -> str:
    return f"{'-' if size < 0 else '+'}{format_size(abs(size))}"


def record(a: Run, b: Run) -> dict[str, Any]:
    """Return what `--json` prints; sizes are in bytes, and what is not known is null."""

    def compare(one: Moment, other: Moment) -> dict[str, Any]:
        changes = trace_diff.compare_storages(one, other)
        allocated = [one["allocated"], other["allocated"]]
        return {"allocated": allocated, "parts": trace_diff.compare_parts(one, other), "changes": changes}

    sides = [{"name": run.name, "kind": run.kind, "when": run.when, "reserved": run.reserved} for run in (a, b)]
    phases = {phase: compare(a.phases[phase], b.phases[phase]) for phase in a.phases if phase in b.phases}
    return {
        "sides": sides,
        "needs_more": trace_diff.needs_more(a, b),
        "peak": compare(a.peak, b.peak),
        "phases": phases,
    }


def export_commit(revision: str, folder: Path) -> None:
    """Write all files of a commit of the current folder's repository into `folder`; submodules are left out.

    The repository stays as it is. Raises UserError if there is no such commit.
    """
    top = _run_git("rev-parse", "--show-toplevel").decode().rstrip("\n")
    commit = _run_git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(_run_git("-C", top, "archive", "--format=tar", commit))) as archive:
        try:
            archive.extractall(folder, filter="data")  # which keeps every file inside the folder
        except tarfile.TarError as error:
            raise UserError(f"{revision} has a file that cannot be exported: {error}") from None


def _run_git(*words: str) -> bytes:
    try:
        return subprocess.run(["git", *words], capture_output=True, check=True).stdout
    except OSError as error:
        raise UserError(f"git cannot be started ({error.strerror}); install it, or name two trials") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        reason = said[0] if said else "it failed"
        raise UserError(f"git says {reason!r}; inside a repository, name an existing commit") from None
