"""Dispatch to the verbs that run something, each a module with `main`. The entry point is vramsweep/__main__.py."""

import importlib
from collections.abc import Sequence
from types import ModuleType

from vramsweep.harness.messages.argument_parser import Parser
from vramsweep.harness.verbs.parsers import read_parser


def import_verb(name: str) -> ModuleType:
    """Import the module of a verb, which has `main(words)`."""
    return importlib.import_module(f"vramsweep.harness.verbs.{'run_words' if name == 'sweep' else name}")


def parser(name: str) -> Parser:
    """Return the parser of a verb; run nothing."""
    return read_parser(name)


def main(words: Sequence[str]) -> int:
    """Run one verb; return the exit status. Raises UserError for a user's mistake."""
    status: int = import_verb(words[0]).main(words[1:])
    return status
