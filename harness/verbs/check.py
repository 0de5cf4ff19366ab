"""`check`: the claims of results folders that may be published, on one screen."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from vramsweep.harness.sweep.publication_check import Verdict, judge_folder
from vramsweep.harness.verbs.cli import read_parser

LINES, WIDTH = 24, 110  # of the screen


def screen(verdict: Verdict) -> list[str]:
    """Return the verdict in lines, at most a screen: the worst findings first, and how many are left out."""
    kind = "measured" if verdict.measured == verdict.rows else "predicted" if not verdict.measured else None
    kind = kind or f"{verdict.measured:,} of them measured"
    lines = [f"{verdict.folder}, {verdict.rows:,} rows, {kind}: {_answer(verdict)}"]
    for number, one in enumerate(verdict.findings):
        what = f"forbids {' and '.join(one.forbids)}" if one.forbids else "mention"
        some = f" ({', '.join(one.examples)}{', …' * (one.count > len(one.examples))})" if one.examples else ""
        text = f"{what}: {one.text}{some}".replace(" %", "\xa0%")  # so that no line breaks there
        more = textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ")
        if len(lines) + len(more) >= LINES:
            return [*lines, f"  … and {len(verdict.findings) - number} more; --json lists all"]
        lines += [line.replace("\xa0%", " %") for line in more]
    return lines


def _answer(verdict: Verdict) -> str:
    may, may_not = ([claim for claim, well in verdict.claims.items() if well is which] for which in (True, False))
    if not may_not:
        return f"{' and '.join(may)} may be published" if may else "there is nothing to publish"
    if not may:
        return f"{' and '.join(may_not)} may not be published"
    return f"{' and '.join(may)} may be published, {' and '.join(may_not)} may not"


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep check RESULTS ...`; return 0 if all claims, or that of --claim, may be published, else 1."""
    arguments = read_parser("check").parse_args(argv)
    verdicts = [judge_folder(folder) for folder in arguments.folder]
    if arguments.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    else:
        print("\n".join(line for verdict in verdicts for line in screen(verdict)))
    asked = arguments.claim
    well = all(v.claims and all(v.claims.values()) if asked is None else v.claims.get(asked, False) for v in verdicts)
    return 0 if well else 1
