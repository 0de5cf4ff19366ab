"""`vramsweep why`: the cause of an out-of-memory error, and what would have fitted, in at most 20 lines.

allocator/oom_state.py reads snapshots, rows/oom_text.py reads logs; advise.py predicts changes if the settings are
known.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator import oom_state, safe_unpickle
from vramsweep.harness.allocator.oom_state import BACKWARD, FORWARD, OPTIMIZER, PARAMETERS, STATES, UNKNOWN, OomState
from vramsweep.harness.files import bounded_reads
from vramsweep.harness.hardware.gpu_lookup import find_gpu, gpus_with_enough
from vramsweep.harness.messages.activity import Activity
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.questions import trace_query
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.oom_text import Log, OomReport, first_report, read_log
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import fit_text
from vramsweep.harness.spec.techniques.catalog import DEFAULTS
from vramsweep.harness.verbs import advise
from vramsweep.harness.verbs.parsers import PARSERS

MOST, LONGEST, MOST_FILES, RANKS, LINES = 20, 110, 256, 5, 5  # lines; characters of a text; files; ranks; code lines
CHANGES = {
    FORWARD: "smaller micro_batch or seq_len, checkpointing=full",
    BACKWARD: "smaller micro_batch or seq_len, sharding=fsdp2",
    STATES: "optimizer=adamw_bnb_8bit, sharding=fsdp2, adapter=lora",
    PARAMETERS: "adapter=lora quantization=nf4, sharding=fsdp2, a smaller model",
}
CHANGES |= {OPTIMIZER: CHANGES[STATES], UNKNOWN: f"{CHANGES[FORWARD]}; {CHANGES[STATES]}"}
PREDICTED, COMBINATIONS = 8, 8  # lines of predictions; combinations of changes to predict
AXES = ("seq_len", "micro_batch", "precision")
MUCH = 3 << 30  # bytes outside the allocator, more than a context and NCCL take
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep why`; return the exit status, 1 if there is no out-of-memory error. Raises UserError."""
    options, rest = PARSERS["why"]().parse_settings(argv)
    words = [*options.words, *rest]
    files = [word for word in words if "=" not in word or Path(word).exists()]
    settings = [word for word in words if word not in files]
    if not files:
        raise UserError(
            "why needs a file or a sweep's folder: vramsweep why FILE ... | vramsweep why results/SWEEP [TRIAL_ID]"
        )
    place, words = Path(files[0]), list[str]()
    if place.is_dir() and journal.files(place)[0].exists():
        record, lines, words = explain_row(place, files[1:])
        found = bool(words)
        settings = settings or (understand_row(words, record["row"]) if found else [])
    elif not place.is_dir() and _is_pickle(place):
        if len(files) > 1:
            raise UserError(f"why takes one snapshot, not {len(files)}; give each its own command")
        found, record, lines = explain_snapshot(place, options.device)
    else:
        found, record, lines = explain_logs([Path(one) for one in files], options.device)
    console = Console()
    if found and settings:  # evidence first, because predictions take minutes; they replace what is to change
        lines = lines[:-1][: MOST - PREDICTED]
    elif found:
        named = shlex.join(words) or "model=NAME seq_len=N micro_batch=N gpu=NAME"
        lines.append(f"predictions of each change: vramsweep advise {named}")
    for line in () if options.json else lines[:MOST]:
        console.print(line, soft_wrap=True)
    if found and settings:
        record["predicted"], lines = predict_changes(settings)
        for line in () if options.json else lines[:PREDICTED]:
            console.print(line, soft_wrap=True)
    if options.json:
        print(json.dumps(record))
    return 0 if found else 1


def explain_snapshot(path: Path, device: int | None) -> tuple[bool, dict[str, Any], list[str]]:
    """Return whether a request failed in a snapshot, what is known as data, and as lines. Raises UserError."""
    with Activity("reading the snapshot") as activity:
        state = oom_state.find_state(safe_unpickle.load(path), path.name, device)
        served = oom_state.try_settings(state, activity.update)
    record = {key: value for key, value in vars(state).items() if key not in ("recording", "start", "lines")}
    record |= {"kind": "snapshot", "file": path.name, "device": state.recording.device, "served": served}
    record["lines"] = [{"category": kind, "line": line, "bytes": size} for (kind, line), size in state.lines.items()]
    return state.request is not None, record, list(_of_state(state, path.name, served))


