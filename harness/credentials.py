"""Secrets in texts: is there one, what is it called, the text without it. Pure: texts in, texts out.

What is typed, recorded or told by an error is written into the results, which are published. A secret is known by the
name it is given, by the form that services give theirs, by its place in an address, or, where the environment has it
under such a name, by itself. Not covered: one that has none of these, and what a worker or a script writes of its own
accord (its logs, its own files).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

SHORTEST = 8  # letters of a secret that is looked for by itself: a shorter one would be found in anything
WRITTEN = "***"
_NAME = (
    r"(?:[\w-]*\.)*token|[\w.-]*?(?:(?:hub|hf|auth|access|api|bearer|wandb|git\w*)[_-]?token|passw(?:or)?d|secret|"
    r"(?:api|access|secret)[_-]?key)"
)
# A name with its value; one from the environment or of a switch is none.
_NAMED = re.compile(
    rf"(?<![\w.-])(?P<name>(?P<dashes>--?)?(?:{_NAME}))"
    r"(?:=|(?(dashes)\s+|(?!)))[\"']?(?P<value>(?![-${=]|(?:true|false|yes|no|none|null|\d)(?:[\s\"']|$))[^\s\"']+)",
    re.IGNORECASE,
)
_FORMED = re.compile(
    r"\b(?P<value>(?P<name>hf_)[A-Za-z0-9]{16,}|(?P<gh>gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-)[\w-]{16,}|"
    r"sk-(?:proj-|ant-|svcacct-|or-v1-)[\w-]{20,}|sk-(?=[A-Za-z]*\d)(?=[a-z0-9]*[A-Z])[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_ADDRESS = re.compile(r"://(?P<value>[^/\s:@]*:[^/\s@]+|[^/\s:@]{16,})@")  # user:password@, or a token in its place
_QUERY = re.compile(
    r"[?&](?P<name>[\w.-]*(?:token|(?:api|access|secret)[_-]?key|secret|signature|passw(?:or)?d)|key|sig|auth)=(?P<value>[^&\s\"']+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\bbearer\s+(?P<value>[\w.~+/=-]{8,})", re.IGNORECASE)
_ALL = (_NAMED, _FORMED, _ADDRESS, _QUERY, _BEARER)
_KEY = re.compile(rf"(?:{_NAME})", re.IGNORECASE)  # of a dictionary
_ANYONE = re.compile(r"://[^/\s]*@")
_RANDOM = re.compile(r"(?=[\w+=-]*[A-Za-z])(?=(?:[A-Za-z_+=-]*\d){4})[\w+=-]{32,}", re.ASCII)
_UUID = re.compile(r"(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@lru_cache(maxsize=1024)  # the texts of a sweep's trials are nearly all the same ones
def said(text: str) -> str | None:
    """What to say where a text holds a password or the like: all that is typed is written down."""
    found = next((match for pattern in _ALL if (match := pattern.search(text))), None)
    if found is None:
        return None
    given = found.groupdict().get("name")
    name = {_FORMED: f"{given}..." if given else "a token", _ADDRESS: "the user:password@ of an address",
            _BEARER: "a bearer token"}.get(found.re, given)  # fmt: skip
    variable = re.sub(r"\W", "_", (given or "").strip("-.").rpartition(".")[2].upper())
    if found.re is _FORMED or re.fullmatch(r"(AUTH_)?TOKEN|.*_?HUB_TOKEN", variable):
        variable = "HF_TOKEN"
    how = f"as {variable}" if given else "or from a file"
    return f"{name} would be written into the results; let the script read it from the environment, {how}"


def suspicious(text: str) -> bool:
    """Whether a variable's value may hold a secret, whatever the variable is called; a card's uuid is none."""
    return bool(_ANYONE.search(text) or said(text) or _RANDOM.search(_UUID.sub("", text)))


def masked(text: str, known: Collection[str] = ()) -> str:
    """The text with the secrets in it, and those that are `known`, written as ***."""
    for secret in known:
        text = text.replace(secret, WRITTEN)
    for pattern in _ALL:
        text = pattern.sub(_without, text)
    return text


def _without(match: re.Match[str]) -> str:
    low, high = (at - match.start() for at in match.span("value"))
    return f"{match[0][:low]}{WRITTEN}{match[0][high:]}"


def cleaned(value: Any, known: Collection[str] = ()) -> Any:
    """The same for all texts in plain data, and of what a dictionary has under a secret's name."""
    if isinstance(value, str):
        return masked(value, known)
    if isinstance(value, Mapping):
        return {
            key: WRITTEN if isinstance(inner, str) and inner and _KEY.fullmatch(str(key)) else cleaned(inner, known)
            for key, inner in value.items()
        }
    return [cleaned(inner, known) for inner in value] if isinstance(value, (list, tuple)) else value


def holds(value: Any, known: Collection[str]) -> bool:
    """Whether plain data holds one of the `known` secrets. Places do not count: a folder of keys is no key."""
    if isinstance(value, str):
        return any(secret in value for secret in known if not secret.startswith("/"))
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(holds(one, known) for one in inner)


def found(value: Any) -> str | None:
    """What to say of plain data that holds one, as `said` of a text; None where there is none."""
    if isinstance(value, str):
        return said(value)
    if value is None or isinstance(value, (int, float)):
        return None
    if isinstance(value, Mapping):
        named = (f"{key}={inner}" for key, inner in value.items() if isinstance(inner, str))
        return next(filter(None, (*map(said, named), *map(found, value.values()))), None)
    return next(filter(None, map(found, value)), None) if isinstance(value, (list, tuple)) else None
