"""From resolved configurations to an ordered list of trials: pure, apart from fingerprints of the files they name.

`SETTINGS` are the configuration's keys that say how a sweep is run; everything else in it is the trial.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramsweep.harness import trial as trials
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import succeeded
from vramsweep.harness.row import BY_NAME, Outcome, Row


@dataclass(frozen=True)
class Settings:
    """How the sweep is run; conf/config.yaml documents each."""

    name: str | None
    results: str
    repeats: int
    isolation: str
    timeout_s: float
    retries: int
    backoff_s: float
    retry_failed: bool
    report: bool
    action: str
    output: str

    def __post_init__(self) -> None:
        allowed = {"isolation": ("warm", "cold"), "action": ("run", "plan"), "output": ("text", "json")}
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                raise UserError(f"{key}={getattr(self, key)}: allowed is {' or '.join(values)}")
        least: dict[str, float] = {"repeats": 1, "timeout_s": 0.001, "retries": 0, "backoff_s": 0}
        for key, least_value in least.items():
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least_value:
                raise UserError(f"{key}={value}: allowed is a number of at least {least_value:g}")


SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))


@dataclass(frozen=True)
class Planned:
    """A trial to be, with its id; `trial` is None and `reason` says why where it cannot run."""

    trial_id: str
    resolved: dict[str, Any]
    trial: trials.Trial | None
    reason: str | None


def settings(configs: Sequence[Mapping[str, Any]]) -> Settings:
    """The sweep's settings, which must not differ from trial to trial. Raises UserError otherwise."""
    first = {key: configs[0][key] for key in SETTINGS}
    for config in configs[1:]:
        for key in SETTINGS:
            if config[key] != first[key]:
                raise UserError(f"{key} cannot be swept (it holds {first[key]} and {config[key]}); give it one value")
    return Settings(**first)


def expand(configs: Iterable[Mapping[str, Any]], repeats: int) -> list[list[Planned]]:
    """For each configuration its trials, one a repeat."""
    trial_values = [{k: v for k, v in config.items() if k not in SETTINGS} for config in configs]
    return [[_planned(values | {"repeat": repeat}) for repeat in range(repeats)] for values in trial_values]


def _planned(values: dict[str, Any]) -> Planned:
    try:
        trial = trials.parse(values)
    except trials.InvalidTrial as error:
        return Planned(trials.trial_id(values), values, None, str(error))
    resolved = trial.model_dump(mode="json")
    return Planned(trials.trial_id(resolved), resolved, trial, None)


def order(expanded: Iterable[Iterable[Planned]]) -> list[Planned]:
    """Every distinct trial, coarse to fine, so that a sweep cut short has the whole curve.

    By repeat, then by how early a halving of the range of lengths comes to the trial's length; impossible ones first.
    Among trials of one length those that share a template are together, and the templates come in turns forward and
    backward: where there is not room for all of them, the next length begins with those that are still alive.
    """
    planned = list({p.trial_id: p for trials_of_one in expanded for p in trials_of_one}.values())
    lengths = sorted({p.trial.seq_len for p in planned if p.trial})
    turn = {lengths[position]: n for n, position in enumerate(halving(len(lengths)))}
    number: dict[tuple[Any, ...], int] = {}
    for p in planned:
        if p.trial:
            number.setdefault(_template(p.trial), len(number))

    def place(p: Planned) -> tuple[int, int, int]:
        if p.trial is None:
            return -1, 0, 0
        repeat, at, template = p.trial.repeat, turn[p.trial.seq_len], number[_template(p.trial)]
        return repeat, at, template if (repeat * len(lengths) + at) % 2 == 0 else -template

    return sorted(planned, key=place)


def worker_conf(trial: trials.Trial) -> str:
    """PYTORCH_CUDA_ALLOC_CONF of a trial's worker. A simulated allocator is not torch's: "" whatever its settings."""
    return "" if trial.device.name == "simulated" else trial.allocator.conf


def _template(trial: trials.Trial) -> tuple[Any, ...]:
    """What decides which template a trial's worker is forked from: runner, environment and visible GPUs."""
    return trial.runner.name, trial.device.name, trial.runner.world_size, worker_conf(trial)


def halving(count: int) -> list[int]:
    """Positions 0..count-1 in the order of a halving: the last, the first, then middles of ever smaller gaps.

    The longest comes first because it fails first: memory too small, deadline too short.
    """
    if count < 2:
        return list(range(count))
    order = [count - 1, 0]
    gaps = [(0, count - 1)]
    while gaps:
        following = []
        for low, high in gaps:
            if high - low > 1:
                middle = (low + high) // 2
                order.append(middle)
                following += [(low, middle), (middle, high)]
        gaps = following
    return order


def pending(planned: Iterable[Planned], finished: Mapping[str, Row], retry_failed: bool) -> list[Planned]:
    """The trials without a terminal row; with `retry_failed` also those whose terminal row is a failure."""
    return [p for p in planned if p.trial_id not in finished or (retry_failed and not succeeded(finished[p.trial_id]))]


def axes(planned: Planned) -> Row:
    """The axis columns of a row. A value that does not fit its column (an invalid trial's) is left to `trial`."""
    flat = dict(planned.resolved)
    runner = flat.get("runner")
    nested = {name: flat.get(name) for name in ("model", "allocator", "device", "protocol")}
    values: Row = {
        **{key: value for key, value in flat.items() if key in BY_NAME},
        **({k: v for k, v in runner.items() if k in BY_NAME} if isinstance(runner, Mapping) else {}),
        **{name: value.get("name") if isinstance(value, Mapping) else None for name, value in nested.items()},
        "runner": runner.get("name") if isinstance(runner, Mapping) else None,
        "simulated_gpu": (nested["device"] or {}).get("gpu"),
        "allocator_conf": (nested["allocator"] or {}).get("conf"),
        "parameters": (nested["model"] or {}).get("parameters"),
        "optimizer": None,  # what was asked for is in `trial`; the column says what ran
        "trial": json.loads(json.dumps(flat, default=str)),
    }
    return {name: value for name, value in values.items() if _fits(name, value)}


def _fits(name: str, value: Any) -> bool:
    kind = BY_NAME[name].type
    return value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool)))


def invalid_row(planned: Planned) -> Row:
    """The row of a trial that cannot run: no process was started for it."""
    return axes(planned) | {
        "trial_id": planned.trial_id,
        "attempt": 0,
        "terminal": True,
        "outcome": Outcome.INVALID,
        "reason": planned.reason,
    }


def estimate_s(todo: Sequence[Planned], finished: Iterable[Row], flops: float | None) -> tuple[float | None, str]:
    """Seconds that the trials will take, and what that rests on; None if it cannot be said.

    From finished rows: their mean duration. Before there are any: 6 FLOP per parameter and token (Kaplan et al. 2020)
    at `flops` FLOP/s, plus two seconds of start-up a trial.
    """
    runs = [p.trial for p in todo if p.trial]
    durations = [row["duration_s"] for row in finished if row.get("duration_s") is not None]
    if durations:
        return len(runs) * sum(durations) / len(durations), f"mean of {len(durations)} finished trials"
    if flops is None or any(t.model.parameters is None for t in runs):
        return None, "nothing finished yet, and no parameter count or device speed to go by"
    work = sum(6.0 * (t.model.parameters or 0) * t.tokens_per_step() * t.steps() for t in runs)
    return work / flops + 2.0 * len(runs), f"rough, at {flops / 1e12:.2g} TFLOP/s; better once trials have finished"