def _of_state(state: OomState, name: str, served: Mapping[str, bool] | None) -> Iterator[str]:
    device, unused = f"device {state.recording.device} ({state.why})", state.reserved - state.allocated
    others = f"; other devices: {', '.join(state.others)}" if state.others else ""
    if state.request is None:
        yield f"{_short(name)}: no request failed in it. This is the {state.at} of {device}{others}"
    else:
        yield f"{_short(name)}: {device} ran out of memory{others}"
        about = [f"for {state.category}" if state.category != UNKNOWN else "", _short(state.where or "")]
        about += [f"within {_short(state.annotation)}" if state.annotation else ""]
        yield f"failed request: {', '.join(filter(None, [format_size(state.request), *about]))}"
    yield f"{format_size(state.allocated):>10}  allocated: {_shares(state.categories, state.allocated)}"
    block = "" if state.largest_free is None else f"; largest free block for it: {format_size(state.largest_free)}"
    yield f"{format_size(unused):>10}  reserved but unused{block}"
    if state.device_free is not None:
        yield f"{format_size(state.device_free):>10}  free on the GPU; a snapshot does not name other processes"
    yield "by line of code:"
    for (kind, line), size in list(state.lines.items())[:LINES]:
        yield f"{format_size(size):>10}  {kind}, {_short(line) if line != UNKNOWN else 'no line of Python is recorded'}"
    if state.modules.keys() - {UNKNOWN}:
        yield f"by module: {_shares(state.modules, state.allocated)}"
    if state.annotations.keys() - {"none"}:
        yield f"by annotation: {_shares(state.annotations, state.allocated)}"
    if state.request is None or state.needed is None or state.device_free is None or served is None:
        return
    cause, change = judge(state.request, unused, state.device_free, state.own_limit)
    yield cause
    works = [text for text, fits in served.items() if fits and text]
    limit = "its own limit" if state.own_limit else format_size(state.reserved + state.device_free)
    if served[""]:
        yield "other settings: unknown, because a replay under the recorded settings does not fail either"
    else:
        yield f"other settings, replayed within {limit}: {'; '.join(works[:3]) or 'none'} of {len(served) - 1} fit"
    yield _least(state.needed, "reserved with these settings")
    kind = max(state.categories, key=lambda one: state.categories[one], default=UNKNOWN)
    fitting = [] if served[""] else [f"PYTORCH_CUDA_ALLOC_CONF={text}" for text in works[:1]]
    levers = [*fitting, "" if change == EXPANDABLE else change, CHANGES[kind]]
    yield f"to change: {'; '.join(filter(None, levers))}"


def explain_logs(paths: Sequence[Path], device: int | None) -> tuple[bool, dict[str, Any], list[str]]:
    """Return whether logs have an out-of-memory error, what is known as data, and as lines. Raises UserError."""
    files = [one for path in paths for one in (_logs_of(path) if path.is_dir() else [path])]
    logs: list[Log] = []
    with Activity("reading the log"):
        for path in files[:MOST_FILES]:
            try:
                logs.append(read_log(path, path.name if len(files) == 1 else str(path)))
            except (OSError, ValueError) as error:
                raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    reports = [one for log in logs for one in log.reports if device in (None, one.device)]
    record: dict[str, Any] = {"kind": "log", "files": [str(path) for path in files[:MOST_FILES]]}
    if not reports:
        text = f"{files[0].name if len(files) == 1 else f'{len(files)} files'}: no out-of-memory error"
        seems = [f"it is text with {sum(log.lines for log in logs):,} lines"]
        seems += [f"it reports {log.fault}" for log in logs if log.fault][:1]
        seems += [f"its last line: {_short(log.last)}" for log in logs if log.last][:1]
        return False, record | {"reports": []}, [f"{text}; {'; '.join(seems)}"]
    gpu = [one for one in reports if one.kind == "gpu"] or reports
    first, known = first_report(gpu)
    record |= {"reports": [asdict(one) for one in reports], "first": asdict(first), "first_is_known": known}
    return True, record, list(_of_report(first, gpu, known, len(reports) + sum(log.more for log in logs)))


