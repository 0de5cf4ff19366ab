"""Import of rows from elsewhere: bare or mapped CSV.

Column names of other people's scripts are translated into ours: `Sequence length`, `Allocated MiB`, `it/s`. Every file
becomes cells with a declared mapping (mapping.py), then rows (imported_rows.py). Imported rows keep their
origin in `foreign` and are never grouped with our own. What a file does not state is null.
"""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from vramsweep.analysis.data.imported_rows import OUT_OF_MEMORY, to_table
from vramsweep.analysis.data.load import Table, from_frame, load
from vramsweep.analysis.data.mapping import TARGETS, FileMapping, by_name, by_position, from_settings
from vramsweep.harness.files.bounded_reads import LIMIT, read_content
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import BY_NAME

_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("header_words.json").read_text("utf-8"))
_NAMES = {word: name for name, words in _WORDS.items() for word in words}
_UNITS = {"b": "bytes", "sec": "s", "secs": "s", "seconds": "s", "milliseconds": "ms", "m": "mib", "g": "gib"}
_UNIT = re.compile(r"^(.*?)[\s_([]+(bytes|[kmg]i?b|[bmg]|ms|us|s|secs?|seconds|milliseconds)[)\]]*$")
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[-+]?\d+)?")
# Unit of a column without one in its name, if its largest value is at least this: no GPU has 300 GiB.
_SIZES = {"peak": ((1 << 27, "bytes"), (300, "mib"), (0, "gib")), "step": ((50, "ms"), (0, "s"))}


def our_name(name: str, values: Sequence[str]) -> tuple[str, str]:
    """Return our name of an imported column, "" if unknown, and what was assumed, "" for nothing.

    `values` are its cells: they decide the unit if the name has none.
    """
    if name in TARGETS:
        column = BY_NAME[TARGETS[name].column]
        setting = column.group == "axes" and column.type is str  # a loss of 3.1 is no setting
        return (name if not setting or not all(map(_NUMBER.fullmatch, values)) else ""), ""
    lower = name.strip().lower()
    if (whole := _NAMES.get(_plain(lower))) in TARGETS:
        return str(whole), ""
    found = _UNIT.match(lower)
    base, unit = (_NAMES.get(_plain(found[1])), _UNITS.get(found[2], found[2])) if found else (whole, "")
    if base is None:
        return "", ""
    if not unit and (sizes := _SIZES.get(base[:4])) is not None:
        largest = max((float(value) for value in values if _NUMBER.fullmatch(value)), default=0.0)
        unit = next(unit for least, unit in sizes if largest >= least)
        shown = {"mib": "MiB", "gib": "GiB"}.get(unit, unit)
        assumed = f"{name} has no unit; its values, up to {largest:,.6g}, were read as {shown}" * (largest > 0)
    else:
        powers = f"{name} was read in powers of 10, because its unit is {unit.upper()}; if it is in powers of 1024"
        assumed = f"{powers}, use --columns ...,{base}_{unit[0]}ib" if unit in ("kb", "mb", "gb") else ""
    ours = f"{base}_{unit or 's'}"
    return (ours, assumed) if ours in TARGETS else ("", "")


