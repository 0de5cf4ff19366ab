"""The verbs that run something, each a module with `main`: their parsers, and the dispatch to them.

It is light, to refuse wrong words before a verb's own imports. parsers.json has the arguments of each verb.
typed_words.py reads the settings, overrides.py Hydra's options. The entry point is vramsweep/__main__.py.
"""

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from vramsweep.harness.messages import units
from vramsweep.harness.messages.argument_parser import PAGE, PICKLE, Parser
from vramsweep.harness.search.advice_search import ACCEPTED, MOST

GOALS = {"fastest": None, "longest": "seq_len", "largest-batch": "micro_batch"}  # with the axis that each maximizes
# What a text that begins with a $ stands for in parsers.json.
_NAMED: dict[str, Any] = {
    "$int": int, "$path": Path, "$size": units.parse_size, "$page": PAGE, "$pickle": PICKLE,
    "$goals": tuple(GOALS), "$accepted": ACCEPTED, "$most": MOST, "$hidden": argparse.SUPPRESS,
}  # fmt: skip


def read_parser(verb: str) -> Parser:
    """Return the parser of a verb's options and words, as parsers.json describes them. Raises KeyError.

    Hydra's own parser reads the flags of sweep and plan (overrides.py); they are here for their help.
    """
    about = json.loads(Path(__file__).with_name("parsers.json").read_text("utf-8"))[verb]
    parser = Parser(prog=f"vramsweep {verb}", usage=about.get("usage"), description=about.get("description"))
    for *names, options in about["arguments"]:
        known = {key: _NAMED.get(value, value) if isinstance(value, str) else value for key, value in options.items()}
        parser.add_argument(*names, **known)
    return parser


parser = read_parser  # its name in analysis/cli.py


def import_verb(name: str) -> ModuleType:
    """Import the module of a verb, which has `main(words)`."""
    return importlib.import_module(f"vramsweep.harness.verbs.{'run_words' if name == 'sweep' else name}")


def main(words: Sequence[str]) -> int:
    """Run one verb; return the exit status. Raises UserError for a user's mistake."""
    status: int = import_verb(words[0]).main(words[1:])
    return status
