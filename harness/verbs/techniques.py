"""`techniques`: the values of each setting that trades memory, time or exactness."""

import json
from collections.abc import Sequence

from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.verbs.cli import read_parser


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep techniques`; return the exit status."""
    from rich.markup import escape

    from vramsweep.harness.messages.console import Console, make_table
    from vramsweep.harness.spec.techniques import catalog, wording

    arguments = read_parser("techniques").parse_args(argv)
    names = [axis.name for axis in catalog.AXES]
    if arguments.axis is not None and arguments.axis not in names:
        raise UserError(suggestions.no_such_value(f"techniques {arguments.axis}", "setting", arguments.axis, names))
    shown = [axis for axis in catalog.AXES if arguments.axis in (None, axis.name)]
    if arguments.json:
        print(json.dumps([wording.described(axis) for axis in shown], indent=1))
        return 0
    console = Console(markup=True)
    for axis in shown:
        default = f"  [dim]default {catalog.text(axis.default)}[/]" if axis.default is not None else ""
        console.print(f"\n[bold]{axis.name}[/]  {axis.meaning}{default}")
        entries, whole = catalog.entries(axis.name), arguments.axis is not None
        rows = [(f"  {catalog.text(one.name)}", escape(wording.sentence(one, whole=whole))) for one in entries]
        table = make_table(("", ""), rows)
        table.columns[0].min_width = 24
        if table.row_count:
            console.print(table)
    if arguments.axis is None:
        console.print("\nvramsweep techniques SETTING adds excluded combinations, with reasons, and missing packages.")
    return 0
