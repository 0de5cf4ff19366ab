"""What to say to a mistyped command line: what was wrong, what is allowed, what to type. Pure: text from data."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

# Below these keys lie dictionaries that are handed on as they are, so that any name may be added with a "+".
OPEN = ("runner.options", "model.config", "versions")


def closest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that was probably meant, or None: for `warmup_steps` also `protocol.warmup_steps`."""
    names = list(allowed)
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if found:
        return found[0]
    tails = {full.rpartition(".")[2]: full for full in reversed(names)}
    found = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1, cutoff=0.8)
    return tails[found[0]] if found else None


def unknown_option(group: str, option: str, allowed: Iterable[str]) -> str:
    """`model=llama9`: a config group has no such option."""
    names = sorted(set(allowed))
    listed = f"allowed: {', '.join(names)}"
    if not option:
        return f"{group}= names no {group}; {listed}"
    return f"{group}={option}: there is no such {group}; {listed}{_meant(option, names)}"


def unknown_key(key: str, override: str | None, beside: Iterable[str], everywhere: Iterable[str]) -> str:
    """`modle=tiny`: no such setting. `beside` are the names where it was looked for, `everywhere` all keys in full."""
    value = (override or "").partition("=")[2]
    said = (override or key).lstrip("+~")
    parent, _, name = key.rpartition(".")
    names = sorted(set(beside))
    near = closest(name, names)
    if any(f"{key}.".startswith(f"{place}.") for place in OPEN):
        question = f"did you mean {parent}.{near}? Or " if near else ""
        return f"{said}: {parent} has no {name!r} yet; {question}type +{key}={value or 'VALUE'} to add it"
    meant: str | None
    if parent:
        meant = f"{parent}.{near}" if near else closest(name, everywhere)
        what = f"{parent} has no {name!r}" if names else f"{parent} is one value, it has no {name!r}"
        listed = f"; allowed: {', '.join(names)}" if names else ""
    else:
        meant = near or closest(name, everywhere)
        what = f"there is no setting {name!r}"
        listed = "" if meant else f"; allowed: {', '.join(names)}"
    return f"{said}: {what}{listed}" + (f"; did you mean {meant}?" if meant else "")


def unreadable(override: str, options: Mapping[str, Sequence[str]]) -> str:
    """An override that Hydra's grammar does not take; `options` are those of each config group."""
    key, equals, value = override.partition("=")
    if not equals:
        group = next((group for group, names in options.items() if override in names), None)
        meant = f"; did you mean {group}={override}?" if group else ""
        return f"{override}: settings are given as KEY=VALUE{meant}"
    if not key.strip("+~"):
        return f"{override}: there is no key before the ="
    if _open(value):
        return f"{override}: a bracket or a quote is not closed; in a shell quote the whole: '{key}=...'"
    return f"{override}: a value with such characters needs quotes; type {quoted(key, value)}"


def several_values(override: str) -> str:
    """`seq_len=1,2` for a run of one trial."""
    key, _, value = override.partition("=")
    swept = "range(" in value or "choice(" in value or "interval(" in value
    text = "" if swept else f", or, as one text, {quoted(key, value)}"
    return f"{override} has several values: add -m to sweep over them{text}"


def unquoted_settings(override: str) -> str:
    """`allocator.conf=a:1,b:2`: Hydra takes the comma as the end of a value, with -m and without."""
    key, _, value = override.partition("=")
    each = ",".join(f'"{part}"' for part in value.split(","))
    return (
        f"{override}: without quotes the comma separates two values; for one setting type {quoted(key, value)}\n"
        f"  and to sweep over {value.count(',') + 1} settings, with -m, '{key}={each}'"
    )


def quoted(key: str, value: str) -> str:
    """The override as one types it in a shell, the value one text."""
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f"'{key}=\"{inner}\"'"


def _meant(name: str, allowed: Iterable[str]) -> str:
    near = closest(name, allowed)
    return f"; did you mean {near}?" if near else ""


def _open(value: str) -> bool:
    return any(value.count(a) != value.count(b) for a, b in ("()", "[]", "{}")) or any(
        value.count(quote) % 2 for quote in "'\""
    )
