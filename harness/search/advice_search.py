"""Changes of a trial that may make it fit, and the search for those to combine. Pure.

A new change is an entry in memory_savings.json: what it sets, and how it alters the training's result. The rules of
settings and techniques tell which changes a trial can have (spec/trial.py).

The search finds the front of memory against time, and a recommendation. In: single changes, and a function that
predicts combinations of them (questions/advice.py). Out: `Advice`.
"""

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

# How much of the result may change, from nothing noticeable to another training.
SAME, ROUNDING, PRECISION, METHOD = range(4)
GPU_COUNTS = (2, 4, 8)
ACCEPTED = ("same", "rounding", "precision", "method")  # the same levels as words of a command
LEVELS = ("the same result", "the same except for rounding", "less precision", "another training method")
MOST = 32  # combinations that are predicted at most, unless the user asks for more
WAVE = 8  # combinations predicted at a time, before the best is determined again


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


@dataclass(frozen=True)
class Option:
    """Some changes together and their prediction: bytes reserved, seconds a token; None if not known.

    `reason` says why it is not known, or that the host's memory ran out. `full`: memory ran out, however little of the
    GPU's it would need without a limit. `least`: bytes reserved if the CPU does not run ahead. `beside`: bytes of each
    GPU that may be needed besides, which no prediction includes. `work` orders options without times: FLOPs a token,
    then kernel launches a token.
    """

    remedies: tuple[MemorySaving, ...]
    need: int | None
    seconds: float | None
    reason: str | None = None
    full: bool = False
    work: tuple[float, float] = (0.0, 0.0)
    least: int | None = field(default=None, compare=False)
    beside: int = field(default=0, compare=False)

    @property
    def level(self) -> int:
        """Largest level of the changes: how much of the result changes, at most."""
        return max((one.level for one in self.remedies), default=SAME)

    def fits(self, limit: int) -> bool:
        """Return whether the option is known to fit in `limit` bytes."""
        return self.need is not None and not self.full and self.need <= limit

    def fits_well(self, limit: int) -> bool:
        """Return whether it fits with one percent of the limit, or what may be needed besides if more, to spare."""
        return self.fits(limit - max(limit // 100, self.beside))

    def beyond(self, limit: int) -> int | None:
        """Return the need, if it tells whether the option fits; else None."""
        return self.need if self.fits(limit) or (self.need or 0) > limit else None


Mix = tuple[MemorySaving, ...]  # changes that are made together
Predict = Callable[[Sequence[Mix]], list[Option]]
Guess = Callable[[Mix], Option]


@dataclass(frozen=True)
class Advice:
    """The result of a search. `singles` are each change alone, `tried` all options; `space` counts combinations.
    `on_gpus` are options of more GPUs, or of dividing the work among them, which count only if no other fits."""

    base: Option
    singles: tuple[Option, ...]
    tried: tuple[Option, ...]
    space: int
    limit: int
    on_gpus: tuple[Option, ...] = ()

    @property
    def front(self) -> list[Option]:
        """Fitting options that no other beats in both memory and time, the fastest first. Repeats count once."""
        return front([one for one in self.tried if one.fits(self.limit)])

    @property
    def recommended(self) -> Option | None:
        """Fastest of the options that fit and change the result least; None if nothing fits.

        Those that fit well come before those that only just fit.
        """
        fitting = [one for one in self.tried if one.fits(self.limit)] or self.fitting_gpus
        return min(fitting, key=lambda one: (one.level, not one.fits_well(self.limit), _order_key(one)), default=None)

    @property
    def fitting_gpus(self) -> list[Option]:
        """Options of more GPUs that fit, the fewest GPUs first."""
        return [one for one in self.on_gpus if one.fits(self.limit)]

    @property
    def nearest(self) -> Option | None:
        """Option that needs least memory, whether or not it fits."""
        known = [one for one in (*self.tried, *self.on_gpus) if one.need is not None]
        return min(known, key=_size, default=None)

    @property
    def smallest_same(self) -> Mix:
        """Changes of the option that needs least memory with the same result."""
        known = [one for one in self.tried if one.need is not None and one.level == SAME]
        return min(known, key=_size).remedies if known else ()

    @property
    def least(self) -> list[Option]:
        """Unchanged run, and the two options up to each level that need least memory: one of them may get furthest."""
        found = [self.base]
        for level in range(len(LEVELS)):
            own = [one for one in self.tried if one.level <= level and one.need is not None]
            found += sorted(own, key=_size)[:2]
        return list({one.remedies: one for one in found}.values())


def search(
    remedies: Sequence[MemorySaving], predict: Predict, limit: int, most: int = MOST, smallest: bool = False
) -> Advice:
    """Predict the unchanged run, each change alone, and at most `most` combinations of changes whose need is known.

    If there are no more, predict all, so that the recommendation is on the front of all. Else predict first, in each
    level, those that the multiplied effects of single changes promise to be the fastest that fit. In levels in which
    nothing fits yet (`smallest`: in all), the smallest come too. Then predict what differs in one change from the best
    so far. Once a peak is gone another remains, for which changes help that alone did nothing, or harm.
    """
    [base] = predict([()])
    if base.need is None and not base.full:
        return Advice(base, (), (base,), 1, limit)
    singles = predict([(one,) for one in remedies])
    known = [one for one in singles if one.need is not None]
    combinations = [taken for taken in _combinations(known) if len(taken) > 1]
    guess = _guesses(base, known)
    tried = {one.remedies: one for one in (base, *singles)}

    def look(wanted: Sequence[Mix]) -> None:
        tried.update((one.remedies, one) for one in (predict(wanted) if wanted else []))

    if len(combinations) <= most:
        look(combinations)
    else:
        before = (base.need, base.seconds, base.work)
        idle = {one.remedies[0] for one in known if (one.need, one.seconds, one.work) == before}
        busy = [taken for taken in combinations if not idle.intersection(taken)]
        levels = [] if smallest else [one.level for one in (base, *known) if one.fits(limit)]
        fitting = min(levels, default=len(LEVELS))  # above all levels if nothing is known to fit
        look(_promising(busy, guess, fitting, limit)[: most - most // 2])
        left = most // 2
        while near := _near(list(tried.values()), combinations, guess, limit, smallest)[: min(left, WAVE)]:
            look(near)
            left -= len(near)
    return Advice(base, tuple(singles), tuple(tried.values()), 1 + len(singles) + len(combinations), limit)


def front(options: Sequence[Option]) -> list[Option]:
    """Return the options that no other beats in memory and time, the fastest first; of equal ones the least change."""
    found: list[Option] = []
    least = math.inf
    for one in sorted(options, key=lambda one: (_time(one), one.need or 0, one.level, len(one.remedies))):
        if one.need is not None and one.need < least:
            found.append(one)
            least = one.need
    return found


def _combinations(singles: Sequence[Option]) -> Iterator[Mix]:
    """Yield combinations with at most one change of each group, and no two changes of the same setting."""
    groups: dict[str, list[MemorySaving]] = defaultdict(list)
    for one in singles:
        groups[one.remedies[0].group].append(one.remedies[0])
    for taken in itertools.product(*([None, *group] for group in groups.values())):
        found = tuple(one for one in taken if one is not None)
        keys = [key for one in found for key in one.change]
        if len(keys) == len(set(keys)):
            yield found


def _guesses(base: Option, singles: Sequence[Option]) -> Guess:
    """Return a function that guesses what several changes do together: their effects alone, multiplied."""
    of = {one.remedies[0].words: one for one in singles}

    def ratio(one: float | None, before: float | None) -> float | None:
        return one / before if one is not None and before else None

    def guess(taken: Mix) -> Option:
        need, seconds, work = float(base.need or 0), base.seconds, list(base.work)
        for one in (of[remedy.words] for remedy in taken):
            need *= ratio(one.need, base.need) or 1
            slower = ratio(one.seconds, base.seconds)
            seconds = None if seconds is None or slower is None else seconds * slower
            work = [now * (ratio(own, was) or 1) for now, own, was in zip(work, one.work, base.work, strict=True)]
        return Option(taken, round(need), seconds, work=(work[0], work[1]))

    return guess


def _promising(combinations: Sequence[Mix], guess: Guess, fitting: int, limit: int) -> list[Mix]:
    """Return the combinations worth predicting first. Levels take turns: each gives the fastest that may fit, and below
    the level `fitting`, from which on something fits, also the smallest."""
    guesses = [guess(taken) for taken in combinations]
    queues: list[list[Option]] = []
    for level in sorted({one.level for one in guesses}):
        own = [one for one in guesses if one.level == level]
        near = [one for one in own if one.fits(round(1.15 * limit))]
        queues.append(sorted(near, key=_order_key))
        if level < fitting:
            queues.append(sorted(own, key=_size))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    return list(dict.fromkeys(one.remedies for one in turns if one is not None))


def _near(tried: Sequence[Option], combinations: Sequence[Mix], guess: Guess, limit: int, smallest: bool) -> list[Mix]:
    """Return untried combinations that differ in one group from the best of each level, the most promising first. The
    best is the fastest that fits, and the smallest if nothing fits (`smallest`: anyway)."""
    known = [one for one in tried if one.need is not None]
    done = {one.remedies for one in tried}
    fast: list[Option] = []
    small: list[Option] = []
    for level in sorted({one.level for one in known}):
        own = [one for one in known if one.level <= level]
        fits = sorted((one for one in own if one.fits(limit)), key=_order_key)
        fast += fits[:1]
        small += [] if fits and not smallest else [min(own, key=_size)]
    queues = []
    for one, order in dict.fromkeys([*((one, _order_key) for one in fast), *((one, _size) for one in small)]):
        mine = set(one.remedies)  # from which the next ones differ in one group
        left = (taken for taken in combinations if taken not in done)
        steps = (taken for taken in left if len({remedy.group for remedy in mine ^ set(taken)}) == 1)
        queues.append(sorted(steps, key=lambda taken: order(guess(taken))))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    return list(dict.fromkeys(taken for taken in turns if taken is not None))


def _order_key(one: Option) -> tuple[Any, ...]:
    """Return a sort key: the fastest first."""
    return _time(one), len(one.remedies), one.need or 0


def _size(one: Option) -> tuple[Any, ...]:
    """Return a sort key: the smallest first."""
    return one.need or 0, len(one.remedies)


def _time(one: Option) -> tuple[float, float, float]:
    return (math.inf if one.seconds is None else one.seconds, *one.work)
