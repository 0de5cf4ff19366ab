"""Rows from elsewhere: bare or mapped CSV, optimum-benchmark reports, Hugging Face trainer states.

Every file becomes cells with a declared mapping (mapping.py), and these rows (foreign.py). Foreign rows keep their
origin in `foreign`, are never grouped with our own, and what a file does not say is null.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.foreign import OUT_OF_MEMORY, to_table
from vramsweep.analysis.data.load import Table, from_frame, load
from vramsweep.analysis.data.mapping import FileMapping, by_name, by_position, from_file, from_settings
from vramsweep.harness import journal
from vramsweep.harness.errors import UserError
from vramsweep.harness.files import LIMIT, content

_CHECKPOINTING = {"True": "full", "False": "none"}
_BARE = "seq_len, peak_active_mib, peak_reserved_mib, iterations_per_s"
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}

Lines = list[tuple[int, list[str]]]  # the cells of each line, with its number in the file


def open_rows(
    path: Path, columns: str | None = None, mapping: Path | None = None, settings: Sequence[str] = ()
) -> tuple[Table, list[str]]:
    """A table from our own files or from a foreign one, and what was assumed.

    A CSV without header needs `columns`, names by position, or a `mapping` file; four numbers a line are read as
    length, active MiB, reserved MiB, iterations/s, and that is said. `settings` are constants, `seq_len=2048`.
    Raises UserError.
    """
    if columns and mapping:
        raise UserError("--columns and --mapping both name the columns; give one of them, and constants with --set")
    constants = from_settings(settings)
    if path.suffix == ".json" and path.is_file():
        return read_json(path, constants)
    if path.is_dir() and not any(file.exists() for file in journal.files(path)):
        reports = sorted([*path.rglob("benchmark_report.json"), *path.rglob("trainer_state.json")])
        if reports:
            return _several(reports, path, constants)
    if path.suffix != ".csv" or not path.is_file() or _is_ours(path):
        given = columns or mapping or settings
        note = f"{path} is not a foreign CSV: --columns, --mapping and --set change nothing in it"
        return load(path), [note] if given else []
    return read_csv(path, columns, mapping, constants)


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        return {"trial_id", "outcome"} <= {cell.strip().strip('"') for cell in stream.readline(LIMIT).split(",")}


def _several(reports: Sequence[Path], folder: Path, constants: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """The rows of those reports that have any; a checkpoint's trainer_state.json, for one, has none."""
    frames, notes, refused = [], set(), []
    for report in reports:
        try:
            table, own = read_json(report, constants)
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


