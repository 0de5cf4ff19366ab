"""Rows from elsewhere: bare or mapped CSV, optimum-benchmark reports, Hugging Face trainer states.

Foreign rows keep their origin in `foreign`, are never grouped with our own, and what a file does not say is null.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.load import Table, converted, from_frame, load
from vramsweep.analysis.data.metrics import GIB, METRICS, MIB
from vramsweep.harness import journal
from vramsweep.harness.errors import UserError
from vramsweep.harness.row import BY_NAME

# Names with another unit than the registry's: column and factor.
_UNITS: dict[str, tuple[str, float]] = {
    name.removesuffix("_bytes") + suffix: (name, factor)
    for name in BY_NAME
    if name.endswith("_bytes")
    for suffix, factor in (("_mib", MIB), ("_gib", GIB), ("_kib", 1024.0), ("_mb", 1e6), ("_gb", 1e9))
}
_CHECKPOINTING = {"True": "full", "False": "none"}
_BARE = ("seq_len", "peak_active_mib", "peak_reserved_mib", "iterations_per_s")


def open_rows(path: Path, columns: Sequence[str] | None = None, mapping: Path | None = None) -> tuple[Table, list[str]]:
    """A table from our own files or from a foreign one, and what was assumed.

    A CSV without header needs `columns`; four numbers a line are read as length, active MiB, reserved MiB,
    iterations/s, and that is said. Raises UserError.
    """
    if path.suffix == ".json" and path.is_file():
        return read_json(path)
    if path.is_dir() and not any(file.exists() for file in journal.files(path)):
        reports = sorted([*path.rglob("benchmark_report.json"), *path.rglob("trainer_state.json")])
        if reports:
            return _several(reports, path)
    if path.suffix != ".csv" or not path.is_file():
        return load(path), []
    with path.open(encoding="utf-8", errors="replace") as stream:
        first = [cell.strip() for cell in stream.readline().split(",")]
    if {"trial_id", "outcome"} <= set(first):
        return load(path), []
    return read_csv(path, columns, first, _mapping(mapping) if mapping else {})


def _several(reports: Sequence[Path], folder: Path) -> tuple[Table, list[str]]:
    """The rows of those reports that have any; a checkpoint's trainer_state.json, for one, has none."""
    frames, notes, refused = [], set(), []
    for report in reports:
        try:
            table, own = read_json(report)
        except UserError as error:
            refused.append(error)
            continue
        frames.append(table.frame)
        notes.update(own)
    if not frames:
        raise refused[0]
    if refused:
        notes.add(f"{len(refused)} of {len(reports)} files left out, such as: {refused[0]}")
    return from_frame(pd.concat(frames, ignore_index=True), str(folder)), sorted(notes)


def _mapping(path: Path) -> dict[str, Any]:
    """`{"our_column": "their column"}`; for a name also `{"from": name, "scale": 1048576}` or `{"value": 4}`.

    In a CSV without header, columns go by their position from 1: `{"our_column": 1}`.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the mapping {path}: {error}") from None
    known = {*BY_NAME, *_UNITS, "iterations_per_s"}
    if not isinstance(found, dict) or not set(found) <= known:
        unknown = ", ".join(sorted(set(found) - known)) if isinstance(found, dict) else "not an object"
        raise UserError(f"{path}: a mapping names our columns and theirs; not known: {unknown}")
    return found


def read_json(path: Path) -> tuple[Table, list[str]]:
    """optimum-benchmark's `benchmark_report.json` or Hugging Face's `trainer_state.json`. Raises UserError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if isinstance(found, dict) and "log_history" in found:
        return _trainer_state(found, path)
    if isinstance(found, dict) and ("train" in found or "report" in found):
        return _optimum(found, path)
    raise UserError(f"{path} is neither a benchmark_report.json with a train section nor a trainer_state.json")


