"""Changes of a trial that may make it fit: what each sets, and how it alters the training's result.

A new change is an entry in memory_savings.json. A prediction tells whether one helps (questions/advice.py). The rules
of settings and techniques tell which of them a trial can have (spec/trial.py).
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# How much of the result may change, from nothing noticeable to another training.
SAME, ROUNDING, PRECISION, METHOD = range(4)
GPU_COUNTS = (2, 4, 8)
ACCEPTED = ("same", "rounding", "precision", "method")  # the same levels as words of a command
LEVELS = ("the same result", "the same except for rounding", "less precision", "another training method")


@dataclass(frozen=True)
class MemorySaving:
    """A change, as it is typed. A trial can have one of each `group`.

    `change` are values of the resolved trial. `level` says how much of the result they change, and `result` what; "" if
    nothing. On GPUs below `capability` it is left out, with the reason `instead`. It is also left out if `where` is
    false of the resolved trial, in which it would change nothing.
    """

    words: str
    group: str
    change: Mapping[str, Any] = field(hash=False)
    level: int
    result: str = ""
    capability: tuple[int, int] | None = None
    instead: str = ""
    where: Callable[[Mapping[str, Any]], bool] = field(default=lambda resolved: True, compare=False)


def _read(entry: dict[str, Any], lists: Mapping[str, Sequence[Any]]) -> MemorySaving:
    """Return the change of an entry of memory_savings.json: `only` for these values of a trial, and `never` for those.

    A text in place of values names one of the `lists`.
    """
    change, capability = entry["change"], entry.get("capability")
    only, never = ({key: lists[of] if isinstance(of, str) else of for key, of in entry.get(name, {}).items()}
                   for name in ("only", "never"))  # fmt: skip

    def where(resolved: Mapping[str, Any]) -> bool:
        known = {**resolved, "allocator.conf": resolved["allocator"]["conf"]}  # which another allocator would lose
        return all(known[key] in of for key, of in only.items()) and not any(known[key] in never[key] for key in never)

    words = entry.get("words") or " ".join(f"{key}={str(value).lower()}" for key, value in change.items())
    return MemorySaving(
        words, next(iter(change)), change, ACCEPTED.index(entry["level"]), entry.get("result", ""),
        capability and tuple(capability), entry.get("instead", ""), where,
    )  # fmt: skip


_TABLE = json.loads(Path(__file__).with_name("memory_savings.json").read_text("utf-8"))
REMEDIES: tuple[MemorySaving, ...] = tuple(_read(entry, _TABLE["lists"]) for entry in _TABLE["changes"])


def applicable(resolved: Mapping[str, Any]) -> list[MemorySaving]:
    """Return the changes that alter this resolved trial, including smaller batches of the same sum."""
    fixed = [one for one in REMEDIES if any(not _has(resolved, key, value) for key, value in one.change.items())]
    able = (one for one in fixed if one.where(resolved))
    return [*_batches(resolved), *(_without_cache(one) if resolved["use_cache"] == "on" else one for one in able)]


def divide_among_gpus(resolved: Mapping[str, Any], way: str) -> list[MemorySaving]:
    """Return changes to `way` of sharding on as many GPUs as the trial has and on more, the fewest first.

    A step's samples stay if the GPUs can share them; else each has as many as one had. Its own layout is left out.
    """
    ranks, batch, passes = (int(resolved[key]) for key in ("world_size", "micro_batch", "grad_accum"))
    found = []
    for count in dict.fromkeys((ranks, *GPU_COUNTS)):
        if count < 2 or count % ranks or (count, way) == (ranks, resolved["sharding"]):
            continue
        fewer = math.gcd(passes, count // ranks)  # divide passes first, then samples
        rest = count // ranks // fewer
        same = batch % rest == 0
        shared = {"micro_batch": batch // rest, "grad_accum": passes // fewer} if same else {}
        change = {"world_size": count, "sharding": way, **{k: n for k, n in shared.items() if n != resolved[k]}}
        result = f"{count} GPUs" if same else f"{count} GPUs, and {count // ranks} times the samples per step"
        text = " ".join(f"{key}={value}" for key, value in change.items())
        found.append(MemorySaving(text, "gpus", change, ROUNDING if same else METHOD, result))
    return found


def too_old(one: MemorySaving, capability: tuple[int, int]) -> str | None:
    """Return why a GPU of this compute capability is too old for the change; None if it is not."""
    if one.capability is None or capability >= one.capability:
        return None
    return f"{one.instead}, and the GPU has {capability[0]}.{capability[1]}"


def apply_changes(resolved: Mapping[str, Any], remedies: Iterable[MemorySaving]) -> dict[str, Any]:
    """Return the resolved trial with these changes."""
    found = dict(resolved)
    for one in remedies:
        found |= one.change
    return found


def words(given: Sequence[str], remedies: Iterable[MemorySaving]) -> list[str]:
    """Return a command's words with those of the changes, which replace words for the same settings."""
    more = [word for one in remedies for word in one.words.split()]
    keys = {word.partition("=")[0] for word in more}
    return [*(word for word in given if word.partition("=")[0] not in keys), *more]


def _without_cache(one: MemorySaving) -> MemorySaving:
    """Return the change; if it is checkpointing, also turn the cache off, because checkpointing needs that."""
    if one.group != "checkpointing":
        return one
    return replace(one, words=f"{one.words} use_cache=off", change={**one.change, "use_cache": "off"})


def _has(resolved: Mapping[str, Any], key: str, value: Any) -> bool:
    found = resolved.get(key)
    return found == value if not isinstance(value, Mapping) else value.items() <= dict(found or {}).items()


def _batches(resolved: Mapping[str, Any]) -> list[MemorySaving]:
    """Return changes to the same samples a step in more passes: half, a quarter and one at a time."""
    batch, passes = int(resolved["micro_batch"]), int(resolved["grad_accum"])
    sizes = [size for size in (batch // 2, batch // 4, 1) if 1 <= size < batch and batch % size == 0]
    changes = ({"micro_batch": size, "grad_accum": passes * batch // size} for size in dict.fromkeys(sizes))
    return [MemorySaving(" ".join(f"{key}={n}" for key, n in one.items()), "batch", one, ROUNDING) for one in changes]
