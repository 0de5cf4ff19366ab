"""`vramsweep run ... -- COMMAND`: a sweep of a command of the user's own, as runner=script.

All else is as in other sweeps: words (run_words.py), rows and folder (run_trials.py). command_template.py defines the
placeholders; runners/scripts/launch_command.py runs the command, and runners/scripts/observer.py watches it.
"""

import re
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from vramsweep.harness.config import compose, overrides, typed_words
from vramsweep.harness.config.typed_words import QUOTED, split_values, value
from vramsweep.harness.files import redaction
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions.largest_prediction import MOST_BATCH
from vramsweep.harness.spec import command_template
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import plan
from vramsweep.harness.sweep.session import Session
from vramsweep.harness.verbs import run_words
from vramsweep.harness.verbs.cli import read_parser

_SHELL = re.compile(r"&&|\|\||[|;<>&`]|\$[\w({]")
_FUNCTION = re.compile(r"(choice|range|interval|sort|shuffle|tag|glob)\(.*\)")  # functions of Hydra


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep run`; return the exit status of its sweep. Raises UserError for a mistake."""
    before, dashes, command = _apart(argv)
    options, rest = read_parser("run").parse_known_args(before)
    if not command:
        what = "no command follows --" if dashes else "the command must follow --"
        raise UserError(f"{what}, as in: vramsweep run seq_len=512,1024 -- python train.py --max_len {{seq_len}}")
    if options.largest is not None:
        rest = ["sweep=frontier", *_search(rest, options.largest)]
    given = words(rest, command)
    if options.dry_run:
        with tempfile.TemporaryDirectory() as place:  # because Hydra writes there in any case
            return _show(compose.resolve([*given, f"hydra.sweep.dir={value(place)}"], "run"))
    return run_words.run_sweep(given, "run")


def words(before: Sequence[str], command: Sequence[str]) -> list[str]:
    """Translate the command line to words of `vramsweep sweep`. A setting only of the command becomes its option.

    Raises UserError for words that would not reach the command, or not as they were meant.
    """
    text = command[0] if len(command) == 1 else shlex.join(command)  # one word if the user quoted the whole command
    told = command_template.placeholder_names(text)
    ours = {*Trial.model_fields, *plan.SETTINGS, *overrides.options()}
    given = [word.partition("=")[0] for word in before]
    if mistake := next(_wrong(before, command, text, told, ours), None):
        raise UserError(mistake)
    own = told - ours
    found = [_option(word) if name in own else word for word, name in zip(before, given, strict=True)]
    if "device" not in given:
        device = "cuda" if compose.detect() == "cuda" else "cpu"
        if device == "cpu":
            why = "no usable CUDA device: measuring on device=cpu; gpu=h100-80gb predicts for that GPU instead"
            print(why, file=sys.stderr)
        found.append(f"device={device}")
    elif "device=simulated" in before and "device.gpu" not in given:
        print(
            "no GPU is named: predicting for h100-80gb, whose workspaces of cuBLAS are 24 MiB a handle larger than "
            "those of other generations; gpu=NAME predicts for another GPU",
            file=sys.stderr,
        )
    return ["-m", "runner=script", f"runner.command={value(text)}", *found]


def _wrong(
    before: Sequence[str], command: Sequence[str], text: str, told: Collection[str], ours: Collection[str]
) -> Iterator[str]:
    """Yield what is wrong with the words themselves, before they are used."""
    yield from filter(None, map(redaction.secret_problem, [*before, text]))
    bare = QUOTED.sub("", text)
    if len(command) == 1 and (sign := _SHELL.search(bare)):
        yield f"{sign[0]} needs a shell, and the command starts without one; use: -- bash -c {shlex.quote(text)}"
    mute = set(ours) - {*command_template.UNSAID, *command_template.TOLD, *command_template.NODES}
    for name in sorted(mute & set(told)):
        yield f"{{{name}}}: vramsweep does not pass its own setting {name} to a command; use another name"
    for word in before:
        name = word.partition("=")[0]
        if name in command_template.GIVEN:
            given = command_template.GIVEN[name]
            yield f"{word}: vramsweep itself sets {{{name}}} ({given}); use another name for your own setting"
        if name in command_template.UNSAID and name not in told:
            yield (
                f"{word} does not reach the command: write {{{name}}} where the command takes it, or "
                f"{{{name}:VALUE=TEXT:...}} if the command has other names for the values"
            )
        if name == "model" or (name.startswith("model.") and name != "model.name"):
            yield f"{word} does not reach the command, which builds its own model; use another name and a placeholder"


def _search(before: Sequence[str], name: str) -> Iterator[str]:
    """Yield the words with the range of the setting to search, as Hydra reads it. Raises UserError for no numbers."""
    given = [word for word in before if word.partition("=")[0] == name]
    numbers = typed_words.list_numbers(given[-1] if given else f"{name}=1..{MOST_BATCH}")
    steps = {b - a for a, b in pairwise(numbers)}
    yield from (word for word in before if word not in given)
    yield f"{name}=range({numbers[0]},{numbers[-1] + 1},{steps.pop() if len(steps) == 1 else 1})"


def _option(word: str) -> str:
    """Return a setting of the user's own as Hydra reads it: each of its values as typed, and so a text."""
    name, _, typed = word.partition("=")
    each = () if _FUNCTION.fullmatch(typed) else map(str.strip, split_values(typed))
    several = [one if QUOTED.fullmatch(one) else value(one) for one in each] or [typed]
    return f"+runner.options.{name}={','.join(several)}"


def _apart(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, False, []
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


def _show(asked: Session) -> int:
    """Print the command of every trial, with the allocator's variable, or why it cannot run; return the exit status."""
    planned, folder = asked.trials, asked.folder.resolve()
    for item in planned:
        if item.trial is None:
            print(f"# cannot run: {item.reason}")
            continue
        conf = item.trial.allocator_variable()
        variable = f"PYTORCH_CUDA_ALLOC_CONF={shlex.quote(conf)} " if conf else ""
        place = own_files(folder) / "attempts" / item.trial_id / "1" / command_template.OUTPUT
        print(f"{variable}{shlex.join(command_template.command_words(item.trial, str(place)))}")
    return 2 if planned and all(item.trial is None for item in planned) else 0
