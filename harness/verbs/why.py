"""`vramsweep why`: the cause of an out-of-memory error, and what would have fitted, in at most 20 lines.

allocator/oom_state.py reads snapshots, rows/oom_text.py reads logs; advise.py predicts changes if the settings are
known.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vramsweep.harness.allocator import oom_state, safe_unpickle
from vramsweep.harness.allocator.oom_state import FORWARD, OPTIMIZER, STATES, UNKNOWN, OomState
from vramsweep.harness.allocator.recording import SIMULATED
from vramsweep.harness.files import bounded_reads
from vramsweep.harness.hardware.gpu_lookup import find_gpu, gpus_with_enough
from vramsweep.harness.messages.console import Activity, Console
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.questions import trace_query
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.oom_text import KINDS, OomReport, first_report, read_log
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import fit_text
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.verbs import advise
from vramsweep.harness.verbs.cli import read_parser

MOST, PREDICTED, LONGEST, RANKS, LINES = 20, 8, 110, 5, 5  # lines; of predictions; characters of a text; ranks; lines
MOST_FILES, COMBINATIONS = 256, 8  # logs to read; combinations of changes to predict
DROPPED = ("device", "protocol", "repeats=")  # of a row's settings: what no prediction depends on
UNNAMED = ["model=NAME", "seq_len=N", "micro_batch=N", "gpu=NAME"]
NAMED = ("model", "runner", "seq_len", "micro_batch", "precision", "sharding", "world_size")
LOGS = (".log", ".txt", ".out", ".err", ".json")
# By kind of memory, with the texts of oom_state.py as keys
CHANGES: dict[str, str] = json.loads(Path(__file__).with_name("memory_changes.json").read_text("utf-8"))
CHANGES |= {OPTIMIZER: CHANGES[STATES], UNKNOWN: f"{CHANGES[FORWARD]}; {CHANGES[STATES]}"}
MUCH = 3 << 30  # bytes outside the allocator, more than a context and NCCL take
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
ALLOCATED = "least memory: {} allocated, at least, as the run ended here"
RESERVED = "least memory: {} reserved with these settings, at least, as the run ended here"
Found = tuple[dict[str, Any], list[str]]  # what is known as data (sizes in bytes), and as lines, the changes last


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep why`; return the exit status, 1 if there is no out-of-memory error. Raises UserError."""
    options, rest = read_parser("why").parse_known_args(argv)
    words = [*options.words, *rest]
    files = [word for word in words if "=" not in word or Path(word).exists()]
    settings = [word for word in words if word not in files]
    if not files:
        raise UserError(
            "why needs a file or a sweep's folder: vramsweep why FILE ... | vramsweep why results/SWEEP [TRIAL_ID]"
        )
    place = Path(files[0])
    try:
        if place.is_dir() and journal.files(place)[0].exists():
            record, lines = explain_row(place, files[1:])
        elif not place.is_dir() and _is_pickle(place):
            if len(files) > 1:
                raise UserError(f"why takes one snapshot, not {len(files)}; give each its own command")
            record, lines = explain_snapshot(place, options.device)
        else:
            record, lines = explain_logs([Path(one) for one in files], options.device)
    except OSError as error:
        raise UserError(f"{error.filename or place} cannot be read: {bounded_reads.error_reason(error)}") from None
    record["answer"] = [*lines]
    settings = settings or record.get("settings", []) * record.get("ours", False)
    if not record["found"]:
        settings = []
    elif lines[-1].endswith(CHANGES["RAM"]):
        settings, lines = [], [*lines, "predictions are of GPU memory, so there are none of this error"]
    elif settings:  # evidence first, because predictions take minutes; they replace what is to change
        lines, most = lines[:-1], MOST - PREDICTED
        last = lines[-4:] if record["kind"] == "snapshot" and len(lines) > most else []  # the cause comes last there
        lines = [*lines[: most - len(last)], *last]
    else:
        lines.append(f"predictions of each change: {_advise(record.get('settings') or UNNAMED)}")
    console = Console()
    for line in () if options.json else lines[:MOST]:
        console.print(line, soft_wrap=True)
    if settings:
        record["predicted"], lines = predict_changes(settings)
        for line in () if options.json else lines[:PREDICTED]:
            console.print(line, soft_wrap=True)
    if options.json:
        print(json.dumps(record))
    return 0 if record["found"] else 1