def read_json(path: Path, constants: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """optimum-benchmark's `benchmark_report.json` or Hugging Face's `trainer_state.json`, and what was assumed.

    `constants` are values of our columns that the report does not know. Raises UserError.
    """
    try:
        found = json.loads(content(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {error!s:.200}") from None
    if not isinstance(found, dict):
        found = {}
    if "log_history" in found:
        read = _trainer_state
    elif "train" in found or "report" in found:
        read = _optimum
    else:
        raise UserError(f"{path} is neither a benchmark_report.json with a train section nor a trainer_state.json")
    try:
        fields, notes = read(found, path)
        fields = {name: value for name, value in fields.items() if value is not None}
        mapping = by_name(list(fields))[0].with_constants(constants)
        cells = pd.DataFrame({name: pd.Series([value], dtype=object) for name, value in fields.items()})
        return to_table(cells, mapping, str(path), f"{path.parent.name}/{path.name}", notes), notes
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not in the shape that is known of it ({type(error).__name__}: {str(error)[:100]}); see "
            "docs/analysis.md, Foreign rows, for what is read, or give the values as a CSV"
        ) from None


def _optimum(found: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
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
    ranks = int(launcher.get("nproc_per_node") or 1) * int(launcher.get("max_nodes") or 1)
    devices = max(ranks, len(str(backend.get("device_ids") or 0).split(",")))
    length = shapes.get("sequence_length")
    cpu = backend.get("device") == "cpu"
    row: dict[str, Any] = {
        "outcome": "ok",
        "model": backend.get("model"),
        "runner": "trainer",
        "device": backend.get("device") if backend.get("device") in ("cuda", "cpu") else None,
        "precision": _precision(backend.get("torch_dtype") or backend.get("dtype"), arguments),
        "seq_len": length,
        "micro_batch": arguments.get("per_device_train_batch_size") or shapes.get("batch_size"),
        "grad_accum": arguments.get("gradient_accumulation_steps"),
        "world_size": ranks,
        "checkpointing": _CHECKPOINTING.get(str(arguments.get("gradient_checkpointing"))),
        "attention": backend.get("attn_implementation"),
        "seed": backend.get("seed"),
        "memory_source": "cpu_tensors_and_rss" if cpu else "cuda_allocator",
        "warmup_steps": scenario.get("warmup_steps"),
        **_steps([float(v) for v in latency.get("values") or []], ranks),
        "torch_version": backend.get("version"),
        **{name: environment.get(name) for name in ("transformers_version", "python_version")},
        "cpu_name": str(environment.get("cpu") or "").strip() or None,
        "gpu_name": next(iter(environment.get("gpu") or []), None),
    }
    notes = ["optimum-benchmark: its own throughput was not used; time between steps is not in its latencies"]
    if devices == 1:
        row["peak_allocated_mb"] = memory.get("max_allocated")
        row["peak_reserved_mb"] = memory.get("max_ram" if cpu else "max_reserved")
        row["device_used_mb"] = memory.get("max_global_vram")
    else:
        notes.append(f"memory is summed over {devices} devices, so that of one is unknown")
    if not length:
        notes.append("no sequence length in the report or in benchmark_config.json beside it")
    return row, notes


def _steps(times: list[float], ranks: int) -> dict[str, Any]:
    """What the seconds of every process's steps say of the run."""
    if not times:
        return {}
    steps, elapsed = len(times) // ranks or None, sum(times) / ranks
    return {
        "step_times_s": times, "step_median_s": float(np.median(times)), "measured_steps": steps, "elapsed_s": elapsed
    }  # fmt: skip


def _precision(dtype: Any, arguments: Mapping[str, Any]) -> str | None:
    """In our words; null for float16 weights without a scaler, which have no name here, and where nothing is said."""
    if dtype in (None, "float32"):
        mixed = "bf16" if arguments.get("bf16") else "fp16" if arguments.get("fp16") else None
        return mixed or ("fp32" if dtype else None)
    return "bf16_pure" if dtype == "bfloat16" else None


def _sibling(path: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(content(path.parent / name))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _trainer_state(found: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
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
        "outcome": "ok",
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
    return row, [f"trainer_state.json: speed is over the whole run; the sequence length is {length}"]


def read_csv(
    path: Path, columns: str | None, mapping_file: Path | None, constants: Mapping[str, Any]
) -> tuple[Table, list[str]]:
    """A foreign CSV, with or without header, as a table, and what was assumed. Raises UserError."""
    notes: list[str] = []
    lines = _lines(path, notes)
    first = lines[0][1]
    header = not any(_number(cell) for cell in first)
    if header:
        del lines[0]
    if not lines:
        raise UserError(f"{path} has a header ({', '.join(first)[:60]}) and no line below it")
    width = len(first) if header else _width(lines)
    mapping = _declared(path, columns, mapping_file, first if header else None, width, notes).with_constants(constants)
    if mapping.width and not header and width < mapping.width and all(_ran_out(cells) for _, cells in lines):
        width = mapping.width  # a file of nothing else
    if mapping.width and mapping.width != width:
        raise UserError(f"{path} has {width} columns, --columns names {mapping.width}: {columns or _BARE}")
    if "seq_len" not in mapping.columns:
        named = ", ".join(sorted(mapping.columns) if columns or mapping_file else first)
        raise UserError(
            f"{path}: no column seq_len among {named[:200]}; name the columns with --columns (our column names, memory "
            "also as ..._mib or ..._gib), or give the length of all lines with --set seq_len=2048"
        )
    names = first if header else [str(position) for position in range(1, width + 1)]
    cells = pd.DataFrame(_padded(lines, width, path, notes), dtype="string")
    cells.columns = pd.Index(names)
    return to_table(cells, mapping, str(path), path.name, notes), notes


def _declared(
    path: Path, columns: str | None, mapping_file: Path | None, header: list[str] | None, width: int, notes: list[str]
) -> FileMapping:
    """The mapping that was given, or that of a header with our names, or of four numbers a line."""
    if mapping_file:
        return from_file(mapping_file)
    if columns:
        if header:
            notes.append(f"{path.name}: its header ({', '.join(header)[:200]}) gave way to --columns")
        return by_position(columns)
    if header:
        mapping, unknown = by_name(header)
        if unknown:
            notes.append(f"columns left out because their names are not known: {', '.join(unknown)}")
        return mapping
    bare = by_position(_BARE)
    if width != bare.width:
        raise UserError(
            f"{path} has no header; name its {width} columns with --columns seq_len,peak_allocated_mib,... or "
            "--mapping FILE"
        )
    notes.append(f"{path.name} has no header; its columns were read as {_BARE} (name others with --columns)")
    return bare


def _lines(path: Path, notes: list[str]) -> Lines:
    """The cells of every line that has any; semicolons or tabs separate them where the first line has no comma."""
    try:
        text = content(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"{path} is not a text in UTF-8, so it cannot be read as CSV; save it as one")
    first = text.lstrip().partition("\n")[0]
    separator, named = next((each for each in _SEPARATORS.items() if each[0] in first), (",", ""))
    if separator != ",":
        notes.append(f"{path.name}: its cells were read as separated by {named}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise UserError(f"cannot read {path} as CSV: line {reader.line_num}: {error}") from None
    lines = [(number, cells) for number, cells in lines if any(cells)]
    if not lines:
        raise UserError(f"{path} is empty; name a CSV with a line per run")
    return lines


def _ran_out(cells: Sequence[str]) -> bool:
    return any(OUT_OF_MEMORY.search(cell) for cell in cells)


def _width(lines: Lines) -> int:
    """How many columns most lines have; a line that says that memory ran out may have any number."""
    counts = Counter(len(cells) for _, cells in lines)
    if len(counts) > 1:
        counts = Counter(len(cells) for _, cells in lines if not _ran_out(cells)) or counts
    return counts.most_common(1)[0][0]


def _padded(lines: Lines, width: int, path: Path, notes: list[str]) -> list[list[str | None]]:
    """Lines of equal width. A message with commas, of memory that ran out, is one cell."""
    padded: list[list[str | None]] = []
    short = 0
    for number, cells in lines:
        if len(cells) > width:
            at = next((i for i, cell in enumerate(cells[:width]) if OUT_OF_MEMORY.search(cell)), None)
            if at is not None:
                cells = [*cells[:at], ", ".join(cells[at:])]
            elif any(cells[width:]):
                raise UserError(
                    f"{path}, line {number}: {len(cells)} cells, but the file has {width} columns; put a text that "
                    "holds commas in double quotes"
                )
        elif len(cells) < width:
            short += not _ran_out(cells)
        padded.append([*cells[:width], *[None] * (width - len(cells))])
    if short:
        notes.append(f"{short} line{'s' * (short != 1)} with fewer than {width} cells; what lacks is unknown")
    return padded


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