def _optimum(found: dict[str, Any], path: Path) -> tuple[Table, list[str]]:
    """Its `train` section: memory in MB (10^6 bytes), seconds of single steps of every process, warm-up left out.

    Throughput is taken from the latencies, not from the report: dividing all steps' volume by the mean step is wrong
    by the number of steps. Memory is a sum over processes and devices, so with several of them it is unknown here.
    """
    report = found.get("report", found)
    config = found.get("config") or _sibling(path, "benchmark_config.json")
    scenario, backend, launcher, environment = (
        config.get(name) or {} for name in ("scenario", "backend", "launcher", "environment")
    )
    shapes = scenario.get("dataset_shapes") or scenario.get("input_shapes") or {}
    arguments = scenario.get("training_arguments") or {}
    train = report.get("train") or {}
    memory, latency = train.get("memory") or {}, train.get("latency") or {}
    times = [float(v) for v in latency.get("values") or []]
    ranks = int(launcher.get("nproc_per_node") or 1) * int(launcher.get("max_nodes") or 1)
    devices = max(ranks, len(str(backend.get("device_ids") or 0).split(",")))
    batch = arguments.get("per_device_train_batch_size") or shapes.get("batch_size")
    length = shapes.get("sequence_length")
    accum = arguments.get("gradient_accumulation_steps")
    cpu = backend.get("device") == "cpu"
    reserved = memory.get("max_ram" if cpu else "max_reserved")
    row: dict[str, Any] = {
        "model": backend.get("model"),
        "runner": "trainer",
        "device": backend.get("device") if backend.get("device") in ("cuda", "cpu") else None,
        "precision": _precision(backend.get("torch_dtype") or backend.get("dtype"), arguments),
        "seq_len": length,
        "micro_batch": batch,
        "grad_accum": accum,
        "world_size": ranks,
        "checkpointing": _CHECKPOINTING.get(str(arguments.get("gradient_checkpointing"))),
        "attention": backend.get("attn_implementation"),
        "seed": backend.get("seed"),
        "memory_source": "cpu_tensors_and_rss" if cpu else "cuda_allocator",
        "warmup_steps": scenario.get("warmup_steps"),
        "step_times_s": times or None,
        "step_median_s": float(np.median(times)) if times else None,
        "measured_steps": len(times) // ranks or None,
        "elapsed_s": sum(times) / ranks if times else None,
        "torch_version": backend.get("version"),
        **{name: environment.get(name) for name in ("transformers_version", "python_version")},
        "cpu_name": str(environment.get("cpu") or "").strip() or None,
        "gpu_name": next(iter(environment.get("gpu") or []), None),
    }
    notes = ["optimum-benchmark: its own throughput was not used; time between steps is not in its latencies"]
    if devices == 1:
        row["peak_allocated_bytes"] = _scaled(memory.get("max_allocated"), 1e6)
        row["peak_reserved_bytes"] = _scaled(reserved, 1e6)
        row["device_used_bytes"] = _scaled(memory.get("max_global_vram"), 1e6)
    else:
        notes.append(f"memory is summed over {devices} devices, so that of one is unknown")
    if times and length and batch:
        row["tokens_per_s"] = ranks * float(length) * float(batch) * float(accum or 1) * len(times) / sum(times)
    if not length:
        notes.append("no sequence length in the report or in benchmark_config.json beside it")
    return _foreign([row], path), notes


def _precision(dtype: Any, arguments: Mapping[str, Any]) -> str | None:
    """In our words; null for float16 weights without a scaler, which have no name here, and where nothing is said."""
    if dtype in (None, "float32"):
        mixed = "bf16" if arguments.get("bf16") else "fp16" if arguments.get("fp16") else None
        return mixed or ("fp32" if dtype else None)
    return "bf16_pure" if dtype == "bfloat16" else None


