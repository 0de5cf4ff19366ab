"""`replay`: a recording under other allocator settings, as a table, as JSON and as a figure."""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from vramsweep.harness.allocator.config import MIB
from vramsweep.harness.allocator.holders import Holders
from vramsweep.harness.allocator.replay import Row, WhatIf, what_if
from vramsweep.harness.allocator.safepickle import DEFAULT_MAX_BYTES
from vramsweep.harness.allocator.search import grid, rank
from vramsweep.harness.console import Console
from vramsweep.harness.errors import UserError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}{u}": 1 << 10 * (i + 1) for i, p in enumerate("KMGT") for u in ("iB", "i")}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit status: 0, or 2 for a mistake the user can mend."""
    try:
        args = _parser().parse_args(argv)
        return _run(args)
    except UserError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    limit = None if args.memory_limit is None else size_in_bytes(args.memory_limit)
    settings = list(dict.fromkeys([*args.allocator, *(grid(limit is not None) if args.search else ())]))
    result = what_if(
        Path(args.file),
        settings,
        memory_limit=limit,
        recorded_limit=None if args.recorded_limit is None else size_in_bytes(args.recorded_limit),
        device=args.device,
        max_bytes=size_in_bytes(args.max_file_size),
    )
    if args.search:
        result = replace(result, rows=(result.rows[0], *rank(result.rows[1:])))
    if args.json:
        print(result.to_json(timelines=False))
    else:
        _print_table(result)
    if args.figure is not None:
        draw(result, Path(args.figure))
        print(f"figure: {args.figure}", file=sys.stderr)
    return 0


def size_in_bytes(text: str) -> int:
    """Bytes in "24GiB", "512 MiB", "80GB" or a plain number. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    if found is None or found[2] not in _UNITS or float(found[1]) <= 0:
        raise UserError(f"{text!r:.40} is not a size: write for example 24GiB, 512MiB or 80GB")
    return int(float(found[1]) * _UNITS[found[2]])


def draw(result: WhatIf, out: Path) -> None:
    """Draw the timelines as an HTML page, in a process of its own. Raises UserError when that fails."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "timelines.json"
        data.write_text(result.to_json())
        command = [sys.executable, "-m", "vramsweep", "draw", str(data), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UserError(f"the figure could not be drawn: {reason[0]}")


def verdict(row: Row) -> str:
    """In words, how the replay under the recorded settings compares with the recording."""
    match = row.match
    if match is None:
        return ""
    events = f"{match.matched} of {match.segment_events} segment events"
    blocks = f"{match.blocks_in_place} of {match.blocks} blocks at the recorded address"
    if match.exact:
        return f"The replay under the recorded settings is exact: {events}, {blocks}."
    return f"The replay under the recorded settings is NOT exact: {events}, {blocks}.\nFirst: {match.first_difference}"


def _print_table(result: WhatIf) -> None:
    limit = "none" if result.memory_limit is None else f"{_mib(result.memory_limit)} MiB"
    title = f"{result.recording}, device {result.device}, {result.events} events, memory limit {limit}"
    table = Table(title=title, title_justify="left")
    table.add_column("settings", overflow="fold")
    table.add_column("start")
    for name in ("peak reserved MiB", "of it unallocated MiB", "cudaMallocs", "retries", "out of memory"):
        table.add_column(name, justify="right")
    for row in result.rows:
        out = "no" if row.out_of_memory is None else "YES"
        sizes = (_mib(row.peak_reserved), _mib(row.reserved_unallocated))
        counts = (str(row.device_allocs), str(row.retries))
        table.add_row(row.settings or "(defaults)", row.start, *sizes, *counts, out)
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    if result.rows[0].holders is not None:
        console.print(_holders(result.rows[0].holders))
    console.print(verdict(result.rows[0]), highlight=False)
    for row in result.rows:
        for note in (*row.notes, *([f"out of memory at {row.out_of_memory}"] if row.out_of_memory else [])):
            console.print(f"{row.settings or '(defaults)'}: {note}", highlight=False)
    for note in _warnings(result):
        console.print(note, highlight=False)


def _holders(peak: Holders) -> Table:
    """Who holds the recorded peak."""
    unknown = f"; of {_mib(peak.unknown)} MiB no line is known" if peak.unknown else ""
    title = f"What holds the recorded peak allocated, {_mib(peak.allocated)} MiB after event {peak.event}{unknown}"
    table = Table(title=title, title_justify="left")
    table.add_column("MiB in all", justify="right")
    table.add_column("blocks", justify="right")
    table.add_column("asked for by (what it is for is not recorded)", overflow="fold")
    for one in peak.largest:
        blocks = f"{one.count} x {_mib(one.bytes)}" if one.count > 1 else "1"
        table.add_row(_mib(one.bytes * one.count), blocks, one.where or "unknown")
    table.add_row(_mib(peak.rest), str(peak.rest_count), "others")
    table.add_row(_mib(peak.rounding), "", "rounding")
    return table


def _warnings(result: WhatIf) -> list[str]:
    match = result.rows[0].match
    notes = ['"rebuilt": what was live at the start is allocated anew first; compare these rows with one another.']
    if match is not None and match.releases_before_growth:
        notes.append(
            f"{match.releases_before_growth} cache releases come directly before a new segment: calls of empty_cache, "
            "or out-of-memory retries (a recording does not tell which). They are replayed as empty_cache everywhere."
        )
    if match is not None and match.out_of_memory_events:
        notes.append(
            f"The recording has {match.out_of_memory_events} out-of-memory errors; those requests are left out."
        )
    return notes


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (try --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="replay", description="Replay a CUDA memory recording under other allocator settings.")
    parser.add_argument("file", help="a recording made with torch.cuda.memory._dump_snapshot")
    parser.add_argument(
        "--allocator",
        action="append",
        default=[],
        metavar="SETTINGS",
        help="settings to try, as in PYTORCH_CUDA_ALLOC_CONF; may be given several times",
    )
    parser.add_argument("--search", action="store_true", help="try a grid of settings and rank them")
    parser.add_argument("--memory-limit", metavar="SIZE", help="what the process may use, for example 24GiB")
    parser.add_argument("--recorded-limit", metavar="SIZE", help="the limit in force while recording, where known")
    parser.add_argument("--device", type=int, help="which device, when the recording has several")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--figure", metavar="OUT.html", help="draw reserved and allocated over time")
    parser.add_argument(
        "--max-file-size", default=f"{DEFAULT_MAX_BYTES >> 30}GiB", metavar="SIZE", help="largest recording to read"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
