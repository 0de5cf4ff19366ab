"""`columns`: the columns of a row, its outcomes and flags, runners and shardings."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from vramsweep.harness.verbs.cli import read_parser


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep columns`; return the exit status."""
    from vramsweep.harness.rows import outcome, quality_flags
    from vramsweep.harness.rows.schema import COLUMNS, markdown_table
    from vramsweep.harness.spec import runner_table

    if read_parser("columns").parse_args(argv).json:
        print(json.dumps([asdict(column) | {"type": column.type.__name__} for column in COLUMNS], indent=1))
    else:
        tables = (markdown_table(), *(of.markdown_table() for of in (outcome, quality_flags, runner_table)))
        print("\n".join(tables), end="")
    return 0
