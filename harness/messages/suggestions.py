"""Answers to a mistyped command line or a missing package: what was wrong, what is allowed, what to type.

Text from data. Packages of single techniques are not listed here (spec/techniques/schema.py).
"""

import difflib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from vramsweep.harness.messages.errors import UserError

# Below these keys are dictionaries that are passed on as they are, so any name may be added with a "+".
OPEN = ("runner.options", "model.config", "versions")
MOST = 12  # names that a line lists at most
SETTINGS = "vramsweep sweep --help-all"
_SIZE = re.compile(r"\d+(?:\.\d+)?b(?![a-z0-9])")  # of a model: the 1.5b of qwen2.5-1.5b
_ID = re.compile(r"[0-9a-f]{8,}")  # of a trial
LISTED_BY = {"command": "vramsweep help", "GPU": "vramsweep gpus", "model": SETTINGS, "sweep": SETTINGS,
             "optimizer": "vramsweep techniques optimizer", "setting": "vramsweep techniques"}  # fmt: skip


def find_nearest(name: str, allowed: Iterable[str], most: int = 1) -> list[str]:
    """Return the allowed names that were probably meant, those of the same numbers and the closest first."""
    plain, lower = name.lower(), {full.lower(): full for full in reversed(_leave_out_sizes(name, allowed))}
    near = difflib.get_close_matches(plain, lower, n=len(lower) or 1, cutoff=0.6)
    near.sort(key=lambda one: re.findall(r"\d+", plain) not in ([], re.findall(r"\d+", one)))
    if not near and len(name) > 2:
        near = sorted((full for full in lower if plain in full), key=len)
    return [lower[one] for one in near[:most]]


def _leave_out_sizes(name: str, allowed: Iterable[str]) -> list[str]:
    """Return the names without models of another size, if the typed name says its size."""
    size, letters = ([] if _ID.fullmatch(name) else _SIZE.findall(name.lower())), re.sub(r"\W|_", "", name.lower())
    return [one for one in allowed if size in ([], _SIZE.findall(one.lower())) or re.sub(r"\W", "", one) == letters]


def find_closest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name that was probably meant, or None: for `warmup_steps` also `protocol.warmup_steps`."""
    names = _leave_out_sizes(name, allowed)
    if found := find_nearest(name, names):
        return found[0]
    tails = {full.rpartition(".")[2]: full for full in reversed(names)}
    last = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1, cutoff=0.8)
    return tails[last[0]] if last else None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean NAME?`, to end a sentence with, or nothing if no allowed name is close."""
    near = find_closest(name, allowed)
    return f"; did you mean {near}?" if near else ""


def list_allowed(name: str, allowed: Sequence[str], kind: str = "") -> str:
    """Return the end of a refusal: the guess, then what is allowed, or the command that lists it if that is much."""
    near, command = did_you_mean(name, allowed), LISTED_BY.get(kind)
    if kind == "model" and not near:
        family = re.split(r"[^a-z]", name.lower())[0] or "/"
        alike = ", ".join(one for one in allowed if one.startswith(family))
        near = f"{f'; built in are {alike}' * bool(alike)}; model=ORG/NAME names any model of the hub;"
    if command and len(allowed) > MOST:
        return f"{near or ';'} `{command}` lists all {len(allowed)}"
    return f"{f'{near} Allowed' if near else '; allowed'}: {', '.join(allowed)}"


def did_you_mean_path(path: Path) -> str:
    """Return `; did you mean PATH?` for a missing file or folder, by the names next to it; nothing if none is close."""
    try:
        beside = {one.name: one for one in islice(path.parent.iterdir(), 1000)}
    except (OSError, ValueError):
        return ""
    near = find_nearest(path.name, beside)
    return f"; did you mean {beside[near[0]]}?" if near else ""


def no_such_value(said: str, kind: str, name: object, allowed: Iterable[object]) -> str:
    """Say that there is no such `kind` as `said` names, what is allowed, and which was meant."""
    return f"{said}: there is no such {kind}{list_allowed(str(name), list(map(str, allowed)), kind)}"


def check_listed(said: str, kind: str, name: object, allowed: Iterable[object]) -> None:
    """Raise UserError, in the words of `no_such_value`, if `allowed` does not list the name."""
    if name not in (names := list(allowed)):
        raise UserError(no_such_value(said, kind, name, names))


