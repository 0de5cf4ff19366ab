"""The verbs that run something; each is a function of its arguments. The front door is vramsweep/__main__.py."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from vramsweep.harness.errors import UserError


def _sweep(argv: Sequence[str]) -> int:
    from vramsweep.harness import launch

    return launch.main(argv)


def _run(argv: Sequence[str]) -> int:
    from vramsweep.harness import run

    return run.main(argv)


def _plan(argv: Sequence[str]) -> int:
    from vramsweep.harness import launch

    return launch.main(argv, action="plan")


def _predict(argv: Sequence[str]) -> int:
    from vramsweep.harness import predict

    return predict.main(argv)


def complete(words: Sequence[str], word: str) -> list[str]:
    """What `word` could become after the words of a sweep; nothing for words that are no overrides."""
    from vramsweep.harness import completion

    try:
        return completion.complete(words, word)
    except UserError:
        return []


def _status(argv: Sequence[str]) -> int:
    from vramsweep.harness import status

    return status.main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from rich.table import Table
    from rich.text import Text

    from vramsweep.harness.console import Console
    from vramsweep.harness.doctor import doctor

    parser = argparse.ArgumentParser(prog="vramsweep doctor", description="Is this machine fit for a night's sweep?")
    parser.add_argument("--results", type=Path, default=Path("results"), help="where rows will be written")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
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


def _check(argv: Sequence[str]) -> int:
    from vramsweep.harness import check

    return check.main(argv)


def _columns(argv: Sequence[str]) -> int:
    from vramsweep.harness import flags, outcome, registry
    from vramsweep.harness.row import COLUMNS, markdown_table

    parser = argparse.ArgumentParser(
        prog="vramsweep columns",
        description="What the columns of a row, outcomes, flags, runners and ways of sharding mean.",
    )
    parser.add_argument("--json", action="store_true")
    if parser.parse_args(argv).json:
        print(json.dumps([asdict(column) | {"type": column.type.__name__} for column in COLUMNS], indent=1))
    else:
        print("\n".join((markdown_table(), *(of.markdown_table() for of in (outcome, flags, registry)))), end="")
    return 0


def _techniques(argv: Sequence[str]) -> int:
    from rich.markup import escape
    from rich.table import Table

    from vramsweep.harness import techniques
    from vramsweep.harness.console import Console
    from vramsweep.harness.techniques import tables

    parser = argparse.ArgumentParser(
        prog="vramsweep techniques",
        description="Settings that trade memory, time or exactness: their values, needs, and how far each is proven.",
    )
    parser.add_argument("axis", nargs="?", help="only the values of this setting, such as optimizer")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="as in the documentation")
    arguments = parser.parse_args(argv)
    names = [axis.name for axis in techniques.AXES]
    if arguments.axis is not None and arguments.axis not in names:
        raise UserError(f"techniques {arguments.axis}: there is no such setting; settings: {', '.join(names)}")
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


def _cards(argv: Sequence[str]) -> int:
    from vramsweep.harness.gpus import GIB, GPUS, TERA, memory_limit

    parser = argparse.ArgumentParser(prog="vramsweep cards", description="The cards that device.gpu can name.")
    parser.add_argument("--json", action="store_true", help="with sources; bytes, bytes/s and FLOP/s")
    if parser.parse_args(argv).json:
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


def _replay(argv: Sequence[str]) -> int:
    from vramsweep.harness.allocator.cli import main as replay

    return replay(list(argv))


def _timeline(argv: Sequence[str]) -> int:
    from vramsweep.harness import timeline

    return timeline.main(argv)


def _advise(argv: Sequence[str]) -> int:
    from vramsweep.harness import advise

    return advise.main(argv)


def _explain(argv: Sequence[str]) -> int:
    from vramsweep.harness import explain

    return explain.main(argv)


def _validate(argv: Sequence[str]) -> int:
    from vramsweep.harness import validate

    return validate.main(argv)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "sweep": _sweep,
    "run": _run,
    "plan": _plan,
    "predict": _predict,
    "status": _status,
    "doctor": _doctor,
    "check": _check,
    "columns": _columns,
    "techniques": _techniques,
    "cards": _cards,
    "replay": _replay,
    "advise": _advise,
    "explain": _explain,
    "timeline": _timeline,
    "validate": _validate,
}


def main(words: Sequence[str]) -> int:
    """Run one verb of `VERBS`; returns the exit status. A user's mistake is one line, and gives 2."""
    try:
        return VERBS[words[0]](words[1:])
    except UserError as error:
        print(f"vramsweep: {error}", file=sys.stderr)
        return 2
