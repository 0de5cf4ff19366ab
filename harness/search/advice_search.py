"""Search for memory-saving changes to combine: predictions, the front of memory against time, a recommendation. Pure.

In: single changes, and a function that predicts combinations of them. Out: `Advice`.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vramsweep.harness.search.memory_savings import LEVELS, SAME, MemorySaving

MOST = 32  # combinations that are predicted at most, unless the user asks for more
WAVE = 8  # combinations predicted at a time, before the best is determined again


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