def unknown_option(group: str, option: str, allowed: Iterable[str]) -> str:
    """Say that a config group has no such option: `model=llama9`."""
    names = sorted(set(allowed))
    if not option:
        return f"{group}= names no {group}{list_allowed('', names, group)}"
    return no_such_value(f"{group}={option}", group, option, names)


def unknown_key(key: str, override: str | None, beside: Iterable[str], everywhere: Iterable[str]) -> str:
    """Say that there is no such setting (`modle=tiny`). `beside`: names where it was looked for; `everywhere`: all."""
    value = (override or "").partition("=")[2]
    said = (override or key).lstrip("+~")
    parent, _, name = key.rpartition(".")
    names = sorted(set(beside))
    near = find_closest(name, names)
    if any(f"{key}.".startswith(f"{place}.") for place in OPEN):
        question = f"did you mean {parent}.{near}? Or " if near else ""
        return f"{said}: {parent} has no {name!r} yet; {question}type +{key}={value or 'VALUE'} to add it"
    if parent:
        wanted = f"{parent}.{near}" if near else find_closest(name, everywhere)
        what = f"{parent} has no {name!r}" if names else f"{parent} is one value and has no {name!r}"
        listed = f"llowed: {', '.join(names)}" if names else ""
    else:
        wanted = near or find_closest(name, everywhere)
        what, listed = f"there is no setting {name!r}", "" if wanted else f"ll are listed by {SETTINGS}"
    ending = f"; did you mean {wanted}?{listed and f' A{listed}'}" if wanted else listed and f"; a{listed}"
    return f"{said}: {what}{ending}"


def describe_unreadable(override: str, options: Mapping[str, Sequence[str]]) -> str:
    """Say what is wrong with an override that Hydra's grammar rejects; `options` are those of each config group."""
    key, equals, value = override.partition("=")
    if not equals:
        wanted = next((f"; did you mean {key}={override}?" for key, names in options.items() if override in names), "")
        return f"{override}: settings are given as KEY=VALUE{wanted}"
    if not key.strip("+~"):
        return f"{override}: there is no key before the ="
    unpaired = any(value.count(one) != value.count(other) for one, other in ("()", "[]", "{}"))
    if unpaired or any(value.count(quote) % 2 for quote in "'\""):
        return f"{override}: a bracket or a quote is not closed; in a shell, quote the whole setting: '{key}=...'"
    return f"{override}: a value with such characters needs quotes; type {quote_words(key, value)}"


def several_values(override: str) -> str:
    """Say that `seq_len=1,2` is too many where one configuration is shown (--cfg, --info), or wanted (--run)."""
    key, _, value = override.partition("=")
    return f"{override} has several values; give one, or quote them as one text: {quote_words(key, value)}"


def unquoted_settings(override: str) -> str:
    """Say how to quote `allocator.conf=a:1,b:2`: Hydra ends a value at the comma, with -m and without."""
    key, _, value = override.partition("=")
    each = ",".join(f'"{part}"' for part in value.split(","))
    one = f"{override}: without quotes the comma separates two values; for one value, type {quote_words(key, value)}"
    return f"{one}\n  and to sweep over {value.count(',') + 1} values, '{key}={each}'"


def quote_words(key: str, value: str) -> str:
    """Return the override as one types it in a shell, the value one text."""
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"'{key}=\"{inner}\"'"


# The imported modules of each extra of pyproject.toml, by their names in an import.
EXTRAS: dict[str, list[str]] = json.loads(Path(__file__).with_name("extras.json").read_text("utf-8"))
MEASURING = ("sweep", "run")  # verbs that need all of a sweep's packages


def find_extra(module: str) -> str:
    """Return the extra that brings a module; "" for one that no extra brings."""
    return next((extra for extra, modules in EXTRAS.items() if module.partition(".")[0] in modules), "")


def missing_package(module: str, verb: str = "") -> str:
    """Say in one line what to install for a missing module; for verbs that measure, all that a sweep needs."""
    name, extra = module.partition(".")[0], find_extra(module)
    if extra in ("predict", "sweep", "deepspeed") and verb in MEASURING:
        extra = "all"
    root = Path(__file__).resolve().parents[2]
    editable = (root / "pyproject.toml").is_file()  # a checkout: `harness` is at its top
    what = shlex.quote((str(root) if editable else "vramsweep") + (f"[{extra}]" if extra else ""))
    kept = ", which keeps an installed torch" if extra in ("predict", "sweep", "all") else ""
    return f"{name} is not installed; {sys.executable} -m pip install {'-e ' * editable}{what}{kept}"
