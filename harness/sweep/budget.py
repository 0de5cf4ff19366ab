"""The expected time and cost of trials, and whether one may still start within the user's budget.

It learns from rows: the time of the nearest trial of the same configuration, scaled by tokens. The clock is that of
this command; the time of earlier commands of the sweep is not counted. Not covered: retries and the waits before them,
and that trials of several slots run at once.
"""

import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from vramsweep.harness.hardware.gpu_lookup import peak_of
from vramsweep.harness.messages.units import duration_words, parse_limit
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_identity import key_without, node_name
from vramsweep.harness.sweep.plan import Planned, Settings

START_S = 2.0  # to start the process and build the model of a trial of which nothing is known
TRACE_S = 10.0  # of a simulated configuration; 7 to 8 s for models of 0.5 and 8 billion parameters on two CPU cores
REACHED = 1 / 3  # of a GPU's published peak, which a step is assumed to reach before anything is known of it
PREDICTED_S = 0.1  # of each prediction, once its configuration is traced
# Trials that differ only in these are of one configuration.
AXES = ("seq_len", "micro_batch", "grad_accum", "seed", "repeat", "protocol", "fingerprints")


@dataclass(frozen=True)
class Expected:
    """Seconds that one or several trials will take (None if unknown), and the basis of that estimate."""

    seconds: float | None
    basis: str


class Budget:
    """The limit of what a sweep may still start. `began_s` is when the command began by `clock`; without it, it is now.

    `rows_so_far` are rows of trials on this system; `flops` (FLOP/s) is the speed assumed before there are any.
    """

    def __init__(
        self,
        settings: Settings,
        rows_so_far: Iterable[Row] = (),
        clock: Callable[[], float] = time.monotonic,
        began_s: float | None = None,
        flops: float | None = None,
    ) -> None:
        self._limit = parse_limit(settings.budget, settings.max_cost, settings.price_per_hour)
        self._price = settings.price_per_hour
        self._timeout = settings.timeout_s
        self._began = clock() if began_s is None else began_s
        self._flops = flops
        self._of: dict[str, _Took] = {}
        self._predicted: dict[str, _Took] = {}
        self._of_predictions = ""
        self._any = _Took()
        self._spent: list[float] = []
        self.refused: dict[str, str] = {}  # reasons by trial id; one that may start after all is removed
        self.learn(rows_so_far)

    def allows(self, item: Planned, now_s: float) -> str | None:
        """Return None if the trial may start now, else the reason in words. `now_s` is the clock's reading.

        One of which nothing is known may start as long as there is time, because its row informs about the others.
        """
        why = None if self._limit is None or item.trial is None else self._against(item, now_s, *self._limit)
        if why is None:
            self.refused.pop(item.trial_id, None)
        else:
            self.refused[item.trial_id] = why
        return why

    def _against(self, item: Planned, now_s: float, allowed: float, name: str) -> str | None:
        if (left := allowed - (now_s - self._began)) <= 0:
            return f"{name} is spent"
        expected = self.total([item])
        if expected.seconds is None or expected.seconds <= left:
            return None
        needed = f"it would take {duration_words(expected.seconds)} ({expected.basis})"
        return f"{name}: {duration_words(left)} left, but {needed}"

    def learn(self, rows: Iterable[Row]) -> None:
        """Learn from the rows of trials that have ended; each row says which trial it is of."""
        for row in rows:
            resolved: Any = row.get("trial")
            if (spent := row.get("duration_s")) is None:
                continue
            self._spent.append(spent)
            work = _work(resolved) if isinstance(resolved, Mapping) else None
            if row.get("outcome") != "ok" or work is None:  # it ended before its time
                continue
            parameters, start = row.get("parameters") or 0, min(row.get("overhead_s") or 0.0, spent)
            self._of.setdefault(configuration(resolved), _Took()).add(work, spent, start)
            if parameters > 0 and node_name(resolved, "device") != "simulated":
                self._any.add(work * parameters, spent, start)

    def learn_step(self, item: Planned, step_s: float, gpu: str) -> None:
        """Learn the estimated step time in seconds of a trial that would run on `gpu`, for all of its configuration."""
        if item.trial is not None and (work := _work(item.resolved)) is not None:
            spent = START_S + step_s * item.trial.steps()
            self._predicted.setdefault(configuration(item.resolved), _Took()).add(work, spent, START_S)
            self._of_predictions = f"from estimated step times on {gpu}"

    def expected(self, item: Planned) -> Expected:
        """Return what one trial will take; 0 s if it cannot run. For a simulated one, without the shared trace."""
        trial = item.trial
        if trial is None:
            return Expected(0.0, "it cannot run")
        work, simulated = _work(item.resolved), trial.device.name == "simulated"
        same = self._of.get(configuration(item.resolved))
        if same is not None and work is not None:
            return self._capped(same.scaled(work), "from a trial of the same configuration")
        if simulated:
            return Expected(PREDICTED_S, f"rough: {PREDICTED_S:g} s per prediction")
        own = self._predicted.get(configuration(item.resolved))
        if own is not None and work is not None:
            return self._capped(own.scaled(work), self._of_predictions)
        parameters = trial.model.parameters or 0
        if self._any and work is not None and parameters > 0:
            return self._capped(self._any.scaled(work * parameters), "from a trial of another configuration")
        if self._spent:
            return self._capped(fmean(self._spent), f"from the mean of {len(self._spent)} finished trials")
        if self._flops is None or parameters <= 0:
            return Expected(None, "no trial has finished yet, and parameter count or device speed is unknown")
        spent = START_S + trial.steps() * flops_per_step(trial, parameters) / self._flops
        return self._capped(spent, f"rough, at {self._flops / 1e12:.2g} TFLOP/s")

    def _capped(self, spent: float, basis: str) -> Expected:
        return Expected(min(spent, self._timeout), basis)

    def total(self, items: Iterable[Planned]) -> Expected:
        """Return what trials will take one after the other, with a trace for each simulated configuration."""
        items = list(items)
        each = [self.expected(item) for item in items]
        if (unknown := next((one for one in each if one.seconds is None), None)) is not None:
            return unknown
        traced = {configuration(p.resolved) for p in items if p.trial and p.trial.device.name == "simulated"}
        bases = list(dict.fromkeys(one.basis for one, item in zip(each, items, strict=True) if item.trial))
        if traced:
            bases.append(f"{len(traced)} x {TRACE_S:g} s to trace, typical of 0.5 to 8 billion parameters")
        spent = sum(one.seconds or 0.0 for one in each) + TRACE_S * len(traced)
        return Expected(spent, ", ".join(bases) or "nothing to do")

    def cost(self, spent_s: float | None) -> float | None:
        """Return what so many seconds of the node cost; None without a price."""
        return None if spent_s is None or self._price is None else spent_s / 3600 * self._price

    def left_out(self, wanted: int, answered: Iterable[str]) -> str | None:
        """Describe in a line how many of the `wanted` trials the budget left undone; None if there are none."""
        undone = self.refused.keys() - set(answered)
        if not undone or self._limit is None:
            return None
        were = "trial was" if wanted == 1 else "trials were"
        return f"{self._limit[1]}: {len(undone)} of {wanted} {were} not started; run the same command again to resume"


