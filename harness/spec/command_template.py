"""The command of runner=script: its placeholders, its words for one trial, and its problems.

    python train.py --max_len {seq_len} --bs {micro_batch} {precision:bf16=--bf16:fp32=} --lr {lr} --out {output_dir}

A placeholder is a setting of the trial, one of `GIVEN`, or a name of the user's own (runner.options). With cases, each
after a colon, it stands for the text of the setting's value. Other braces are text; {{seq_len}} is {seq_len}.

Pure, except for checks that files exist.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramsweep.harness.files import redaction
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial_identity import ID_DEFAULTS

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

_PLACEHOLDER = re.compile(r"\{\{(?P<text>\w+)\}\}|\{(?P<name>[A-Za-z_]\w*)(?::(?P<cases>[^{}]*))?\}", re.ASCII)
OUTPUT = "output"  # the subfolder of an attempt's folder that {output_dir} stands for
# Names that are no settings, but are known once a trial starts.
GIVEN = {
    "steps": "the number of optimizer steps that are observed",
    "output_dir": "a folder of the attempt, for what the script writes",
}
# Settings that a command can be given, with the values that mean nothing was given; also in conf/runner/script.yaml.
UNSAID: dict[str, Any] = {
    **dict.fromkeys(("seq_len", "micro_batch"), 1),
    **{name: ID_DEFAULTS[(name,)] for name in ("grad_accum", "sharding", "offload_optimizer", "offload_param")},
    **{name: ID_DEFAULTS[(name,)] for name in ("zero_init", "ds_config")},
    **catalog.DEFAULTS,
    "precision": "fp32",
    **{name: ID_DEFAULTS[(name,)] for name in ("weights", "data", "seed")},
}
# Settings that a trial has whether or not the command is given them.
TOLD = ("world_size", "repeat")
NODES = ("allocator", "device")  # given by their names
# Suffixes of files whose content is part of the id, next to files that begin with #!: they decide how a script trains.
# Its data are not read for that. Files that it writes (a log, a checkpoint) would make every run another trial.
DECISIVE = (".py", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")
LARGEST = 1 << 20  # most bytes of such a file; a larger one is data
STARTERS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")  # programs that run a Python file


@dataclass(frozen=True)
class Placeholder:
    """One placeholder of a command; `cases` are texts by value, None if the value itself is meant."""

    name: str
    cases: Sequence[tuple[str, str]] | None


def placeholders(command: str) -> list[Placeholder]:
    """Return the placeholders of a command, in order."""
    return [_read(match) for match in _PLACEHOLDER.finditer(command) if match["name"]]


def placeholder_names(command: str) -> set[str]:
    """Return the names of a command's placeholders."""
    return {one.name for one in placeholders(command)}


def command_words(trial: Trial, output_dir: str) -> list[str]:
    """Return a trial's command, word by word. A word that is a placeholder with cases gives its text's words, or none.

    Raises ValueError for a command that cannot be read, and for a placeholder that the trial does not give;
    `command_problems` explains both in words.
    """
    values = _values(trial) | {"steps": trial.steps() + 1, "output_dir": output_dir}
    found: list[str] = []
    for word in shlex.split(str(trial.runner.command)):
        filled = _PLACEHOLDER.sub(lambda match: _text(match, values), word)
        alone = _PLACEHOLDER.fullmatch(word)
        if alone and alone["cases"] is not None:  # --bf16 True is two words
            found += shlex.split(filled)
        else:
            found.append(filled)
    return found


def command_files(trial: Trial) -> list[Path]:
    """Return the files of programs and settings that a trial's command names, as words or as --option=FILE."""
    try:
        every = command_words(trial, "")
    except ValueError:
        return []
    places = dict.fromkeys(Path(word.rpartition("=")[2]) for word in every)
    return [place for place in places if place.is_file() and _decides(place)]


def _decides(place: Path) -> bool:
    if place.stat().st_size > LARGEST or not os.access(place, os.R_OK):
        return False
    with place.open("rb") as file:
        return place.suffix in DECISIVE or file.read(2) == b"#!"


def program(command: str) -> str:
    """Return a command's name: its script or module, else its program."""
    try:
        every = shlex.split(command)
    except ValueError:
        every = command.split()
    if "-m" in every[:-1] and Path(every[0]).name.startswith("python"):
        return every[every.index("-m") + 1]
    scripts = [Path(word).stem for word in every if word.endswith(".py")]
    return scripts[0] if scripts else Path(every[0]).name if every else "command"