def explain_snapshot(path: Path, device: int | None) -> Found:
    """Return what is known of a snapshot's failed request, else of its peak. Raises UserError."""
    with Activity("reading the snapshot") as activity:
        snapshot = safe_unpickle.load(path)
        state = oom_state.find_state(snapshot, path.name, device, activity.update)
    simulated = "vramsweep" in snapshot  # snapshot.py marks what it writes
    record = {"kind": "snapshot", "file": path.name, "found": state.request is not None, "simulated": simulated}
    first, *lines = _of_state(state, path.name)
    return record | asdict(state), [first, *[SIMULATED] * simulated, *lines]


def _of_state(state: OomState, name: str) -> Iterator[str]:
    device, unused = f"device {state.device} ({state.why})", state.reserved - state.allocated
    others = f"; other devices: {', '.join(state.others)}" if state.others else ""
    if state.request is None:
        yield f"{_short(name)}: no request failed in it. This is the {state.at} of {device}{others}"
    else:
        yield f"{_short(name)}: {device} ran out of memory{others}"
        about = [f"for {state.category}" * (state.category != UNKNOWN), _short(state.where or "")]
        about += [f"within {_short(state.annotation)}" if state.annotation else ""]
        yield f"failed request: {', '.join(filter(None, [format_size(state.request), *about]))}"
    block = "" if state.largest_free is None else f"; largest free block for it: {format_size(state.largest_free)}"
    yield from _table({
        f"allocated: {_shares(state.categories, state.allocated)}": state.allocated,
        f"reserved but unused{block}": unused,
        "free on the GPU; a snapshot does not name other processes": state.device_free,
    })  # fmt: skip
    yield "by line of code:"
    yield from _table({_short(line): size for line, size in list(state.lines.items())[:LINES]})
    for what, sizes in (("module", state.modules), ("annotation", state.annotations)):
        if sizes.keys() - {UNKNOWN, "none"}:
            yield f"by {what}: {_shares(sizes, state.allocated)}"
    if state.request is None or state.needed is None or state.device_free is None or (served := state.served) is None:
        return
    cause, change = judge(state.request, unused, state.device_free, state.own_limit)
    yield cause
    works = [text for text, fits in served.items() if fits and text and not served[""]]
    limit = "its own limit" if state.own_limit else format_size(state.reserved + state.device_free)
    if served[""]:
        yield "other settings: unknown, because a replay under the recorded settings does not fail either"
    else:
        yield f"other settings, replayed within {limit}: {'; '.join(works[:3]) or 'none'} of {len(served) - 1} fit"
    yield _least(RESERVED, state.needed)
    levers = [f"PYTORCH_CUDA_ALLOC_CONF={text}" for text in works[:1]] + [change] * (change != EXPANDABLE)
    yield f"to change: {'; '.join(filter(None, [*levers, _change(next(iter(state.categories), UNKNOWN))]))}"


