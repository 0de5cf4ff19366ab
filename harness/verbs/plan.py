"""`plan`: what a sweep would run, what cannot run and why, what it needs, how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from vramsweep.harness.messages.argument_parser import Parser, settings_parser
from vramsweep.harness.verbs import sweep_command


def parser() -> Parser:
    """Return the verb's options."""
    return settings_parser("plan")


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep plan`; return the exit status."""
    return sweep_command.main(argv, action="plan")
