"""The table that ends every sweep, measured or predicted: what each configuration needs, and the largest that fits.

It is made from rows alone, so that predictions (harness/verbs/predict.py) and reports (analysis/report/summary.py) show
one table. – means unknown.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from rich.table import Table

from vramsweep.harness.messages.console import make_table
from vramsweep.harness.messages.units import choose_unit, format_estimate, format_in
from vramsweep.harness.rows.schema import Outcome
from vramsweep.harness.spec.fit_text import bound_reserved
from vramsweep.harness.sweep.labels import OPTIONS

MIB = 1 << 20
LABEL = 16  # columns of a terminal for a configuration's label, at least
NARROW = 110  # columns of a terminal below which cells are short
FULL = (Outcome.OOM, Outcome.HOST_OOM)
PEAKS = ("peak_reserved_bytes", "peak_allocated_bytes", "peak_active_bytes", "device_used_bytes")  # the first known one
GROWN = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")  # for MiB per token, likewise
MOST = "peak_reserved_most_bytes"
NEEDS = "unlimited_peak_reserved_bytes"
# The mark of each speed, the most certain first: timed, by speeds of other runs, by the roofline.
SPEEDS = {"tokens_per_s": "", "calibrated_tokens_per_s": "≈", "estimated_tokens_per_s": "≤"}
SAMPLES = "samples_per_s"
MARKS = {
    "≈": "≈ estimate from speeds of other runs, not measured",
    "≤": "≤ estimate of the highest possible speed (roofline), not measured",
    "~": "~ a smaller one did not fit",
}
# The words of an axis: one value, the smallest, the largest. An option of the user's own is called by its name.
WORDS = {"seq_len": ("length", "shortest", "longest"), "micro_batch": ("batch", "smallest", "largest")}
COLUMNS = ("outcome", "seq_len", "micro_batch", *PEAKS, *SPEEDS, SAMPLES, MOST, NEEDS, "bound_by")


@dataclass(frozen=True)
class Line:
    """One configuration. `tried` and `fits` are its largest length or batch: None if unknown, and 0 if nothing that was
    tried fits. `fails` is the smallest that does not fit; `torn` says that it is below `fits`.

    `peak_bytes` and `smallest_peak_bytes` are of the largest and the smallest that fit, in the column `peak`. For
    predictions with two bounds, `peak_bytes` is the upper bound. `needs_bytes` is what the smallest that does not fit
    would reserve. `mib_per_token` is the growth of peak allocated, in MiB, per token of a rank's micro-batch
    (micro_batch x seq_len), over the upper half of what fitted. Speeds are those of the largest that fits. `estimated`
    is the mark (`MARKS`) of a speed that was not timed, "" of one that was. `most` is the longest that the model takes.
    Without `tokens`, `mib_per_token` is per sample, and with an option as axis per one of it.
    """

    label: str
    tried: int | None
    fits: int | None
    torn: bool
    mib_per_token: float | None
    reserved_over_allocated: float | None
    tokens_per_s: float | None
    estimated: str
    predicted: bool
    fails: int | None = None
    peak: str | None = None
    peak_bytes: float | None = None
    smallest_peak_bytes: float | None = None
    needs_bytes: float | None = None
    samples_per_s: float | None = None
    rows: int = 0
    most: int | None = None
    tokens: bool = True
    host_bound: bool = False


def choose_axis(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the axis of a sweep: the batch if it varies and the length does not, or if the length is unknown.

    A whole number among the options of a command (columns `runner.options.NAME`, see `add_options`) comes first if it
    varies and no length or batch varies without it. If several do, it is the one with most values.
    """
    options = {key: {row.get(key) for row in rows} for row in rows for key in row if key.startswith(OPTIONS)}
    for key in sorted(options, key=lambda one: -len(options[one])):
        if len(options[key]) > 1 and all(map(is_number, options[key])) and _follow(rows, key):
            return key
    lengths, batches = (len({row[name] for row in rows} - {None}) for name in WORDS)
    return "micro_batch" if (batches > 1 and lengths < 2) or not lengths else "seq_len"


def is_number(value: Any) -> bool:
    """Return whether a value of an option, as typed, is a whole number from 1."""
    return value is not None and bool(re.fullmatch("0*[1-9][0-9]*", str(value)))


