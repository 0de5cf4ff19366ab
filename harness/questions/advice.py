"""Advice on a trial: predictions of changes that save memory, alone and together, and how far each gets.

In: a trial, and where to predict. Out: `Advice` and reached limits. Every figure is its own prediction, a row of the
folder's sweep.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.questions.fit_prediction import find_need
from vramsweep.harness.questions.largest_prediction import MOST_BATCH
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.search import advice_search, axis_search
from vramsweep.harness.search.advice_search import ROUNDING, Advice, MemorySaving, Option
from vramsweep.harness.spec.fit_text import communication_bytes, describe_padding
from vramsweep.harness.spec.shardings import WHOLE
from vramsweep.harness.sweep import plan, run_trials
from vramsweep.harness.sweep.plan import Planned, Settings

MOST_POSITIONS = 1 << 17  # for a model that does not say how many it has
SECONDS = ("calibrated_step_s", "estimated_step_s")  # compared times are of one kind, that of the unchanged run


@dataclass(frozen=True)
class ReachedLimit:
    """Largest value of the goal's axis that an option reaches; None if nothing fits or nothing is known."""

    option: Option
    value: int | None


@dataclass
class AdviceRequest:
    """A request for advice: a trial, the axis of the goal, and where variants are predicted."""

    base: Planned
    settings: Settings
    folder: Path
    launcher: Launcher
    axis: str | None = None
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        assert self.base.trial is not None  # else the sweep would not have begun
        self.trial, self.limit = self.base.trial, self.base.trial.memory_limit()
        self.settings = dataclasses.replace(self.settings, report=False)
        self.seconds, self.padding = SECONDS[0], ""
        self._earlier: list[Planned] = []

    @property
    def start(self) -> int:
        """Value of the goal's axis in the trial."""
        return int(self.base.resolved[self.axis or "seq_len"])

    @property
    def most(self) -> int:
        """Largest value of the goal's axis that is tried."""
        positions = self.trial.model.max_positions or MOST_POSITIONS
        return max(self.start, positions if self.axis == "seq_len" else MOST_BATCH)

    def at(self, value: int) -> None:
        """Give the trial this value of the goal's axis from now on."""
        self.base = self.planned((), value)
        assert self.base.trial is not None
        self.trial = self.base.trial

    def planned(self, remedies: Sequence[MemorySaving], value: int | None = None) -> Planned:
        """Plan the trial with these changes; the plan has no trial if they contradict each other."""
        more = {} if value is None or self.axis is None else {self.axis: value}
        [[found]] = plan.expand_trials([advice_search.apply_changes(self.base.resolved | more, remedies)], 1)
        return found

    def predict(self, taken: Sequence[tuple[MemorySaving, ...]], values: Sequence[int] | None = None) -> list[Option]:
        """Predict each set of changes, at its value of the goal's axis; each is a row of the folder's sweep."""
        points = [None] * len(taken) if values is None else values
        planned = [self.planned(remedies, value) for remedies, value in zip(taken, points, strict=True)]
        todo = list({item.trial_id: item for item in planned if item.trial is not None}.values())
        rows: dict[str, Row] = {}
        if todo:
            rows, _ = run_trials.run(
                todo, self.settings, self.folder, self._earlier, self.launcher, command=self.command
            )
            self._earlier += todo
        found = [rows.get(item.trial_id) for item in planned]
        if () in taken:
            base = found[taken.index(())] or {}
            self.seconds = next((name for name in SECONDS if base.get(name)), SECONDS[0])
            self.padding = describe_padding(self.trial, base) or ""
        return [option(*one, self.seconds) for one in zip(taken, planned, found, strict=True)]

    def reach(self, options: Sequence[Option]) -> list[ReachedLimit]:
        """Return how far each option gets along the goal's axis."""

        def needs(asked: Mapping[int, list[int]]) -> dict[int, dict[int, int | None]]:
            taken = [options[number].remedies for number in asked]
            found = self.predict(taken, [value for [value] in asked.values()])
            points = zip(asked.items(), found, strict=True)
            return {number: {value: one.beyond(self.limit)} for (number, [value]), one in points}

        searches = [
            axis_search.SecantSearch(self.start, self.most, self.limit, {self.start: one.beyond(self.limit)})
            for one in options
        ]
        axis_search.drive(searches, needs)
        return [ReachedLimit(one, search.found()) for one, search in zip(options, searches, strict=True)]