def flops_per_step(trial: Trial, parameters: int) -> float:
    """Return 6 FLOP per parameter and token of one rank (Kaplan et al. 2020)."""
    varying = length_distribution.has_varying_lengths(trial)
    tokens = length_distribution.tokens_per_step(trial) if varying else trial.tokens_per_step()
    return 6.0 * parameters * tokens / trial.world_size


def measuring_seconds(trial: Trial, row: Row | None, end: str = "") -> float | None:
    """Return the seconds that a simulated trial would take on its GPU; None if unknown. They come from its row's
    estimated step, else from its FLOPs at `REACHED` of the peak. `end` is "low_" or "high_": an end of the row's
    interval, which nothing replaces."""
    found = row or {}
    step_s = found.get(f"calibrated_step_{end}s") or (None if end else found.get("estimated_step_s"))
    peak, parameters = peak_of(trial.device.card, trial.precision), trial.model.parameters
    if step_s is None and not end and peak and parameters:
        step_s = flops_per_step(trial, parameters) / (REACHED * peak)
    steps = trial.protocol.warmup_steps + 1 + trial.protocol.measured_steps + 1 + trial.record
    return None if step_s is None else START_S + steps * step_s


class _Took:
    """Times of trials by their work, a number with which a trial's time grows; of equal ones the median."""

    def __init__(self) -> None:
        self._works: list[float] = []
        self._found: dict[float, list[tuple[float, float]]] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def add(self, work: float, spent: float, start: float) -> None:
        """Add a trial; `start` are the seconds of it that do not grow with the work."""
        if work not in self._found:
            insort(self._works, work)
        self._found.setdefault(work, []).append((spent, start))

    def scaled(self, work: float) -> float:
        """Return the seconds of a trial of this work, scaled from the work that is nearest in ratio."""
        at = bisect_left(self._works, work)
        near = min(self._works[max(0, at - 1) : at + 1], key=lambda one: abs(math.log(one / work)))
        return median(start + (spent - start) * work / near for spent, start in self._found[near])


def configuration(resolved: Mapping[str, Any]) -> str:
    """Return a key of what in a resolved trial is neither length nor batch, nor how often it is measured."""
    protocol = resolved.get("protocol")
    job = isinstance(protocol, Mapping) and protocol.get("job")
    return key_without({**resolved, "job": job}, *AXES)


def _work(resolved: Mapping[str, Any]) -> float | None:
    """Return the tokens that a trial sees: None if it does not say, 1 if simulated, because any take the same time."""
    if node_name(resolved, "device") == "simulated":
        return 1.0
    protocol = resolved.get("protocol")
    steps = [protocol.get(name) for name in ("warmup_steps", "measured_steps")] if isinstance(protocol, Mapping) else []
    axes = [resolved.get(name, 1) for name in ("seq_len", "micro_batch", "grad_accum", "world_size")]
    if not steps or not all(type(number) is int and number > 0 for number in (*steps, *axes)):
        return None
    every = sum(map(int, filter(None, steps))) + 2  # plus the probe, and the step that counts FLOPs
    return float(math.prod(axes)) * every
