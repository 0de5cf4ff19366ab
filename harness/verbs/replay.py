"""`replay`: replays of a recording under other allocator settings, as a table, as JSON and as a figure."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.table import Table

from vramsweep.harness.allocator.peak_blocks import Holders
from vramsweep.harness.allocator.recording import HOW_TO_RECORD, SIMULATED
from vramsweep.harness.allocator.replay import WhatIf, grid, rank, saving, what_if
from vramsweep.harness.files.outputs import refuse_input
from vramsweep.harness.messages.console import Activity, Console, make_table
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import choose_unit, format_in, format_size
from vramsweep.harness.process.interpreter import draw_page
from vramsweep.harness.verbs.cli import read_parser


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep replay`; return the exit status. Raises UserError for a mistake that the user can fix."""
    args = read_parser("replay").parse_args(argv)
    limit = args.memory_limit
    settings = list(dict.fromkeys([*args.allocator, *(grid(limit is not None) if args.search else ())]))
    for out in filter(None, (args.figure, args.snapshot)):
        refuse_input(out, Path(args.file))
    if args.snapshot is not None and (len(settings) != 1 or args.search):
        raise UserError("--snapshot writes one replay; give exactly one --allocator, without --search")
    with Activity("reading the recording") as activity:
        own = {name: getattr(args, name) for name in ("memory_limit", "recorded_limit", "device", "snapshot")}
        result = what_if(Path(args.file), settings, max_bytes=args.max_file_size, hear=activity.update, **own)
    if args.search:
        result = replace(result, rows=(result.rows[0], *rank(result.rows[1:])))
    if args.json:
        print(result.to_json(timelines=False))
    else:
        _print_table(result)
    if args.figure is not None:
        draw_page(result.to_json(), args.figure)
        print(f"figure: {args.figure}", file=sys.stderr)
    if args.snapshot is not None:
        print(f"snapshot: {args.snapshot}", file=sys.stderr)
    return 0


def verdict(result: WhatIf) -> str:
    """Describe how the replay under the recorded settings compares with the recording."""
    match, end = result.rows[0].match, result.rows[0].timeline[-1]
    if match is None:
        why = 'the ring kept one event (max_entries, or enabled="state")' if result.events else "there is no event"
        end_is = f"{format_size(end.reserved)} reserved, {format_size(end.allocated)} allocated"
        return f"No history: {why}. The final state is {end_is}; the peak is unknown.\nTo record: {HOW_TO_RECORD}"
    events = f"{match.matched} of {match.segment_events} segment events"
    blocks = f"{match.blocks_in_place} of {match.blocks} blocks at the recorded address"
    if match.exact and not match.segment_events + match.blocks:
        return f"Nothing to compare, because its {result.events} events concern no segment and allocate no block."
    if match.exact:
        return f"The replay under the recorded settings is exact: {events}, {blocks}."
    other = f"\nIts stacks name {result.library}, so its allocator is not the CUDA one." if result.library else ""
    first = f"First difference: {match.first_difference}{other}"
    return f"The replay under the recorded settings is NOT exact: {events}, {blocks}.\n{first}"


def _print_table(result: WhatIf) -> None:
    limit = "none" if result.memory_limit is None else format_size(result.memory_limit)
    title = f"{result.recording}, device {result.device}, {result.events} events, memory limit {limit}"
    unit = choose_unit(max(row.peak_reserved or 0 for row in result.rows))
    numbers = (f"peak reserved {unit}", f"reserved but unused {unit}", "cudaMallocs", "retries", "out of memory")
    table = make_table(("settings", "start", *numbers), title=title, numbers=numbers)
    for row in result.rows:
        out = "no" if row.out_of_memory is None else "YES"
        both = (row.peak_reserved, row.reserved_unallocated)
        sizes = ("unknown" if size is None else format_in(unit, size) for size in both)
        counts = ["unknown" if count is None else str(count) for count in (row.device_allocs, row.retries)]
        table.add_row(row.settings or "(defaults)", row.start, *sizes, *counts, out)
    console = Console()
    console.print(table)
    if result.rows[0].holders is not None:
        console.print(_holders(result.rows[0].holders, "final state" if result.history == "none" else "recorded peak"))
    console.print(verdict(result))
    for row in result.rows:
        for note in (*row.notes, *([f"out of memory at {row.out_of_memory}"] if row.out_of_memory else [])):
            console.print(f"{row.settings or '(defaults)'}: {note}")
    for note in _warnings(result):
        console.print(note)


def _holders(peak: Holders, of: str) -> Table:
    """Return the table of the blocks that make up the recorded peak."""
    unknown = f"; the line of code is unknown for {format_size(peak.unknown)}" if peak.unknown else ""
    title = f"Blocks of the {of}: {format_size(peak.allocated)} allocated after event {peak.event}{unknown}"
    show_size = partial(format_in, unit := choose_unit(peak.allocated))
    numbers = (f"{unit} in all", "blocks")
    table = make_table((*numbers, "requested by (a recording does not show the purpose)"), title=title, numbers=numbers)
    for one in peak.largest:
        blocks = f"{one.count} x {format_size(one.bytes)}" if one.count > 1 else "1"
        table.add_row(show_size(one.bytes * one.count), blocks, one.where or "unknown")
    table.add_row(show_size(peak.rest), str(peak.rest_count), "others")
    table.add_row(show_size(peak.rounding), "", "rounding")
    return table


def _warnings(result: WhatIf) -> list[str]:
    match = result.rows[0].match
    notes = [SIMULATED] * result.simulated
    notes += ['"rebuilt": the replay allocates what was live at the start; compare these rows only with each other.']
    if result.history == "part":
        notes.append(f"Peaks cover only {result.events} events: recording began late, or max_entries dropped some.")
    if len(result.rows) > 2 and (found := saving(result)) is not None:
        saved = f"reserves {format_size(found[1])} less than" if found[1] > 0 else "saves nothing over"
        best = found[0].settings or "(defaults)"
        notes.append(f"The best of {len(result.rows) - 2} tried, {best}, {saved} the recorded one.")
    if match is not None and match.releases_before_growth:
        notes.append(
            f"{match.releases_before_growth} cache releases come directly before a new segment. They are replayed as "
            "empty_cache, but may be out-of-memory retries; a recording does not show which."
        )
    if match is not None and match.out_of_memory_events:
        notes.append(f"The replay omits {match.out_of_memory_events} requests that ended in out-of-memory errors.")
    return notes
