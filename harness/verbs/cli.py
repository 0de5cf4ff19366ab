"""The verbs that run something; each is a function of its arguments. The front door is vramsweep/__main__.py."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from vramsweep.harness import mistakes
from vramsweep.harness.errors import UserError
from vramsweep.harness.parsers import Parser, of_settings


def _sweep(argv: Sequence[str]) -> int:
    from vramsweep.harness import launch

    return launch.main(argv)


def _plan(argv: Sequence[str]) -> int:
    from vramsweep.harness import launch

    return launch.main(argv, action="plan")


def complete(words: Sequence[str], word: str) -> list[str]:
    """What `word` could become after the words of a sweep; nothing for words that are no overrides."""
    from vramsweep.harness import completion

    try:
        return completion.complete(words, word)
    except UserError:
        return []


def _doctor_parser() -> Parser:
    parser = Parser(prog="vramsweep doctor")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where rows will be written")
    parser.add_argument("--json", action="store_true", help="print the data instead")
    return parser


def _doctor(argv: Sequence[str]) -> int:
    from rich.table import Table
    from rich.text import Text

    from vramsweep.harness.console import Console
    from vramsweep.harness.doctor import doctor

    arguments = _doctor_parser().parse_args(argv)
    checks = doctor(arguments.results)
    if arguments.json:
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        table = Table("check", "", "")
        colours = {"ok": "green", "note": "yellow", "problem": "red"}
        for check in checks:
            table.add_row(check.name, Text(check.level, style=colours[check.level]), check.text)
        Console().print(table)
    return int(any(check.level == "problem" for check in checks))


def _columns_parser() -> Parser:
    parser = Parser(prog="vramsweep columns", description="Also of runners and ways of sharding.")
    parser.add_argument("--json", action="store_true", help="print the data instead")
    return parser


def _columns(argv: Sequence[str]) -> int:
    from vramsweep.harness import flags, outcome, registry
    from vramsweep.harness.row import COLUMNS, markdown_table

    if _columns_parser().parse_args(argv).json:
        print(json.dumps([asdict(column) | {"type": column.type.__name__} for column in COLUMNS], indent=1))
    else:
        print("\n".join((markdown_table(), *(of.markdown_table() for of in (outcome, flags, registry)))), end="")
    return 0


def _techniques_parser() -> Parser:
    parser = Parser(prog="vramsweep techniques")
    parser.add_argument("axis", nargs="?", help="only the values of this setting, such as optimizer")
    parser.add_argument("--json", action="store_true", help="print the data instead")
    parser.add_argument("--markdown", action="store_true", help="as in the documentation")
    return parser


def _techniques(argv: Sequence[str]) -> int:
    from rich.markup import escape
    from rich.table import Table

    from vramsweep.harness import techniques
    from vramsweep.harness.console import Console
    from vramsweep.harness.techniques import tables

    arguments = _techniques_parser().parse_args(argv)
    names = [axis.name for axis in techniques.AXES]
    if arguments.axis is not None and arguments.axis not in names:
        raise UserError(mistakes.no_such(f"techniques {arguments.axis}", "setting", arguments.axis, names))
    if arguments.markdown:
        print(tables.markdown_table(), end="")
        return 0
    shown = [axis for axis in techniques.AXES if arguments.axis in (None, axis.name)]
    if arguments.json:
        print(json.dumps([tables.described(axis) for axis in shown], indent=1))
        return 0
    console = Console(markup=True)
    for axis in shown:
        default = f"  [dim]default {techniques.text(axis.default)}[/]" if axis.default is not None else ""
        console.print(f"\n[bold]{axis.name}[/]  {axis.meaning}{default}")
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(no_wrap=True, min_width=24)
        table.add_column(ratio=1)
        for entry in techniques.entries(axis.name):
            table.add_row(
                f"  {techniques.text(entry.name)}", escape(tables.sentence(entry, whole=arguments.axis is not None))
            )
        if table.row_count:
            console.print(table)
    if arguments.axis is None:
        console.print("\nvramsweep techniques SETTING tells what does not go together, why, and what is missing here.")
    return 0


def _cards_parser() -> Parser:
    parser = Parser(prog="vramsweep cards")
    parser.add_argument("--json", action="store_true", help="with sources; bytes, bytes/s and FLOP/s")
    return parser


def _cards(argv: Sequence[str]) -> int:
    from vramsweep.harness.gpus import GIB, GPUS, TERA, memory_limit

    if _cards_parser().parse_args(argv).json:
        print(json.dumps([asdict(gpu) | {"memory_limit_bytes": memory_limit(gpu)} for gpu in GPUS], indent=1))
        return 0
    from rich.table import Table

    from vramsweep.harness.console import Console

    rates = ("fp32", "tf32", "half", "bf16", "fp8")
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("device.gpu", no_wrap=True)
    for name in ("GiB", "limit", "cap.", "GB/s", "fp32", "tf32", "fp16", "bf16", "fp8"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("link", no_wrap=True)
    for gpu in GPUS:
        known = [getattr(gpu, rate) for rate in rates]
        table.add_row(
            gpu.name,
            f"{gpu.memory_gib:g}",
            f"{memory_limit(gpu) / GIB:.1f}",
            ".".join(map(str, gpu.capability)),
            f"{gpu.bandwidth / 1e9:.0f}",
            *("–" if rate is None else f"{rate / TERA:.0f}" for rate in known),
            gpu.link or "–",
        )
    console = Console()
    console.print(table)
    console.print(
        "\nGiB: nominal; limit: what the allocator can have; cap.: compute capability; then dense peaks in TFLOP/s. "
        "Any other card: device.memory_gib=8 device.capability=7.5; sources: --json.",
        highlight=False,
    )
    return 0


def _own(module: str) -> Callable[[Sequence[str]], int]:
    """The verb of a module of its own, which is imported when it is run."""

    def run(argv: Sequence[str]) -> int:
        status: int = importlib.import_module(f"vramsweep.harness.{module}").main(argv)
        return status

    return run


# Verbs with a module of their own, which has `main` and `parser`; those without are above.
MODULES = {
    "run": "run",
    "status": "status",
    "predict": "predict",
    "check": "check",
    "replay": "allocator.cli",
    "advise": "advise",
    "explain": "explain",
    "timeline": "timeline",
    "validate": "validate",
}
VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "sweep": _sweep,
    "plan": _plan,
    "doctor": _doctor,
    "columns": _columns,
    "techniques": _techniques,
    "cards": _cards,
    **{name: _own(module) for name, module in MODULES.items()},
}
_PARSERS: dict[str, Callable[[], Parser]] = {
    "sweep": lambda: of_settings("sweep"),
    "plan": lambda: of_settings("plan"),
    "doctor": _doctor_parser,
    "columns": _columns_parser,
    "techniques": _techniques_parser,
    "cards": _cards_parser,
}


def parser(name: str) -> Parser:
    """The parser of a verb; nothing is run. Raises KeyError for another name."""
    if name in _PARSERS:
        return _PARSERS[name]()
    found: Parser = importlib.import_module(f"vramsweep.harness.{MODULES[name]}").parser()
    return found


def main(words: Sequence[str]) -> int:
    """Run one verb of `VERBS`; returns the exit status. A user's mistake is one line, and gives 2."""
    try:
        return VERBS[words[0]](words[1:])
    except UserError as error:
        print(f"vramsweep: {error}", file=sys.stderr)
        return 2
