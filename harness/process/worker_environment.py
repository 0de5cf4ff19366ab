"""Which environment variables a worker gets, and which of them its row records: one table, pure functions.

What an outer launcher says about ranks would make a worker wait for others who never come, and some switches falsify
what is measured: neither is passed on. Of the rest a row records what can change memory or speed. A secret is passed on
(a hub wants its token) and never recorded, known by the variable's name or by what its value looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate
from pathlib import Path

from vramsweep.harness.files import redaction


class Fate(StrEnum):
    """What happens to a variable."""

    DROP = "drop"  # not passed on
    HIDE = "hide"  # passed on, never recorded
    RECORD = "record"  # passed on and recorded


@dataclass(frozen=True)
class Rule:
    """A fate for all names that match one of `names`, and why."""

    fate: Fate
    why: str
    names: tuple[str, ...]


# By which torch is told the allocator's settings; every supported one reads the second.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")

SECRET = "may be a secret"
# The first rule that matches decides; what none matches is passed on and not recorded. Secrets are known by names that
# redaction.py has, too.
_WORDS = json.loads(Path(__file__).with_name("worker_environment.json").read_text("utf-8"))
RULES = tuple(Rule(Fate(one["fate"]), one["why"], tuple(one["names"])) for one in _WORDS)

# compiled when a template imports this: its workers would each do it again
_PATTERNS = tuple((r, re.compile("|".join(map(translate, r.names)))) for r in RULES)


def rule(name: str) -> Rule | None:
    """The rule for a variable, None if there is none."""
    found = (r for r, has in _PATTERNS if (redaction.secret_kind(name) if r.why == SECRET else has.match(name)))
    return next(found, None)


def _has(name: str, fate: Fate) -> bool:
    found = rule(name)
    return found is not None and found.fate is fate


def select_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment a worker gets."""
    return {name: text for name, text in environ.items() if not _has(name, Fate.DROP)}


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What of a worker's environment its row records, by name."""
    found = {name: environ[name] for name in sorted(environ) if _has(name, Fate.RECORD)}
    return {name: text for name, text in found.items() if not redaction.suspicious(text)}


def secrets(environ: Mapping[str, str]) -> list[str]:
    """The values that may be secrets, the longest first: one may hold another."""
    named = {text for name, text in environ.items() if redaction.is_secret(text, name, redaction.secret_kind(name))}
    return sorted((text for text in named if len(text) >= redaction.SHORTEST), key=len, reverse=True)


def unknown(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that asks no hub for anything, and could not say who asks."""
    hubs = {f"{whose}_OFFLINE": "1" for whose in ("HF_HUB", "TRANSFORMERS", "HF_DATASETS")}
    nobody = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "HF_TOKEN_PATH": "/dev/null"}
    return {name: text for name, text in environ.items() if not redaction.secret_kind(name)} | hubs | nobody


def describe_dropped(environ: Mapping[str, str]) -> list[str]:
    """A line for each reason for which variables of this environment are not passed on."""
    names: dict[str, list[str]] = {}
    for name in sorted(environ):
        if (found := rule(name)) and found.fate is Fate.DROP:
            names.setdefault(found.why, []).append(name)
    return [f"workers do not get {', '.join(those)}: {why}" for why, those in names.items()]
