"""`vramsweep predict`: a sweep of predictions, with ranges of lengths and batches, a bar, and a table of what fits.

Everything else is a sweep's: its words (launch.py), its rows and folder (sweep.py), how they are made (predictions.py).
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from vramsweep.harness import launch
from vramsweep.harness.errors import UserError
from vramsweep.harness.progress import Few, bar
from vramsweep.harness.row import Outcome, Row
from vramsweep.harness.trial import Trial

MIB = 1 << 20
HELP = """\
predict memory on a card that need not be here: a sweep with -m and device=simulated

  vramsweep predict model=qwen0.5b device.gpu=a100-80gb seq_len=1..2048 allocator=default,expandable
  vramsweep predict model=llama3-8b runner=deepspeed sharding=zero3 world_size=8 seq_len=512..8192..512 micro_batch=1..4

FIRST..LAST and FIRST..LAST..STEP are all whole numbers between, both ends included, also within lists (1..4,8,16).
Every other word is one of `vramsweep sweep --help`. Rows, traces and report are in results/MODEL-RUNNER-predicted, or
what name= says; the same command goes on where one was interrupted. report=false leaves figures and report out."""

_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?")
# What tells no configuration apart: where in it a trial is, and what hangs on other settings.
_WITHIN = {"seq_len", "repeat", "seed"}


def main(argv: Sequence[str]) -> int:
    """`predict`; returns the exit status of the sweep that it is. Raises UserError for a mistake."""
    parser = argparse.ArgumentParser(
        prog="vramsweep predict",
        usage="%(prog)s [OPTION ...] [GROUP=OPTION ...] [KEY=VALUE ...]",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _, rest = parser.parse_known_args(argv)
    front = launch.Front("predicted", bar if Console().is_terminal else Few, show)
    return launch.main(words(rest), front=front)


def words(argv: Sequence[str]) -> list[str]:
    """The same as words of `sweep`. Raises UserError for a range that is none, and for another device."""
    for word in argv:
        key, _, value = word.partition("=")
        if key == "device" and value != "simulated":
            raise UserError(
                f"{word}: predictions are made on device=simulated; leave it out, or measure: vramsweep sweep {word}"
            )
    given = {word.partition("=")[0] for word in argv}
    return ["-m", *([] if "device" in given else ["device=simulated"]), *map(_spelled, argv)]


def _spelled(word: str) -> str:
    """A word with ranges in Hydra's spelling; others as they are."""
    key, _, value = word.partition("=")
    items = [item.strip() for item in value.split(",")]
    whole = key in whole_numbers()
    ranges = [item for item in items if _RANGE.fullmatch(item) or (whole and ".." in item)]
    if not ranges:
        return word
    if not whole:
        raise UserError(f"{word}: only whole numbers have ranges: {', '.join(sorted(whole_numbers()))}")
    spans = {item: _span(word, item) for item in ranges}
    if len(items) == 1:
        span = spans[items[0]]
        return f"{key}=range({span.start},{span.stop},{span.step})"
    return f"{key}={','.join(str(n) for item in items for n in spans.get(item, [item]))}"


def _span(word: str, item: str) -> range:
    found = _RANGE.fullmatch(item)
    if found is None:
        raise UserError(
            f"{word}: {item} is no range; write FIRST..LAST or FIRST..LAST..STEP, as 1..2048 or 64..2048..64"
        )
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if step < 1:
        raise UserError(f"{word}: the step of {item} must be 1 or more")
    if last < first:
        raise UserError(f"{word}: {item} is empty, as ranges go up; write {last}..{first}")
    return range(first, last + 1, step)


def whole_numbers() -> set[str]:
    """The settings of a trial that are whole numbers, by their full keys."""

    def under(model: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in model.model_fields.items():
            kind = field.annotation
            if kind is int:
                yield f"{prefix}{name}"
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from under(kind, f"{prefix}{name}.")

    return {key for key in under(Trial, "") if key not in ("repeat", "model.parameters", "model.max_positions")}


def show(rows: Sequence[Row]) -> None:
    """Print what fits: a line for each configuration."""
    if not rows:
        return
    console = Console() if Console().is_terminal else Console(width=180)
    varied, groups = configurations(rows)
    table = Table(
        *varied, *("lengths", "MiB at the shortest", "at the longest that fits", "first that does not", "rows")
    )
    for values, of_one in groups.items():
        table.add_row(*values, *_line(of_one))
    console.print(table)
    console.print("MiB are peak allocated / peak reserved; `vramsweep columns` says what trace_basis means.")


def _line(rows: Sequence[Row]) -> list[str]:
    lengths = sorted({row["seq_len"] for row in rows if row["seq_len"] is not None})
    fits = sorted((row for row in rows if row["outcome"] == Outcome.OK), key=lambda row: row["seq_len"])
    full = [row["seq_len"] for row in rows if row["outcome"] in (Outcome.OOM, Outcome.HOST_OOM)]
    kinds = Counter(row["trace_basis"] or row["outcome"] for row in rows)
    span = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}" if lengths else ""
    return [
        span,
        _peaks(fits[0]) if fits else "",
        _peaks(fits[-1]) if fits else "",
        f"{min(full):,}" if full else "",
        ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()),
    ]


def _peaks(row: Row) -> str:
    peaks = (row["peak_allocated_bytes"], row["peak_reserved_bytes"])
    return f"{row['seq_len']:,}: " + " / ".join("unknown" if size is None else f"{size / MIB:,.0f}" for size in peaks)


def configurations(rows: Sequence[Row]) -> tuple[list[str], dict[tuple[str, ...], list[Row]]]:
    """The settings that tell rows apart beside length, with card and allocator; the rows by their values of them."""
    flat = [dict(_flat(row["trial"] or {})) for row in rows]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    varied = [key for key in keys if len({json.dumps(one.get(key), sort_keys=True) for one in flat}) > 1]
    named = {key.partition(".")[0] for key in varied if key.endswith(".name")}
    shown = [
        key
        for key in keys
        if key in ("device.gpu", "allocator.name")
        or (key in varied and key not in _WITHIN and (key.endswith(".name") or key.partition(".")[0] not in named))
    ]
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row, one in zip(rows, flat, strict=True):
        groups[tuple(_text(one.get(key)) for key in shown)].append(row)
    return [key.removesuffix(".name") for key in shown], dict(sorted(groups.items()))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