def ask_predictions(asked: AdviceRequest, level: int, most: int) -> tuple[Advice, list[ReachedLimit]]:
    """Return advice on changes up to `level`; for a goal along an axis also how far each option gets.

    For such a goal, options are compared at a value that the unchanged run does not reach: there memory must be saved.
    Several GPUs are tried if the run does not fit; for a goal along an axis, if no option reaches any value.
    """
    axis = asked.axis
    if axis is not None:
        [base] = asked.predict([()])
        if base.need is not None:
            [first] = asked.reach([base])
            if first.value is not None:
                asked.at(min(asked.most, max(asked.start, axis_search.grid_floor(axis_search.MOST * first.value))))
    every = advice_search.applicable(asked.base.resolved)
    remedies = [one for one in every if axis not in one.change and one.level <= level]
    reasons = {one: advice_search.too_old(one, asked.trial.device.card.capability) for one in remedies}
    able = [one for one in remedies if reasons[one] is None]
    found = advice_search.search(able, asked.predict, asked.limit, most, axis is not None)
    left_out = [Option((one,), None, None, reason) for one, reason in reasons.items() if reason is not None]
    found = dataclasses.replace(found, singles=(*found.singles, *left_out))
    if found.base.need is None:
        return found, []
    reached = [] if axis is None else asked.reach(found.least)
    if not (found.base.fits_well(asked.limit) if axis is None else best(reached)):
        found = dataclasses.replace(found, on_gpus=tuple(predict_on_gpus(asked, found, level)))
        reached += [] if axis is None else asked.reach(found.fitting_gpus)
    return found, reached


def predict_on_gpus(asked: AdviceRequest, found: Advice, level: int) -> list[Option]:
    """Predict the trial divided among more and more GPUs until it fits well, from its own number of GPUs on.

    The last try adds the changes that save most memory without changing the result.
    """
    trial, options = asked.trial, list[Option]()
    way = "zero3" if trial.runner.name == "deepspeed" else "fsdp2"
    changes = advice_search.divide_among_gpus(asked.base.resolved, way if trial.sharding in WHOLE else trial.sharding)
    alone = [(one,) for one in changes if one.level <= level and asked.axis not in one.change]
    together = [*alone[-1]] if alone else []
    for one in found.smallest_same if alone else ():
        apart = not any(one.change.keys() & other.change.keys() for other in together)
        if apart and asked.planned([*together, one]).trial is not None:
            together.append(one)
    for taken in (*alone, *([tuple(together)] if len(together) > 1 else ())):
        if any(one.fits_well(asked.limit) for one in options):
            break
        options += asked.predict([taken])
    return options


def option(remedies: tuple[MemorySaving, ...], item: Planned, row: Row | None, seconds: str = SECONDS[0]) -> Option:
    """Return the option that a row shows for these changes; its time is from column `seconds`. `row` may be None."""
    if item.trial is None or row is None:
        return Option(remedies, None, None, item.reason or "the prediction did not finish")
    need, tokens = find_need(row), item.trial.tokens_per_step()
    full = row["outcome"] in (Outcome.OOM, Outcome.HOST_OOM)
    reason = str(row["reason"]) if need is None or row["outcome"] == Outcome.HOST_OOM else None
    if need is None:
        return Option(remedies, None, None, reason, full)
    step = row.get(seconds)
    work = ((row.get("estimated_flops") or 0) / tokens, (row.get("estimated_launches") or 0) / tokens)
    least, beside = row.get("peak_reserved_bytes"), communication_bytes(item.trial)
    return Option(remedies, need, step and step / tokens, reason, full, work, least, beside)


def best(reached: Sequence[ReachedLimit]) -> ReachedLimit | None:
    """Return the furthest of those that change rounding at most, else of the lowest level; least change wins ties."""
    known = [one for one in reached if one.value is not None]
    least = min((max(ROUNDING, one.option.level) for one in known), default=ROUNDING)
    known = [one for one in known if one.option.level <= least]
    return max(known, key=lambda one: (one.value or 0, -one.option.level, -len(one.option.remedies)), default=None)
