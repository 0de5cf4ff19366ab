"""The front door: `vramsweep VERB`, also `python -m vramsweep VERB` and, in a checkout, `python -m harness VERB`.

Verbs that run something are the harness's, verbs that read rows the analysis's; neither imports the other.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from vramsweep import __version__
from vramsweep.harness import extras
from vramsweep.harness.terminal import escaped

HARNESS = {
    "sweep": "run a sweep: Hydra's command line, -m for a multirun",
    "run": "sweep a command of your own, as it is: run seq_len=512,1024 -- python train.py --len {seq_len}",
    "plan": "list a sweep's trials, the impossible ones with reasons, what they are predicted to need, and a time",
    "predict": "predict memory on a card that need not be here: seq_len=1..2048, a table of what fits",
    "advise": "which changes make a run fit on a card, what each costs, and which to take together",
    "explain": "what takes the memory of a predicted run, part by part, and why it does not fit",
    "status": "how far a running or finished sweep is",
    "check": "may a results folder be published, memory and speed, and why not",
    "doctor": "check machine, driver, torch build, disk and foreign GPU processes",
    "techniques": "settings that trade memory, time or exactness: what each needs, how far it is proven",
    "cards": "the cards that device.gpu can name: memory, capability, peaks",
    "columns": "what the columns of a row mean",
    "timeline": "what a predicted step holds from event to event: one trial, or a sweep's largest",
    "validate": "predict runs that others measured and published, and show how far off that is",
    "replay": "replay a recording of PyTorch's allocator under other settings",
    "completion": "print a shell script that completes verbs and settings: completion bash",
}
ANALYSIS = {
    "report": "figures, tables and report of a sweep",
    "fit": "fit peak memory or speed against sequence length",
    "frontier": "the largest length per batch, or batch per length, that fits",
    "compare": "compare two sets of rows",
    "calibrate": "correct the estimated speed of simulated rows by measured rows",
    "paper": "a folder with PDF figures, LaTeX tables, CSV, methods text and environment",
    "export": "the tidy table as CSV or Parquet",
    "track": "log a finished sweep to an experiment tracker",
    "errors": "tables and figure of what validate predicted",
    "draw": "draw the data of timeline --json as a page",
}

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


def completion(words: Sequence[str]) -> int:
    """`completion bash` prints the script; `completion query LINE` is what the script asks.

    A query prints what the line's last word could become, one a line; nothing where the shell should offer files.
    """
    if list(words) == ["bash"]:
        print(BASH, end="")
        return 0
    if len(words) != 2 or words[0] != "query":
        asked = bool(set(words) & {"-h", "--help"})
        text = 'completion of verbs, settings and values in bash: eval "$(vramsweep completion bash)"'
        print(text if asked else f"vramsweep: {text}", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    before, _, word = words[1].rpartition(" ")
    try:
        earlier = shlex.split(before)[1:]
    except ValueError:  # inside quotes
        return 0
    if not earlier:
        found = [verb for verb in (*HARNESS, *ANALYSIS) if verb.startswith(word)]
    elif earlier[0] in ("sweep", "run", "plan", "predict", "advise", "explain", "timeline"):
        from vramsweep.harness import cli as harness

        implied = ["-m", "device=simulated"] if earlier[0] in ("predict", "advise", "explain") else []
        if earlier[0] == "run":
            if "--" in earlier:  # its own words follow
                return 0
            implied = ["-m", "runner=script", "runner.command=x"]
        found = harness.complete([*implied, *earlier[1:]], word)
    else:
        found = []
    print("\n".join(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status. A user's mistake is printed without a traceback, and gives 2."""
    with escaped():
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: vramsweep VERB [ARGUMENT ...]\n")
        for name, text in {**HARNESS, **ANALYSIS}.items():
            print(f"  {name:<10} {text}")
        print("\nvramsweep VERB --help tells more; vramsweep --version prints the version")
        return 0
    verb = words[0]
    if verb in ("-V", "--version"):
        print(f"vramsweep {__version__}")
        return 0
    try:
        if verb == "completion":
            return completion(words[1:])
        if verb in HARNESS:
            from vramsweep.harness import cli as harness

            return harness.main(words)
        if verb in ANALYSIS:
            from vramsweep.analysis import cli as analysis

            return analysis.main(words)
    except ModuleNotFoundError as error:  # an environment of the user's own (VENV=) that lacks something
        if error.name is None or error.name.split(".")[0] in ("vramsweep", "hydra_plugins"):
            raise
        print(f"vramsweep: {extras.missing(error.name, verb)}", file=sys.stderr)
        return 2
    print(f"vramsweep: there is no verb {verb!r}; verbs: {', '.join([*HARNESS, *ANALYSIS])}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
