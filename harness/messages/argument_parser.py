"""The parsers of all verbs: argparse, whose mistakes become one line of ours, with what was probably meant.

A flag is never abbreviated, so that a flag added later breaks no script. vramsweep/verbs.py has each verb's purpose,
section and examples, and makes the whole help text.

Hydra reads the settings, GROUP=OPTION and KEY=VALUE (overrides.py, settings_reference.py).
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError

WIDTH = 100
# Hydra's options, which every verb that takes settings understands; --json and --all are ours (verbs/parsers.json).
VALUED = ("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir",
          "--experimental-rerun", "-i", "--info")  # fmt: skip
FLAGS = (*VALUED, "-h", "--help", "--hydra-help", "--version", "--resolve", "-r", "--run", "-m", "--multirun", "-sc",
         "--shell-completion", "--json", "--all")  # fmt: skip


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps texts as they are, options within 100 columns, so that a page is one everywhere."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=WIDTH)


class Parser(argparse.ArgumentParser):
    """A verb's parser. `description` is what there is to say beyond the verb's one line, `epilog` what follows options.

    `parse_known_args` returns a verb's own options, and the other words: settings, and flags of Hydra. Raises UserError
    for a mistake; argparse would print the usage and end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": Formatter, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Raise UserError."""
        raise UserError(f"{refusal(self, message)}; {self.prog} --help lists the options")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)
        except UserError as error:  # of a type of ours
            raise argparse.ArgumentError(action, str(error)) from None


def refusal(parser: argparse.ArgumentParser, message: str) -> str:
    """Return what argparse says of a mistake, in fewer words and with what was meant; on any parser, Hydra's too."""
    message = message.removeprefix("argument ")
    name, found, choices = message.partition(": invalid choice: ")
    called = {of: (*of.option_strings, "/".join(of.option_strings), of.metavar, of.dest) for of in parser._actions}
    action = next((one for one, names in called.items() if name in names), None)
    if found and action is not None and action.choices is not None:
        typed = re.match(r"'(.*?)' \(choose from|(\S+) \(choose from", choices)
        value = "" if typed is None else typed[1] or typed[2] or ""
        what = name if action.option_strings else str(action.metavar or action.dest)
        return suggestions.no_such_value(f"{what} {value}", "choice", value, action.choices)
    before, found, rest = message.partition("unrecognized arguments: ")
    if found and not before:  # argparse lists what follows them too
        flags = [word for word in rest.split() if word.startswith("-")]
        allowed = [flag for flag in parser._option_string_actions if flag.startswith("--") and flag != "--help"]
        if flags:
            near = suggestions.did_you_mean(flags[0].partition("=")[0], allowed)
            return f"unrecognized arguments: {' '.join(flags)}{near}"
    return message


@dataclass(frozen=True)
class OutFile:
    """The type of an argument that names an output file: checked before any work. Raises UserError."""

    suffixes: tuple[str, ...]

    def __call__(self, text: str) -> Path:
        """Return the file's path. Raises UserError for another suffix, too long a name, or a folder."""
        path = Path(text)
        if path.suffix not in self.suffixes:
            near = suggestions.did_you_mean(path.suffix, self.suffixes) if path.suffix else ""
            raise UserError(f"{path.name or repr(text)} must end in one of {', '.join(self.suffixes)}{near}")
        if len(path.name.encode(errors="surrogateescape")) > 240:  # its draft has a few letters more
            raise UserError(f"the file name {path.name[:40]}... is too long; give one of at most 240 bytes")
        if path.is_dir():
            raise UserError(f"{text} is a folder; name a file in it")
        return path


FIGURE = OutFile((".html", ".png", ".svg", ".pdf"))
PAGE = OutFile((".html",))
PICKLE = OutFile((".pickle",))