def _of_report(one: OomReport, others: Sequence[OomReport], known: str, count: int) -> Iterator[str]:
    sizes, who = one.sizes, _rank(one)
    several = f"; the first of {count} errors {known}" if count > 1 else ""
    where = f"{_short(one.file)}:{one.line}: "
    kinds = {"gpu": "ran out of GPU memory", "host": "ran out of the host's memory (RAM), not of GPU memory"}
    text = kinds.get(
        one.kind, "was killed by SIGKILL; mostly the kernel does that when RAM is full, but no line says so"
    )
    yield f"{where}{who or 'the run'} {text}{several}"
    if "request" in sizes:
        yield f"failed request: {format_size(sizes['request'])}{f' for {one.category}' * (one.category != UNKNOWN)}"
    else:
        yield f"its text: {_short(one.text)}"
    if one.own:
        yield f"your code: {_short(one.own)}{f': {_short(one.code)}' if one.code else ''}"
    if one.model:
        yield f"library: {_short(one.model)}"
    for size, about in accounts(one):
        yield f"{format_size(size):>10}  {about}"
    levers = []
    if one.kind == "gpu" and "request" in sizes and one.unused is not None and "free" in sizes:
        limit = sizes.get("limit")
        own = sizes["free"] >= sizes["request"] or (limit is not None and limit < sizes.get("total", 0))
        cause, change = judge(sizes["request"], one.unused, sizes["free"], own)
        yield cause
        levers += [change] * bool(change)
    if (one.outside or 0) > MUCH:
        levers += [f"find who has {format_size(one.outside or 0)} outside PyTorch's allocator (nvidia-smi)"]
    if one.kind == "gpu" and {"request", "allocated"} <= sizes.keys() and "HIP" not in one.text:
        yield _least(sizes["allocated"] + sizes["request"], "allocated")
    if others[1:]:
        rest = [report for report in others if report is not one]
        for report in rest[:RANKS]:
            held = f", {format_size(report.sizes['allocated'])} allocated" if "allocated" in report.sizes else ""
            asked = f" asked for {format_size(report.sizes['request'])}" if "request" in report.sizes else ""
            yield f"also {_rank(report) or f'{_short(report.file)}:{report.line}'}:{asked}{held}"
        if len(rest) > RANKS:
            yield f"and {len(rest) - RANKS} more errors"
    if one.kind != "gpu":
        levers += [
            "fewer DataLoader workers, less offload to the CPU, one process at a time that loads weights; more RAM"
        ]
    else:
        levers += [CHANGES[one.category]]
    yield f"to change: {'; '.join(levers)}"


def accounts(one: OomReport) -> Iterator[tuple[int, str]]:
    """Yield sizes in bytes of a GPU's memory and what each is; together they are the GPU, as far as the text tells."""
    sizes, reserved = one.sizes, one.reserved
    if "allocated" in sizes:
        private = (
            f", of it {format_size(sizes['private'])} in private pools (CUDA graphs)" if "private" in sizes else ""
        )
        yield sizes["allocated"], f"allocated by PyTorch{private}"
    if one.unused is not None:
        yield one.unused, "reserved by PyTorch but unused"
    total, free, process, outside = sizes.get("total"), sizes.get("free"), sizes.get("process"), one.outside
    listed = {pid: size for pid, size in one.others.items() if process or reserved is None or size < reserved}
    if process and reserved is not None and process >= reserved:
        yield process - reserved, "of this process outside PyTorch's allocator (CUDA context, NCCL)"
    if listed:
        yield sum(listed.values()), f"of other processes: {', '.join(list(listed)[:4])}"
    elif outside is not None and not process:
        if outside >= 0:
            yield outside, "outside PyTorch's allocator: CUDA context, and other processes if there are any"
        else:
            yield -outside, "more than the GPU has: its driver takes host memory too (Windows, WSL)"
    if free is not None:
        yield free, f"free{f', of {format_size(total)} in all' if total else ''}"
    if "limit" in sizes:
        yield sizes["limit"], "limit of this process (memory fraction)"