def one_each(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return pairs of their name and ours that use each of our columns once. Of several candidates the one whose name
    says peak wins, else the first; the others get "" instead."""
    best: dict[str, str] = {}
    for theirs, ours in sorted(pairs, key=lambda pair: not re.search("max|peak", pair[0], re.IGNORECASE)):
        if ours:
            best.setdefault(TARGETS[ours].column, theirs)
    return [(theirs, ours if ours and best[TARGETS[ours].column] == theirs else "") for theirs, ours in pairs]


def _plain(name: str) -> str:
    """Return a lower-case name as words with a space between."""
    return " ".join(re.findall(r"[a-z0-9]+", name))


_BARE = "seq_len, peak_active_mib, peak_reserved_mib, iterations_per_s"
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons"}

Lines = list[tuple[int, list[str]]]  # the cells of each line, with its number in the file


def open_rows(path: Path, columns: str | None = None, settings: Sequence[str] = ()) -> tuple[Table, list[str]]:
    """Return a table from our own files or from an imported one, and what was assumed.

    A CSV without header needs `columns`, names by position. Four numbers a line are read as
    length, active MiB, reserved MiB, iterations/s, with a note. `settings` are constants, `seq_len=2048`. Raises
    UserError if the file or its columns cannot be read.
    """
    constants = from_settings(settings)
    if path.suffix == ".json" and path.is_file():
        raise UserError(
            f"{path} is JSON, but rows are read from a results folder, a journal (.jsonl), CSV or Parquet; convert it "
            "to a CSV with a line per run"
        )
    if path.suffix != ".csv" or not path.is_file() or _is_ours(path):
        note = f"{path} is not an imported CSV, so --columns and --set do not apply"
        return load(path), [note] if columns or settings else []
    return read_csv(path, columns, constants)


def open_together(
    paths: Sequence[Path], names: str | None, columns: str | None, settings: Sequence[str]
) -> tuple[Table, list[str]]:
    """Return one table of several files as `open_rows` reads each, and what was assumed.

    `names` sets imported files apart: `default,expandable` are allocators, `precision=fp32,bf16` values of another
    column. Imported rows of all files are of one sweep. Raises UserError if names do not fit the files, or one cannot
    be read.
    """
    axis, _, listed = (names or "").partition("=")
    axis, listed = (axis, listed) if "," not in axis and listed else ("", names or "")
    values = [value.strip() for value in listed.split(",")] if names else []
    if names and (len(values) != len(paths) or not all(values) or len({*values}) < len(values)):
        raise UserError(
            f"--names {names}: {len(values)} names for {len(paths)} files; give each file its own name, in order"
        )
    own = [[f"{axis or 'allocator'}={value}"] for value in values] or [[] for _ in paths]
    opened = [open_rows(path, columns, [*settings, *more]) for path, more in zip(paths, own, strict=True)]
    notes = list(dict.fromkeys(note for _, of_file in opened for note in of_file))
    if len(opened) == 1:
        return opened[0][0], notes
    frame = pd.concat([table.frame for table, _ in opened], ignore_index=True)
    origins = list(dict.fromkeys(frame["foreign"].dropna()))
    frame["foreign"] = frame["foreign"].where(frame["foreign"].isna(), " and ".join(map(str, origins)))
    if len(origins) > 1 and not names:
        notes.append(f"{' and '.join(map(str, origins))} are read as one configuration; --names A,B tells them apart")
    warnings = list(dict.fromkeys(warning for table, _ in opened for warning in table.warnings))
    return from_frame(frame, " and ".join(map(str, paths)), warnings), notes


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        return {"trial_id", "outcome"} <= {cell.strip().strip('"') for cell in stream.readline(LIMIT).split(",")}


def read_csv(path: Path, columns: str | None, constants: Mapping[str, Any]) -> tuple[Table, list[str]]:
    """Return the table of an imported CSV, with or without header, and what was assumed. Raises UserError if it cannot
    be read so."""
    notes: list[str] = []
    lines = _lines(path, notes)
    first = lines[0][1]
    header = not any(_number(cell) for cell in first)
    if header:
        del lines[0]
    if not lines:
        raise UserError(f"{path} has a header ({', '.join(first)[:60]}) but no line below it")
    width = len(first) if header else _width(lines)
    mapping = _declared(path, columns, first if header else None, width, lines, notes)
    mapping = replace(mapping, constants=constants)
    if mapping.width and not header and width < mapping.width and all(_ran_out(cells) for _, cells in lines):
        width = mapping.width  # every line ran out of memory
    if mapping.width and mapping.width != width:
        raise UserError(f"{path} has {width} columns, but --columns names {mapping.width}: {columns or _BARE}")
    if "seq_len" not in mapping.columns:
        named = ", ".join(sorted(mapping.columns) if columns else first)
        raise UserError(
            f"{path}: no column seq_len among {named[:200]}; name the columns with --columns (our column names, memory "
            "also as ..._mib or ..._gib), or give the length of all lines with --set seq_len=2048"
        )
    cells = pd.DataFrame(_padded(lines, width, path, notes), dtype="string")
    return to_table(cells, mapping, str(path), path.name, notes), notes


def _declared(
    path: Path, columns: str | None, header: list[str] | None, width: int, lines: Lines, notes: list[str]
) -> FileMapping:
    """Return the mapping that was given, or that of a header with known names, or of four numbers a line."""
    if columns:
        if header:
            notes.append(f"{path.name}: --columns replaces its header ({', '.join(header)[:200]})")
        return by_position(columns)
    if header:
        found = [our_name(name, [cells[at] for _, cells in lines if at < len(cells)]) for at, name in enumerate(header)]
        pairs = one_each([(theirs, ours) for theirs, (ours, _) in zip(header, found, strict=True)])
        if unknown := [theirs for theirs, ours in pairs if not ours]:
            notes.append(f"columns left out because their names are not known: {', '.join(unknown)}")
        if read := [f"{theirs} as {ours}" for theirs, ours in pairs if ours not in ("", theirs)]:
            notes.append(f"{path.name}: columns read: {', '.join(read)} (name others with --columns)")
        notes += [assumed for (_, assumed), (_, ours) in zip(found, pairs, strict=True) if ours and assumed]
        return by_name([ours for _, ours in pairs])
    only_out = width < 4 and all(_ran_out(cells) for _, cells in lines)
    if width != (bare := by_position(_BARE)).width and not only_out:
        raise UserError(f"{path} has no header; name its {width} columns with --columns seq_len,peak_allocated_mib,...")
    notes.append(f"{path.name} has no header; its columns were read as {_BARE} (name others with --columns)")
    return bare


def _lines(path: Path, notes: list[str]) -> Lines:
    """Return the cells of each line that has any. Semicolons or tabs separate them if the first line has no comma."""
    try:
        text = read_content(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UserError(f"cannot read {path} as CSV, because it is not UTF-8 text; save it as UTF-8")
    first = text.lstrip().partition("\n")[0]
    separator, named = next((each for each in _SEPARATORS.items() if each[0] in first), (",", ""))
    if separator != ",":
        notes.append(f"{path.name}: cells were read as separated by {named}")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
    try:
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except csv.Error as error:
        raise UserError(f"cannot read {path} as CSV: line {reader.line_num}: {error}") from None
    lines = [(number, cells) for number, cells in lines if any(cells)]
    if not lines:
        raise UserError(f"{path} is empty; give a CSV with a line per run")
    return lines


def _ran_out(cells: Sequence[str]) -> bool:
    return any(OUT_OF_MEMORY.search(cell) for cell in cells)


def _width(lines: Lines) -> int:
    """Return how many columns most lines have; a line with an out-of-memory message may have any number."""
    counts = Counter(len(cells) for _, cells in lines)
    if len(counts) > 1:
        counts = Counter(len(cells) for _, cells in lines if not _ran_out(cells)) or counts
    return counts.most_common(1)[0][0]


def _padded(lines: Lines, width: int, path: Path, notes: list[str]) -> list[list[str | None]]:
    """Pad lines to equal width. An out-of-memory message with commas becomes one cell."""
    padded: list[list[str | None]] = []
    short = 0
    for number, cells in lines:
        if len(cells) > width:
            at = next((i for i, cell in enumerate(cells[:width]) if OUT_OF_MEMORY.search(cell)), None)
            if at is not None:
                cells = [*cells[:at], ", ".join(cells[at:])]
            elif any(cells[width:]):
                raise UserError(
                    f"{path}, line {number}: {len(cells)} cells, but the file has {width} columns; put text with "
                    "commas in double quotes"
                )
        short += len(cells) < width and not _ran_out(cells)
        padded.append([*cells[:width], *[None] * (width - len(cells))])
    if short:
        notes.append(f"{short} line{'s' * (short != 1)} with fewer than {width} cells; missing values are unknown")
    return padded


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