def _sibling(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((path.parent / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _trainer_state(found: dict[str, Any], path: Path) -> tuple[Table, list[str]]:
    """The training summary, last in `log_history`: memory where `skip_memory_metrics=False` put it, and speed.

    The peak is what the Trainer saw: allocated before, plus its increases, plus the peak above that; on a CPU the same
    of the process's resident set. Speed is over the whole run, first steps and saving of checkpoints included.
    """
    summary: dict[str, Any] = next((e for e in reversed(found["log_history"]) if "train_samples_per_second" in e), {})
    kind = "gpu" if "train_mem_gpu_alloc_delta" in summary else "cpu"
    names = ("before_init_mem_", "init_mem_{}_alloc_delta", "train_mem_{}_alloc_delta", "train_mem_{}_peaked_delta")
    parts = [summary.get(name.format(kind) if "{}" in name else name + kind) for name in names]
    if parts[2] is None or parts[3] is None:
        raise UserError(
            f"{path} holds no memory: train with skip_memory_metrics=False and call trainer.save_state() at the end"
        )
    seconds, samples = summary.get("train_runtime"), None
    if seconds:
        samples = round(seconds * summary["train_samples_per_second"])
    tokens = summary.get("num_input_tokens_seen") or None
    peak = sum(int(part or 0) for part in parts)
    row = {
        "runner": "trainer",
        "micro_batch": found.get("train_batch_size"),
        "seq_len": tokens // samples if tokens and samples and tokens % samples == 0 else None,
        "device": "cuda" if kind == "gpu" else "cpu",
        "memory_source": "cuda_allocator" if kind == "gpu" else "cpu_tensors_and_rss",
        "peak_allocated_bytes": peak if kind == "gpu" else None,
        "peak_reserved_bytes": peak if kind == "cpu" else None,
        "measured_steps": found.get("global_step"),
        "elapsed_s": seconds,
        "samples_per_s": summary["train_samples_per_second"],
        "tokens_per_s": tokens / seconds if tokens and seconds else None,
    }
    length = "tokens seen over samples" if row["seq_len"] else "unknown (include_num_input_tokens_seen=True tells it)"
    return _foreign([row], path), [f"trainer_state.json: speed is over the whole run; the sequence length is {length}"]


def _scaled(value: Any, factor: float) -> int | None:
    return None if value is None else round(float(value) * factor)


def _foreign(rows: list[dict[str, Any]], path: Path) -> Table:
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    for number, row in enumerate(rows, 1):
        row |= {"foreign": f"{path.parent.name}/{path.name}", "outcome": "ok", "trial_id": f"{digest}-{number}"}
    return from_frame(pd.DataFrame(rows), str(path))


def read_csv(
    path: Path, columns: Sequence[str] | None, first: Sequence[str], mapping: Mapping[str, Any]
) -> tuple[Table, list[str]]:
    """A foreign CSV, with or without header, as a table."""
    notes = []
    header = not any(_number(cell) for cell in first)
    if mapping and columns is None and not header:
        columns = [str(position) for position in range(1, len(first) + 1)]  # what a mapping then refers to
    if columns is None and not header:
        if len(first) != len(_BARE):
            raise UserError(
                f"{path} has no header; name its {len(first)} columns with --columns seq_len,peak_allocated_mib,..."
            )
        columns = _BARE
        notes.append(
            f"{path.name} has no header; its columns were read as {', '.join(_BARE)} (name others with --columns)"
        )
    names = list(columns or first)
    if len(names) != len(first):
        raise UserError(f"{path} has {len(first)} columns, --columns names {len(names)}: {', '.join(names)}")
    frame = pd.read_csv(path, header=0 if header else None, names=names, dtype="string", skipinitialspace=True)
    return from_columns(_mapped(frame, mapping, path, notes) if mapping else frame, str(path), notes), notes


def _mapped(frame: pd.DataFrame, mapping: Mapping[str, Any], path: Path, notes: list[str]) -> pd.DataFrame:
    columns: dict[str, Any] = {}
    for ours, theirs in mapping.items():
        rule = theirs if isinstance(theirs, dict) else {"from": theirs}
        if "value" in rule:
            columns[ours] = pd.Series([rule["value"]] * len(frame))
            continue
        if str(rule.get("from")) not in frame:
            raise UserError(f"{path} has no column {rule.get('from')!r}; it has {', '.join(map(str, frame.columns))}")
        column = frame[str(rule["from"])]
        if "scale" in rule:
            column = converted(column, float, str(rule["from"]), notes) * float(rule["scale"])
        columns[ours] = column
    return pd.DataFrame(columns)


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def from_columns(frame: pd.DataFrame, origin: str, notes: list[str]) -> Table:
    """A table of foreign rows from columns with our names, or our names with another unit (`_mib`, `_gib`, ...).

    Without an outcome column, a row with any measured value is ok. Raises UserError if no column is known.
    """
    known: dict[str, Any] = {}
    unknown = []
    for name in map(str, frame.columns):
        if name in BY_NAME:
            known[name] = frame[name]
        elif name in _UNITS:
            column, factor = _UNITS[name]
            known[column] = (converted(frame[name], float, name, notes) * factor).round()
        elif name == "iterations_per_s":
            known["step_median_s"] = 1.0 / converted(frame[name], float, name, notes).replace(0, np.nan)
        else:
            unknown.append(name)
    if "seq_len" not in known:
        raise UserError(
            f"{origin}: no column seq_len among {', '.join(map(str, frame.columns))}; name the columns with --columns "
            "(our column names, memory also as ..._mib or ..._gib)"
        )
    if unknown:
        notes.append(f"columns left out because their names are not known: {', '.join(unknown)}")
    rows = pd.DataFrame(known)
    if "tokens_per_s" not in rows and "step_median_s" in rows:
        batch = pd.to_numeric(rows["micro_batch"], errors="coerce") if "micro_batch" in rows else 1
        rows["tokens_per_s"] = pd.to_numeric(rows["seq_len"], errors="coerce") * batch / rows["step_median_s"]
    measured = [name for name in (*METRICS, "tokens_per_s") if name in rows]
    if "outcome" not in rows:
        any_value = pd.concat([pd.to_numeric(rows[n], errors="coerce") for n in measured], axis=1).notna().any(axis=1)
        rows["outcome"] = np.where(any_value, "ok", "bad_result")
    digest = hashlib.sha256(origin.encode()).hexdigest()[:8]
    rows["trial_id"] = [f"{digest}-{line}" for line in range(1, len(rows) + 1)]
    rows["foreign"] = rows["foreign"] if "foreign" in rows else Path(origin).name
    return from_frame(rows, origin, None)