def without_python(command: str) -> str:
    """Return a command without its first word if that is a Python."""
    first, _, rest = command.partition(" ")
    return rest if rest and Path(first).name.startswith("python") else command


def unseen_settings(trial: Trial) -> set[str]:
    """Return the settings that the command is not given. They are unknown, whatever values the trial has."""
    return set(UNSAID) - placeholder_names(str(trial.runner.command))


def command_problems(trial: Trial) -> Iterator[str]:
    """Yield the problems of a trial's command, each with the way out."""
    command = trial.runner.command
    if not command or not command.strip():
        yield "runner=script needs a command: vramsweep run seq_len=512,1024 -- python train.py --max_len {seq_len}"
        return
    try:
        shlex.split(command)
    except ValueError as error:
        yield f"the command {command!r} cannot be read: {str(error).lower()}"
        return
    if said := redaction.secret_problem(command):
        yield said
    values = _values(trial)
    for one in placeholders(command):
        if one.name not in values and one.name not in GIVEN:
            near = suggestions.find_closest(one.name, [*UNSAID, *TOLD, *GIVEN])
            meant = f"; did you mean {{{near}}}?" if near else ""
            yield (
                f"the command has {{{one.name}}}, which has no value; give {one.name}=VALUE, or write "
                f"{{{{{one.name}}}}} for the text itself{meant}"
            )
        elif twice := _twice(one):
            yield f"the command's {{{one.name}:...}} has two texts for {one.name}={twice}; leave one out"
        elif one.cases is not None and one.name in values and _spelt(values[one.name]) not in dict(one.cases):
            value = _spelt(values[one.name])
            yield f"the command's {{{one.name}:...}} has no text for {one.name}={value}; add {value}=TEXT to it"
    told = placeholder_names(command)
    for name, default in UNSAID.items():
        value = getattr(trial, name)
        if value != default and name not in told:
            yield (
                f"{name}={_spelt(value)} does not reach the command; write {{{name}}} where the command takes it, or "
                f"{{{name}:{_spelt(value)}=TEXT}} if the command has another name for this value"
            )
    if unused := [name for name in trial.runner.options if name not in told]:
        yield f"{unused[0]} is given, but the command has no {{{unused[0]}}}; write it where the command takes it"
    first = shlex.split(command)[0]
    if not _PLACEHOLDER.search(first) and shutil.which(first) is None:
        hint = f"; a script starts with its interpreter: python {first} ..." if first.endswith(".py") else ""
        yield f"there is no program {first} to start{hint}"
    file = _file(shlex.split(command))
    if file is not None and not Path(file).is_file():
        yield f"there is no file {file}; the command runs in the folder that vramsweep is called in ({Path.cwd()})"


def _file(words: Sequence[str]) -> str | None:
    """Return the Python file that the command runs, as far as its words show it; else None."""
    if not words or not STARTERS.fullmatch(Path(words[0]).name) or {"-m", "-c"} & set(words):
        return None
    for before, word in pairwise(words):
        if word.endswith(".py") and "=" not in word:
            return None if before.startswith("--") or _PLACEHOLDER.search(word) else word
    return None


def _twice(one: Placeholder) -> str | None:
    """Return a value for which a placeholder has two texts; else None."""
    told = [value for value, _ in one.cases or ()]
    return next((value for value in told if told.count(value) > 1), None)


def _values(trial: Trial) -> dict[str, Any]:
    own = {name: getattr(trial, name) for name in (*UNSAID, *TOLD)}
    return own | {name: getattr(trial, name).name for name in NODES} | dict(trial.runner.options)


def _read(match: re.Match[str]) -> Placeholder:
    if match["cases"] is None:
        return Placeholder(match["name"], None)
    parts = (case.partition("=") for case in match["cases"].split(":"))
    return Placeholder(match["name"], [(value.strip(), text) for value, _, text in parts])


def _text(match: re.Match[str], values: Mapping[str, Any]) -> str:
    if match["text"]:
        return f"{{{match['text']}}}"
    one = _read(match)
    if one.name not in values:
        raise ValueError(f"{one.name} is not given")
    value = _spelt(values[one.name])
    if one.cases is None:
        return value
    texts = dict(one.cases)
    if value not in texts:
        raise ValueError(f"{one.name}={value} has no text")
    return texts[value]


def _spelt(value: Any) -> str:
    """Return a value as a command line has it."""
    return "" if value is None else catalog.text(value)
