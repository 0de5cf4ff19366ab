"""Completion of a command line of `sweep` or `plan`: what a word could become. Not covered: the shell's part (the verb
`completion`)."""

from __future__ import annotations

from collections.abc import Sequence

import hydra.version
from hydra.plugins.completion_plugin import DefaultCompletionPlugin

from vramsweep.harness import overrides, settings


def complete(words: Sequence[str], word: str) -> list[str]:
    """What `word` could become after `words` of `sweep` or `plan`: options, groups, settings, values, files.

    Raises UserError for words that are no overrides.
    """
    hydra.version.setbase("1.3")
    args, parser = overrides.parse(words, "run")
    if word.startswith("-"):
        flags = ["--json", *(flag for action in parser._actions for flag in action.option_strings)]
        return [flag for flag in flags if flag.startswith(word)]
    key, equals, value = word.partition("=")
    done, comma, last = value.rpartition(",")  # a list is completed at its last value: allocator=default,ex
    named = settings.values(key)
    if equals and named and key not in overrides.options():
        found = [f"{key}={value}" for value in named if value.startswith(last)]
    else:
        line = " ".join([*(["-m"] if args.multirun else []), *args.overrides, f"{key}={last}" if comma else word])
        with overrides.explained(args.overrides):
            found = DefaultCompletionPlugin(overrides.loader(args))._query(args.config_name or "config", line)
        if key in overrides.AUTO and equals and "auto".startswith(last):
            found = [f"{key}=auto", *found]
    if comma:
        found = [f"{key}={done},{one.partition('=')[2]}" for one in found]
    return [one for one in found if not one.startswith("hydra") or word.startswith("hydra")]
