"""The front door: `vramsweep VERB`, also `python -m vramsweep VERB`.

Verbs that run something are the harness's, verbs that read rows the analysis's; neither imports the other. verbs.py
lists the verbs.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from vramsweep import verbs
from vramsweep.harness.files import bounded_reads, file_names, sweep_folder
from vramsweep.harness.messages import suggestions, terminal
from vramsweep.harness.messages.errors import UserError
from vramsweep.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit status (verbs.STATUSES). A user's mistake is printed without a traceback.

    Everything printed is out when this returns; otherwise the status says that it could not be written.
    """
    if (closed := terminal.open_streams()) is not None:
        print(f"vramsweep: {closed}", file=sys.stderr)
        return 2
    with terminal.escaped():
        try:
            try:
                return _main(list(sys.argv[1:] if argv is None else argv))
            except UserError as error:
                print(f"vramsweep: {error}", file=sys.stderr)
                return 2
            except OSError as error:
                if error.errno not in bounded_reads.FULL:
                    raise
                print(
                    f"vramsweep: {error.filename or tempfile.gettempdir()}: {bounded_reads.error_reason(error)}",
                    file=sys.stderr,
                )
                return 2
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                return 130
            finally:
                sys.stdout.flush()
                for number in (signal.SIGINT, signal.SIGHUP) if argv is None else ():
                    signal.signal(number, signal.SIG_IGN)  # the process ends, and keeps its status
        except terminal.Unwritten as lost:
            return terminal.status_of_lost_stream(lost)


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help") or words == ["help"]:
        print(verbs.overview(), end="")
        return 0
    if words[0] in ("-V", "--version"):
        print(f"vramsweep {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name == "help":
        name, rest = next((word for word in rest if not word.startswith("-")), "help"), ["--help"]
    name = verbs.ALIASES.get(name, name)
    verb = verbs.BY_NAME.get(name)
    if verb is None and ("=" in name or name.startswith("--")):
        key = name.partition("=")[0]  # its value may be a secret
        raise UserError(f"{key}: a command comes first, as in `vramsweep predict model=gpt2`; see `vramsweep help`")
    if verb is None and name not in verbs.INTERNAL:
        raise UserError(suggestions.no_such_value(name, "command", name, verbs.BY_NAME))
    own = rest[: rest.index("--")] if "--" in rest else rest
    if verb is not None and verb.settings and verbs.NO_CACHE in own:
        os.environ[file_names.CACHE] = ""
        rest.remove(verbs.NO_CACHE)
    try:
        if verb is not None and {"-h", "--help", "--help-all"} & set(own):
            print(verb.help(whole="--help-all" in own), end="")
            return 0
        side = verbs.ANALYSIS if verb is None else verb.side
        _stands_in_a_folder()
        if verb is not None and verb.settings:
            from vramsweep.harness.config import typed_words  # light, but no verb's help needs it

            typed_words.refuse_bare_model(own)
        if verb is not None and verb.reads_rows and (not verb.settings or len(rest) == 1):
            sweep_folder.refuse_missing(rest, verb.side == verbs.ANALYSIS, verb.name == "report")
        if verb is not None and verb.settings:
            parser = verb.parser()
            rest, notes = typed_words.understand(name, rest, parser)
            parser.parse_known_args(rest)  # refuses an option's value before the verb itself is imported
            if notes:
                print(f"note: {'; '.join(notes)}", file=sys.stderr)
        return cast(int, importlib.import_module(f"vramsweep.{side}.cli").main([name, *rest]))
    except ModuleNotFoundError as error:  # an environment of the user's own (VENV=) that lacks something
        if error.name is None or error.name.split(".")[0] in ("vramsweep", "hydra_plugins"):
            raise
        print(f"vramsweep: {suggestions.missing_package(error.name, name)}", file=sys.stderr)
        return 2


def _stands_in_a_folder() -> None:
    """Raise UserError if the current folder is gone: relative names mean nothing there, and Hydra asks for it."""
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(f"the current folder cannot be found ({error.strerror}); cd to one that exists") from None


if __name__ == "__main__":
    sys.exit(main())
