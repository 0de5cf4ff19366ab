"""`vramsweep sweep`: every combination of the settings' values, run as trials (run_words.py)."""

from __future__ import annotations

from collections.abc import Sequence

from vramsweep.harness.messages.argument_parser import Parser, settings_parser
from vramsweep.harness.verbs import run_words


def parser() -> Parser:
    """Return the options of `sweep`."""
    return settings_parser("sweep")


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep sweep`; return the exit status. Raises UserError for a mistake."""
    return run_words.run_sweep(argv)