def _follow(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Return whether the rows of each value have one length and one batch, or unknown ones."""
    known = {(row[key], name, row[name]) for row in rows for name in WORDS if row[name] is not None}
    return len(known) == len({one[:2] for one in known})


def add_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its command's options as columns `runner.options.NAME`, whole numbers as such."""
    options = ((row.get("trial") or {}).get("runner") or {}).get("options") or {}
    return {OPTIONS + name: int(one) if is_number(one) else one for name, one in options.items()} | {**row}


def name_axis(axis: str) -> tuple[str, str, str]:
    """Return the words for one value of an axis, the smallest and the largest."""
    return WORDS.get(axis, (f"{axis.removeprefix(OPTIONS)}=", "smallest", "largest"))


def has_tokens(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether any of the rows has tokens: a length of 1 is that of samples without tokens, and an unknown length
    has tokens if they were counted."""
    return any(row["seq_len"] != 1 if row["seq_len"] else row.get("tokens_per_s") is not None for row in rows)


def summarize_rows(
    label: str, rows: Sequence[Mapping[str, Any]], axis: str, *, predicted: bool, resident: bool = False,
    varies: bool = False, most: int | None = None,
) -> Line:  # fmt: skip
    """Return the line of one configuration from its rows, of which `COLUMNS` are read.

    `resident`: reserved is the resident set of a process, not an allocator's. `varies`: lengths vary in each row.
    `most`: the longest that the model takes, if known.
    """
    ran = [row for row in rows if row["outcome"] == Outcome.OK]
    known = [row for row in ran if row[axis] is not None]
    full = {row[axis]: row[NEEDS] for row in rows if row["outcome"] in FULL and row[axis] is not None}
    tried = [row[axis] for row in rows if row["outcome"] not in (Outcome.INVALID, Outcome.SKIPPED)]
    fits = max((row[axis] for row in known), default=0 if full else None)
    at = [row for row in known if row[axis] == fits] or ran
    first = [row for row in known if row[axis] == min(row[axis] for row in known)] or ran
    peak = _first_known(ran, PEAKS[1:] if resident else PEAKS)
    last = [bound_reserved(row[peak], row[MOST]) if peak == PEAKS[0] else row[peak] for row in at if peak and row[peak]]
    reserved, allocated = (_median(row[name] for row in at) for name in PEAKS[:2])
    speed = next((name for name in SPEEDS if _median(row[name] for row in at) is not None), None)
    fails = min(full, default=None)
    return Line(
        label,
        max(filter(None, tried), default=None),
        fits,
        bool(fits and fails and fails < fits),
        None if varies else _grow_per_token(known, axis, resident),
        reserved / allocated if reserved and allocated and not resident else None,
        _median(row[speed] for row in at) if speed else None,
        SPEEDS[speed] if speed else "",
        predicted,
        fails,
        peak,
        _median(last),
        _median(row[peak] for row in first) if peak else None,
        full.get(fails),
        _median(row[SAMPLES] for row in at),
        len(rows),
        most if axis == "seq_len" else None,
        has_tokens(rows),
        any(row.get("bound_by") == "host" for row in at),
    )


def make_result_table(
    lines: Sequence[Line], axis: str, width: int, most: int | None = None, more: int = 0
) -> tuple[Table, list[str]]:
    """Return the table and the lines to print below it; `most` limits the lines that configurations may take.

    `more` configurations are not among the lines.
    """
    (what, _, longest), narrow = name_axis(axis), width < NARROW
    tokens, first = any(line.tokens for line in lines) or not lines, f"first {what}\nthat does not"
    one = name_one(axis.removeprefix(OPTIONS)) if axis not in WORDS else "token" if tokens else "sample"
    per = f"MiB per\n{one}"
    samples = [line.samples_per_s or (None if tokens else line.tokens_per_s) for line in lines]
    speeds = {"tokens/s": [line.tokens_per_s for line in lines], "samples/s": samples}
    speed = "tokens/s" if tokens and (any(speeds["tokens/s"]) or not any(speeds["samples/s"])) else "samples/s"
    unit = choose_unit(max((line.peak_bytes or line.needs_bytes or 0 for line in lines), default=0))
    peak = f"peak\n{unit}"
    columns = {
        f"{longest}{'' if axis in WORDS else f' {what}'}\nthat fits": [_fits(line, longest, narrow) for line in lines],
        peak: [_peaks(line, unit) for line in lines],
        first: [_digits(line.fails) for line in lines],
        per: [_digits(line.mib_per_token and max(line.mib_per_token, 0.0)) for line in lines],
        speed: [_speed(value, line.estimated) for value, line in zip(speeds[speed], lines, strict=True)],
        "rows": [f"{line.rows:,}" for line in lines],
    }
    columns = {head: cells for head, cells in columns.items() if set(cells) != {"–"} or head in (peak, speed)}
    widths = {head: 1 + max(map(len, (*head.split("\n"), *cells)), default=0) for head, cells in columns.items()}
    wanted = max((len(line.label) for line in lines), default=LABEL)
    for head in ("rows", per, first):  # left out first if the terminal is too narrow
        if width - sum(widths[one] for one in columns) - 1 < min(wanted, 2 * LABEL):
            columns.pop(head, None)
    room = max(width - sum(widths[one] for one in columns) - 1, LABEL)
    table = make_table(("configuration", *columns), numbers=columns)
    table.columns[0].min_width, table.columns[0].max_width = LABEL, room
    heights = accumulate(-(-len(line.label) // room) for line in lines)
    shown = len(lines) if most is None else max(sum(height <= most for height in heights), bool(lines))
    for line, *cells in list(zip(lines, *columns.values(), strict=True))[:shown]:
        table.add_row(line.label, *cells)
    return table, list(_explain(lines[:shown], more + len(lines) - shown, axis, columns, narrow))


def _explain(lines: Sequence[Line], more: int, axis: str, columns: Collection[str], narrow: bool) -> Iterator[str]:
    """Yield what is left out, what the numbers are, and what marks in the table mean."""
    if more:
        yield f"and {more:,} more in the report"
    unit = next(head for head in columns if head.startswith("peak")).split()[1]
    known = dict.fromkeys(line.peak.removesuffix("_bytes").replace("_", " ") for line in lines if line.peak)
    _, smallest, longest = name_axis(axis)
    of = f", at the {smallest} and the {longest} that fits" * any(" to " in _peaks(line, unit) for line in lines)
    told = [f"peak {unit}: {' or '.join(known)} per GPU{of}"] if known else []
    per = next((head.removeprefix("MiB per\n") for head in columns if head.startswith("MiB per")), None)
    if lines and per:
        of_both = " of micro_batch x seq_len" * (axis in WORDS and per == "token")
        told.append(f"MiB per {per}: growth of memory per {per}{of_both}")
    if narrow and any(" or more" in _fits(line, longest, narrow) for line in lines):
        told.append(f"or more: even the {longest} that was tried fits")
    if any(_fits(line, longest, narrow).endswith(" (all)") for line in lines):
        told.append("all: the model's maximum")
    if told:
        yield "; ".join(told)
    used = {line.estimated for line in lines} | {"~" for line in lines if line.torn}
    yield from (meaning for mark, meaning in MARKS.items() if mark in used)


def _fits(line: Line, longest: str, narrow: bool) -> str:
    if not line.fits:
        return "–" if line.fits is None else "none"
    tried = " or more" if narrow else f" or more ({longest} tried)"
    more = "" if line.fails is not None else " (all)" if line.fits == line.most else tried
    return f"{'~' * line.torn}{line.fits:,}{more}"


def _peaks(line: Line, unit: str) -> str:
    """Format the peak of the shortest and the longest that fit; if none fits, what the shortest would need."""
    if line.peak_bytes is None:
        return "–" if line.needs_bytes is None or line.fits else f"needs {format_in(unit, line.needs_bytes)}"
    ends = [format_in(unit, size) for size in (line.smallest_peak_bytes, line.peak_bytes) if size is not None]
    return " to ".join(dict.fromkeys(ends))


def _speed(value: float | None, mark: str) -> str:
    if value is None:
        return "–"
    return f"{mark} {format_estimate(value)}" if mark else f"{value:,.{0 if value >= 100 else 1}f}"


def name_one(name: str) -> str:
    """Return the singular of a number's name, such as `image`; the name itself if that is not certain."""
    return name[:-1] if len(name) > 3 and re.fullmatch(r".*[^s]s(?<![shixz]es)(?<![ui]s)", name) else name


def _digits(value: float | None) -> str:
    """Format a number with three digits; from 100 on, with all digits before the point."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _first_known(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    return next((name for name in names if any(row[name] is not None for row in rows)), None)


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return float(median(known)) if known else None


def _grow_per_token(ran: Sequence[Mapping[str, Any]], axis: str, resident: bool) -> float | None:
    """Return the growth of memory per token in MiB, from a smaller size that ran to the largest; None if unknown. The
    smaller one is the largest up to half of it, or else the next smaller one."""
    base = _first_known(ran, GROWN)
    if base is None or (base == "peak_reserved_bytes" and resident):
        return None
    other = "micro_batch" if axis == "seq_len" else "seq_len" if axis in WORDS and has_tokens(ran) else None
    known = [row for row in ran if row[base] is not None and (other is None or row[other] is not None)]
    if len(sizes := sorted({row[axis] for row in known})) < 2:
        return None
    high = sizes[-1]
    low = max((size for size in sizes if size <= high / 2), default=sizes[-2])
    at = [median(row[base] for row in known if row[axis] == size) for size in (low, high)]
    tokens = (high - low) * (median(row[other] for row in known) if other else 1)
    return float((at[1] - at[0]) / tokens / MIB)
