"""The environment variables that a worker gets, and those that its row records: one table, pure functions.

Rank variables of an outer launcher would make a worker wait for ranks that never come, and some switches falsify the
measurement. Neither is passed on. Of the others, a row records those that can change memory or speed. A secret, known
by its variable's name or its form, is passed on, because a hub needs its token, but never recorded.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from typing import Literal

from vramsweep.harness.files import redaction


@dataclass(frozen=True)
class Rule:
    """A fate for all names that match one of `names`, and the reason.

    `drop`: not passed on; `hide`: passed on, never recorded; `record`: passed on and recorded.
    """

    fate: Literal["drop", "hide", "record"]
    why: str
    names: tuple[str, ...]


# The variables that hold torch's allocator settings; every supported torch reads the second.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

SECRET = "may be a secret"
# The first matching rule decides. A variable without a rule is passed on and not recorded. redaction.py knows the names
# of secrets.
_WORDS = json.loads(Path(__file__).with_name("worker_environment.json").read_text("utf-8"))
RULES = tuple(Rule(one["fate"], one["why"], tuple(one["names"])) for one in _WORDS)

# compiled once, when a fork server imports this, because otherwise each of its workers would compile them
_PATTERNS = tuple((r, re.compile("|".join(map(translate, r.names)))) for r in RULES)


def rule(name: str) -> Rule | None:
    """Return the rule for a variable, None if there is none."""
    found = (r for r, has in _PATTERNS if (redaction.secret_kind(name) if r.why == SECRET else has.match(name)))
    return next(found, None)


def _has(name: str, fate: str) -> bool:
    found = rule(name)
    return found is not None and found.fate == fate


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that a worker gets."""
    return {name: text for name, text in environ.items() if not _has(name, "drop")}


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker's environment that its row records, by name, without values that look secret."""
    found = {name: environ[name] for name in sorted(environ) if _has(name, "record")}
    return {name: text for name, text in found.items() if not redaction.suspicious(text)}


def secrets(environ: Mapping[str, str]) -> list[str]:
    """Return the values that may be secrets, the longest first because one may contain another."""
    named = {text for name, text in environ.items() if redaction.is_secret(text, name, redaction.secret_kind(name))}
    return sorted((text for text in named if len(text) >= redaction.SHORTEST), key=len, reverse=True)


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that asks no hub for anything, and could not say who asks."""
    hubs = {f"{whose}_OFFLINE": "1" for whose in ("HF_HUB", "TRANSFORMERS", "HF_DATASETS")}
    nobody = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "HF_TOKEN_PATH": "/dev/null"}
    return {name: text for name, text in environ.items() if not redaction.secret_kind(name)} | hubs | nobody


def describe_dropped(environ: Mapping[str, str]) -> list[str]:
    """Return a line for each reason for which variables of this environment are not passed on."""
    names: dict[str, list[str]] = {}
    for name in sorted(environ):
        if (found := rule(name)) and found.fate == "drop":
            names.setdefault(found.why, []).append(name)
    return [f"workers do not get {', '.join(those)}, because {why}" for why, those in names.items()]
