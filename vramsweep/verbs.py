"""Every verb of `vramsweep`, as data: name, section, one line, examples, the meaning of exit status 1, its parser.

Help texts, the tests of the command line and the documentation are made from `VERBS`. Nothing here runs a verb or reads
a row; `Verb.parser` only imports the verb's module. To add a verb, add an entry to verbs.json, and a module of its name
to harness/verbs/ (if it runs something) or a function to analysis/cli.py (if it reads rows).
"""

import argparse
import importlib
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness.messages.argument_parser import WIDTH, Parser

HARNESS, ANALYSIS, FRONT = "harness.verbs", "analysis", "front"  # where a verb's code is
NO_CACHE = "--no-cache"
_FRONT: dict[str, Any] = json.loads(Path(__file__).with_name("front.json").read_text("utf-8"))
SECTIONS: list[str] = _FRONT["sections"]
STATUSES = {int(number): meaning for number, meaning in _FRONT["statuses"].items()}


@dataclass(frozen=True)
class Verb:
    """One verb. `uses` are its arguments in examples; `no` says what status 1 means (None: it never ends so), `error`
    what 2 means; `settings`: it takes GROUP=OPTION, KEY=VALUE."""

    name: str
    section: str
    line: str
    uses: tuple[str, ...]
    side: str
    no: str | None = None
    error: str = "an error"
    settings: bool = False

    @property
    def examples(self) -> tuple[str, ...]:
        """Commands to try."""
        return tuple(f"vramsweep {self.name} {one}".strip() for one in self.uses)

    @property
    def reads_rows(self) -> bool:
        """Return whether the verb's first argument may be a folder or file of rows."""
        return self.side == ANALYSIS or self.name in ("explain", "timeline", "status", "check")

    def parser(self) -> argparse.ArgumentParser:
        """Return the verb's own parser: usage, options, and in `description` what there is to say beyond the line."""
        if self.side == FRONT:
            parser = Parser(prog="vramsweep help")
            parser.add_argument(
                "verb", nargs="?", metavar="COMMAND", choices=list(BY_NAME), help="a command of the list"
            )
            return parser
        found: argparse.ArgumentParser = importlib.import_module(f"vramsweep.{self.side}.cli").parser(self.name)
        if self.settings:  # the front door handles it
            found.add_argument(NO_CACHE, action="store_true", help="neither read nor write the cache of traces")
        return found

    def help(self, whole: bool = False) -> str:
        """Return what `vramsweep VERB --help` prints, 40 lines at most; `whole`: all there is to say (--help-all)."""
        parser = self.parser()
        usage, about = parser.usage and parser.format_usage().removeprefix("usage: ").strip(), parser.description
        words = [action.metavar or action.dest for action in parser._get_positional_actions()]
        parts = [f"usage: {usage or ' '.join([parser.prog, *map(str, words), '[OPTION ...]'])}", self.line]
        parts.append("\n".join(f"  {one}" for one in self.examples))
        paragraphs = (about or "").split("\n\n")[: None if whole else 1]
        parts += [textwrap.fill(paragraph, WIDTH, break_on_hyphens=False) for paragraph in paragraphs]
        parser.description, parser.usage = None, argparse.SUPPRESS
        parts.append(parser.format_help().strip())
        if self.settings:
            from vramsweep.harness.config import settings_reference

            parts.append(settings_reference.text() if whole else settings_reference.commonest())
        no = f"1, {self.no}; " if self.no else ""
        parts.append(_filled("Exit status:", f"0, done; {no}2, {self.error}; 130, interrupted."))
        if self.settings and not whole:
            parts[-1] += f"\nAll settings, presets and GPUs: vramsweep {self.name} --help-all, docs/settings.md"
        return "\n\n".join(filter(None, parts)) + "\n"


_WORDS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("verbs.json").read_text("utf-8"))
VERBS = tuple(Verb(**one | {"uses": tuple(one["uses"])}) for one in _WORDS)
BY_NAME = {verb.name: verb for verb in VERBS}
ALIASES = {"cards": "gpus"}  # earlier names
INTERNAL = ("draw",)  # of the analysis, started by timeline and replay; in no help, and may change


def overview() -> str:
    """Return what `vramsweep --help` prints: the verbs in their sections, and what exit statuses mean."""
    parts = ["usage: vramsweep COMMAND [ARGUMENT ...]"]
    for section in SECTIONS:
        lines = [f"  {verb.name:<12}{verb.line}" for verb in VERBS if verb.section == section]
        parts.append("\n".join([section, *lines]))
    statuses = [_filled(f"  {number:<4}", meaning) for number, meaning in STATUSES.items()]
    parts.append("\n".join(["Exit status", *statuses]))
    parts.append("vramsweep COMMAND --help has more, --help-all has all settings; --version prints the version")
    parts.append("\n".join(["Start here", *_FRONT["start"]]))
    return "\n\n".join(parts) + "\n"


def _filled(head: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{head} ", subsequent_indent="    ")