def judge(request: int, unused: int, free: int, own_limit: bool) -> tuple[str, str]:
    """Return a sentence on fragmentation, and the change that helps against the cause ("" if none is known)."""
    both = f"unused and free memory are {format_size(unused + free)} together"
    if own_limit:
        cause = f"{format_size(free)} of the GPU are free, so a limit of the process refused, or the driver"
        return f"fragmentation: unknown; {cause}", "a higher memory fraction (set_per_process_memory_fraction)"
    if unused + free >= request:
        return f"fragmentation alone is the cause: {both}, enough for the request, but not in one piece", EXPANDABLE
    return f"fragmentation is not the cause: {both}, less than the request", ""


def explain_row(place: Path, ids: Sequence[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return a sweep's row of `ids`, else its first out of memory, as data and as lines; and the words of its settings.

    There are no words if its trial has no out-of-memory error. Raises UserError.
    """
    rows = list(journal.terminal(journal.read(place)[0]).values())
    full = [row for row in rows if row.get("outcome") in ("oom", "host_oom")]
    if len(ids) > 1:
        raise UserError(f"why takes one trial, not {len(ids)}")
    row = trace_query.finished(place, ids)[0] if ids else next(iter(full), None)
    if row is None or row not in full:
        what = f"it is {row.get('outcome')}" if row else f"{len(rows)} trials have finished"
        return {"kind": "row", "row": row}, [f"{place}: no out-of-memory error; {what}"], []
    where = "host" if row["outcome"] == "host_oom" else "GPU"
    how = "predicted" if row.get("device") == "simulated" else "measured"
    lines = [
        f"{place}: trial {row['trial_id']} ran out of {where} memory, {how}; out of memory in all: {len(full)} trials",
        f"settings: {shlex.join(words := words_of_row(row))}",
        f"cause: {_short(str(row.get('reason')))} (in {row.get('phase') or 'an unknown phase'})",
    ]
    request, allocated, reserved = (row.get(f"oom_{name}_bytes") for name in ("request", "allocated", "reserved"))
    sizes = sorted(_dict(row.get("oom_parts_bytes")).items(), key=lambda one: -one[1])
    parts = {name.replace("_", " "): size for name, size in sizes}
    shares = f": {_shares(parts, sum(parts.values()))} (with the failed request)" if parts else ""
    table = {"failed request": request, f"allocated{shares}": allocated}
    table["reserved but unused"] = reserved - allocated if reserved and allocated else None
    table["limit of the allocator on this GPU"] = row.get("memory_limit_bytes")
    lines += [f"{format_size(size):>10}  {name}" for name, size in table.items() if size is not None]
    if need := row.get("unlimited_peak_reserved_bytes"):
        lines.append(f"predicted without a limit: {format_size(need)} reserved; on: {_gpus(need)}")
    elif request and allocated:
        lines.append(_least(request + allocated, "allocated"))
    kind = next(iter(parts), "?")[:6]
    lines.append(f"to change: {next((text for name, text in CHANGES.items() if kind in name), CHANGES[UNKNOWN])}")
    return {"kind": "row", "row": row}, lines, words


def words_of_row(row: Row) -> list[str]:
    """Return the settings of a row's trial as typed, as far as rows name them."""
    trial = _dict(row.get("trial"))
    defaults = {"grad_accum": 1, "sharding": "none", "world_size": 1} | dict(DEFAULTS)
    values = {name: row.get(name, trial.get(name)) for name in ("model", "runner", *AXES, *defaults)}
    words = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in values.items()
        if value is not None and value != defaults.get(name)
    ]
    card = find_gpu(str(row.get("gpu_name")))
    gpu = _dict(trial.get("device")).get("gpu") if row.get("device") == "simulated" else card and card.name
    return words + [f"gpu={gpu}"] * bool(gpu)


def understand_row(words: Sequence[str], row: Row) -> list[str]:
    """Return a row's words for a prediction; none if they are not all of its settings, or name what is not ours.

    A folder may be someone else's (trace_query.py): predicting must run, read and ask for nothing that only it names.
    """
    from vramsweep.harness.config import conf_files, typed_words

    trial = _dict(row.get("trial"))
    if _dict(trial.get("model")).get("name") not in conf_files.file_names("model"):
        return []
    if _dict(trial.get("runner")).get("name") not in ("torch", "trainer", "deepspeed"):
        return []
    try:
        read, _ = typed_words.understand("why", words, PARSERS["why"]())
        found = trace_query.find_trial("why", read)
    except UserError:
        return []
    own = {} if found is None else found[1].model_dump(mode="json")
    same = all(own.get(name) == value for name, value in trial.items() if name not in ("device", "protocol", "repeat"))
    return read if own and same else []


def predict_changes(settings: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return what `advise` predicts for these settings, as data and as lines. Raises UserError."""
    if (answer := advise.ask(settings, most=COMBINATIONS, quiet=True)) is None:
        return None, []
    asked, found, _ = answer
    lines = [f"predicted for {fit_text.describe_run(asked.trial)}, limit {format_size(found.limit)}:"]
    best = found.recommended or found.nearest
    smallest = sorted((one for one in found.singles if one.need is not None), key=lambda one: one.need or 0)[:3]
    for one in dict.fromkeys([found.base, *smallest, *([best] if best else [])]):
        if one.need is not None:
            name = " ".join(remedy.words for remedy in one.remedies) or "unchanged"
            fits = ("fits" if one.fits(found.limit) else "too much") + ", recommended" * (one is found.recommended)
            lines.append(f"{format_size(one.need):>10}  reserved: {name} ({fits})")
    if found.base.need is None:
        lines.append(f"no prediction: {_short(str(found.base.reason))}")
    said = [word for word in settings if word.partition("=")[0] != "device"]
    lines.append(f"more: {shlex.join(['vramsweep', 'advise', *said])}")
    return advise.record(asked, found, None, []), lines


def _shares(sizes: Mapping[str, int], whole: int) -> str:
    """Return the largest sizes with their names; what is below one percent is left out."""
    shown = [f"{_short(name, 40)} {format_size(size)}" for name, size in sizes.items() if size * 100 >= whole]
    return ", ".join(shown[:5]) + ", ..." * (len(shown) > 5)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _least(size: int, what: str) -> str:
    return f"least memory: {format_size(size)} {what}, at least, as the run ended here; on: {_gpus(size)}"


def _gpus(size: int) -> str:
    names = [gpu.name for gpu in gpus_with_enough(size, 0.0, (0, 0))]
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3) or "none of the listed GPUs"


def _rank(one: OomReport) -> str:
    gpu = f"GPU {one.device}" if one.device is not None else ""
    return f"rank {one.rank}{f' ({gpu})' if gpu else ''}" if one.rank is not None else gpu


def _short(text: str, most: int = LONGEST) -> str:
    """Return a text from outside on one line, cut."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _is_pickle(path: Path) -> bool:
    try:
        with bounded_reads.open_regular(path) as file:
            return file.read(1) == b"\x80"
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _logs_of(folder: Path) -> list[Path]:
    """Return the files of a folder with a log's name, at most four levels down, in the order of their names."""
    levels = ("*", "*/*", "*/*/*", "*/*/*/*")
    found = [
        one for level in levels for one in folder.glob(level) if one.suffix in (".log", ".txt", ".out", ".err", ".json")
    ]
    logs = sorted(one for one in found if one.is_file())
    if not logs:
        raise UserError(f"{folder} has neither a journal nor a log (*.log, *.txt, *.out, *.err, *.json)")
    return logs
