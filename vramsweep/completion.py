"""`vramsweep completion bash`: the script that a shell reads, and what it asks (`completion query LINE`).

Verbs and flags come from the registry of verbs, settings and their values from conf/ (harness/completion.py).
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from vramsweep.harness.errors import UserError
from vramsweep.verbs import BY_NAME, VERBS

# bash splits words at = and : as well, and wants only what follows; the whole word is what we complete.
BASH = r"""_vramsweep() {
    local line="${COMP_LINE:0:COMP_POINT}" cur="${COMP_WORDS[COMP_CWORD]}" IFS=$'\n' word head
    [[ $cur == [=:] ]] && cur=""
    word="${line##* }"
    head="${word%"$cur"}"
    COMPREPLY=($(vramsweep completion query "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]#"$head"}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=./] ]] || compopt +o nospace 2>/dev/null
}
complete -o default -o nospace -F _vramsweep vramsweep
"""
# What a verb says before the words that it is given, so that what may follow is known.
_IMPLIED = {
    "run": ["-m", "runner=script", "runner.command=x"],
    **{verb: ["-m", "device=simulated"] for verb in ("predict", "advise", "explain")},
}


def main(words: Sequence[str]) -> int:
    """The verb: the script, or a query's answers, one a line; none where the shell should offer files."""
    asked = BY_NAME["completion"].parser().parse_args(list(words))
    print(BASH if asked.what == "bash" else "\n".join(candidates(asked.typed or "")), end="")
    return 0


def candidates(line: str) -> list[str]:
    """What the last word of a line, which begins with `vramsweep`, could become."""
    before, _, word = line.rpartition(" ")
    try:
        earlier = shlex.split(before)[1:]
    except ValueError:  # inside quotes
        return []
    if not earlier or earlier == ["help"]:
        return [verb.name for verb in VERBS if verb.name.startswith(word)]
    verb = BY_NAME.get(earlier[0])
    if verb is None or (verb.name == "run" and "--" in earlier):  # the command's own words follow
        return []
    own = _own(verb.parser(), earlier[-1], word)
    if not verb.settings:
        return own
    from vramsweep.harness import cli

    given = earlier[1:]
    if verb.name not in ("sweep", "plan"):  # whose parser is Hydra's
        try:
            given = verb.parser().parse_known_args(given)[1]
        except UserError:  # such as a flag whose value is being typed
            return own
    found = cli.complete([*_IMPLIED.get(verb.name, []), *given], word)
    return own + [one for one in found if one not in own]


def _own(parser: argparse.ArgumentParser, before: str, word: str) -> list[str]:
    """Of a verb's own parser: flags, and values of the flag before or of a word that is one of some."""
    flag = parser._option_string_actions.get(before)
    if word.startswith("-"):
        found = list(parser._option_string_actions)
    elif flag is not None and flag.choices is not None:
        found = list(map(str, flag.choices))
    elif flag is not None and flag.nargs != 0:  # it takes a value that is none of a list
        return []
    else:
        found = [str(one) for action in parser._get_positional_actions() for one in action.choices or ()]
    return [one for one in found if one.startswith(word)]