def explain_logs(paths: Sequence[Path], device: int | None) -> Found:
    """Return what logs say of their first out-of-memory error, else what they seem to be. Raises UserError, OSError."""
    files = [one for path in paths for one in (_logs_of(path) if path.is_dir() else [path])]
    with Activity("reading the log"):
        logs = [read_log(path, path.name if len(files) == 1 else str(path)) for path in files[:MOST_FILES]]
    reports = [one for log in logs for one in log.reports if device in (None, one.device)]
    record: dict[str, Any] = {"kind": "log", "found": bool(reports), "reports": [asdict(one) for one in reports]}
    record["files"] = [str(path) for path in files[:MOST_FILES]]
    if not reports:
        text = f"{files[0].name if len(files) == 1 else f'{len(files)} files'}: no out-of-memory error"
        kind = "binary data" if any("\0" in log.last for log in logs) else "text"
        seems = [f"it is {kind} with {sum(log.lines for log in logs):,} lines"]
        seems += [f"it reports {log.fault}" for log in logs if log.fault][:1]
        seems += [f"its last line: {_short(log.last)}" for log in logs if log.last and "\0" not in log.last][:1]
        return record, [f"{text}{'' if device is None else f' of device {device}'}; {'; '.join(seems)}"]
    gpu = [one for one in reports if one.kind == "gpu"] or reports
    first, known = first_report(gpu)
    count = len(reports) + sum(log.more for log in logs)
    several = f"; the first of {count} errors {known}" if count > 1 else ""
    rest = [one for one in gpu if one is not first]
    return record | {"first": asdict(first), "first_is_known": known}, list(_of_report(first, several, rest))


def _of_report(one: OomReport, several: str, rest: Sequence[OomReport]) -> Iterator[str]:
    sizes, kind = one.sizes, one.category if one.kind == "gpu" else "RAM"
    yield f"{_short(one.file)}:{one.line}: {_rank(one) or 'the run'} {KINDS[one.kind]}{several}"
    if "request" in sizes:
        yield f"failed request: {format_size(sizes['request'])}{f' for {one.category}' * (one.category != UNKNOWN)}"
    else:
        yield f"its text: {_short(one.text)}"
    if one.own:
        yield f"your code: {_short(one.own)}{f': {_short(one.code)}' if one.code else ''}"
    if one.model:
        yield f"library: {_short(one.model)}"
    yield from _table(accounts(one))
    levers, own = [], False
    if one.kind == "gpu" and {"request", "unused", "free"} <= sizes.keys():
        request, free, limit = sizes["request"], sizes["free"], sizes.get("limit")
        own = free >= request or (limit is not None and sizes.get("reserved", 0) + request > limit)
        rounded = sum(sizes.get(name, 0) > 1 << 30 for name in ("request", "allocated", "reserved", "free"))
        cause, change = judge(request, sizes["unused"], free, own, rounded * (1 << 30) // 200)  # 0.005 GiB each
        yield cause
        levers += [change] * bool(change and (not own or limit))  # torch's message names a fraction that is set
    if (outside := sizes.get("outside", 0)) > MUCH and not own:
        levers += [f"find who has {format_size(outside)} outside PyTorch's allocator (nvidia-smi)"]
    if one.kind == "gpu" and {"request", "allocated"} <= sizes.keys() and not {"HIP", "XPU"} & {*one.text.split()}:
        yield _least(ALLOCATED, sizes["allocated"] + sizes["request"])
    texts = {"request": " asked for {}", "allocated": ", {} allocated"}
    for other in rest[:RANKS]:
        said = [text.format(format_size(other.sizes[name])) for name, text in texts.items() if name in other.sizes]
        place = f"{_short(other.file)}:{other.line}" if other.file != one.file or not _rank(other) else ""
        yield f"also {', '.join(filter(None, [place, _rank(other)]))}:{''.join(said)}"
    if len(rest) > RANKS:
        yield f"and {len(rest) - RANKS} more errors"
    yield f"to change: {'; '.join([*levers, CHANGES[kind]])}"


def accounts(one: OomReport) -> dict[str, int | None]:
    """Return sizes in bytes of a GPU's memory by what each is; together they are the GPU, as far as the text tells."""
    sizes = one.sizes
    reserved, process, outside = sizes.get("reserved"), sizes.get("process"), sizes.get("outside")
    private = f", of it {format_size(sizes['private'])} in private pools (CUDA graphs)" if "private" in sizes else ""
    table: dict[str, int | None] = {f"allocated by PyTorch{private}": sizes.get("allocated")}
    table["reserved by PyTorch but unused"] = sizes.get("unused")
    if process and reserved is not None and process >= reserved:
        table["of this process outside PyTorch's allocator (CUDA context, NCCL)"] = process - reserved
    listed = {pid: size for pid, size in one.others.items() if process or reserved is None or size < reserved}
    if listed:
        table[f"of other processes: {', '.join(list(listed)[:4])}"] = sum(listed.values())
    elif outside is not None and outside < 0:
        table["more than the GPU has: its driver takes host memory too (Windows, WSL)"] = -outside
    elif not process:
        table["outside PyTorch's allocator: CUDA context, and other processes if there are any"] = outside
    total = f", of {format_size(sizes['total'])} in all" if "total" in sizes else ""
    table[f"free{total}"] = sizes.get("free")
    return table | {"limit of this process (memory fraction)": sizes.get("limit")}


def judge(request: int, unused: int, free: int, own_limit: bool, rounded: int = 0) -> tuple[str, str]:
    """Return a sentence on fragmentation, and what helps ("" if unknown). The sizes may be off by `rounded` bytes."""
    both = f"unused and free memory are {format_size(unused + free)} together"
    if own_limit:
        cause = f"{format_size(free)} of the GPU are free, so a limit of the process refused, or the driver"
        return f"fragmentation: unknown; {cause}", "a higher memory fraction (set_per_process_memory_fraction)"
    if abs(unused + free - request) < rounded:
        return f"fragmentation may be the cause: {both}, about the request; the message rounds its sizes", EXPANDABLE
    if unused + free >= request:
        return f"fragmentation alone is the cause: {both}, enough for the request, but not in one piece", EXPANDABLE
    return f"fragmentation is not the cause: {both}, less than the request", ""


def explain_row(place: Path, ids: Sequence[str]) -> Found:
    """Return what is known of a sweep's row of `ids`, else of its first out of memory. Raises UserError."""
    rows = list(journal.terminal(journal.read(place)[0]).values())
    full = [row for row in rows if row["outcome"] in ("oom", "host_oom")]
    if len(ids) > 1:
        raise UserError(f"why takes one trial, not {len(ids)}")
    row = trace_query.finished(place, ids)[0] if ids else next(iter(full), None)
    record: dict[str, Any] = {"kind": "row", "row": row, "found": row in full}
    if row is None or row not in full:
        what = f"it is {row['outcome']}" if row else f"{len(rows)} trials have finished"
        return record, [f"{place}: no out-of-memory error; {what}"]
    record["settings"], record["ours"] = settings_of_row(row)
    where = "host" if row["outcome"] == "host_oom" else "GPU"
    how = "predicted" if row["device"] == "simulated" else "measured"
    lines = [
        f"{place}: trial {row['trial_id']} ran out of {where} memory, {how}; {len(full)} of {len(rows)} trials did",
        f"cause: {_short(str(row['reason']))} (in {_short(row['phase'] or 'an unknown phase')})",
    ]
    request, allocated, reserved = (row[f"oom_{name}_bytes"] for name in ("request", "allocated", "reserved"))
    sizes = sorted((row["oom_parts_bytes"] or {}).items(), key=lambda one: -one[1])
    parts = {name.replace("_", " "): size for name, size in sizes}
    shares = f": {_shares(parts, sum(parts.values()))} (with the failed request)" if parts else ""
    lines += _table({
        "failed request": request,
        f"allocated{shares}": allocated,
        "reserved but unused": reserved - allocated if reserved and allocated else None,
        "limit of the allocator on this GPU": row["memory_limit_bytes"],
    })  # fmt: skip
    if need := row["unlimited_peak_reserved_bytes"]:
        lines.append(_least("predicted without a limit: {} reserved", need))
    elif request and allocated:
        lines.append(_least(ALLOCATED, request + allocated))
    return record, [*lines, f"to change: {CHANGES['RAM'] if where == 'host' else _change(next(iter(parts), UNKNOWN))}"]


def settings_of_row(row: Row) -> tuple[list[str], bool]:
    """Return the settings of a row's trial as typed, and whether a prediction would run and read only what is ours.

    A folder may be someone else's (trace_query.py). A row without a trial gives what its columns name.
    """
    from vramsweep.harness.config import conf_files, reproduce_command

    card = find_gpu(str(row["gpu_name"]))
    try:
        trial = Trial.model_validate(row["trial"])
        typed = shlex.split(reproduce_command.command(row["trial"], row["trial_id"]), comments=True)[4:]
    except (ValidationError, UserError):
        return [f"{name}={row[name]}" for name in NAMED if row[name] is not None], False
    gpu = trial.device.gpu if row["device"] == "simulated" else card and card.name
    words = [word for word in typed if not word.lstrip("+~").startswith(DROPPED)]
    ours = trial.model.name in conf_files.file_names("model") and not trace_query.name_outside(trial)
    return words + [f"device.gpu={gpu}"] * bool(gpu), ours and bool(gpu)


def predict_changes(settings: Sequence[str]) -> Found:
    """Return what `advise` predicts for these settings. Raises UserError."""
    if (answer := advise.ask(settings, most=COMBINATIONS, quiet=True)) is None:
        return {}, []
    asked, found, _ = answer
    lines = [f"predicted for {fit_text.describe_run(asked.trial)}, limit {format_size(found.limit)}:"]
    best = found.recommended or found.nearest
    smallest = sorted((one for one in found.singles if one.need is not None), key=lambda one: one.need or 0)[:3]
    for one in dict.fromkeys([found.base, *smallest, *([best] if best else [])]):
        name = " ".join(remedy.words for remedy in one.remedies) or "unchanged"
        fits = ("fits" if one.fits(found.limit) else "too much") + ", recommended" * (one is found.recommended)
        lines += _table({f"reserved: {name} ({fits})": one.need})
    if found.base.need is not None and found.base.fits(found.limit):
        lines.append("but it ran out: are these the settings of that run, and did others use its GPU?")
    if found.base.need is None:
        lines.append(f"no prediction: {_short(str(found.base.reason))}")
    said = [word for word in settings if word.partition("=")[0] != "device"]
    return advise.record(asked, found, []), [*lines, f"more: {_advise(said)}"]


def _change(kind: str) -> str:  # by our name of a kind, or by a prediction's
    return next((text for name, text in CHANGES.items() if kind[:6] in name), CHANGES[UNKNOWN])


def _advise(words: Sequence[str]) -> str:
    return shlex.join(["vramsweep", "advise", *words]).replace(" device.gpu=", " gpu=")


def _table(sizes: Mapping[str, int | None]) -> list[str]:
    """Return a line for each size that is known."""
    return [f"{format_size(size):>10}  {name}" for name, size in sizes.items() if size is not None]


def _shares(sizes: Mapping[str, int], whole: int) -> str:
    """Return the largest sizes with their names; what is below one percent is left out."""
    shown = [f"{_short(name, 40)} {format_size(size)}" for name, size in sizes.items() if size * 100 >= whole]
    return ", ".join(shown[:5]) + ", ..." * (len(shown) > 5)


def _least(text: str, size: int) -> str:
    names = [gpu.name for gpu in gpus_with_enough(size, 0.0, (0, 0))]
    gpus = ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3) or "none of the listed GPUs"
    return f"{text.format(format_size(size))}; on: {gpus}"


def _rank(one: OomReport) -> str:
    gpu = "" if one.device is None else f"GPU {one.device}"
    return gpu if one.rank is None else f"rank {one.rank}{f' ({gpu})' if gpu else ''}"


def _short(text: str, most: int = LONGEST) -> str:
    """Return a text from outside on one line, cut."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _is_pickle(path: Path) -> bool:
    with bounded_reads.open_regular(path) as file:
        return file.read(1) == b"\x80"


def _logs_of(folder: Path) -> list[Path]:
    """Return the files of a folder and its folders with a log's name, in the order of their names."""
    logs = sorted(one for one in folder.rglob("*") if one.suffix in LOGS and one.is_file())
    if not logs:
        raise UserError(f"{folder} has neither a journal nor a log (*{', *'.join(LOGS)})")
    return logs
