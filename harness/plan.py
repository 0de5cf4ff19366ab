"""From resolved configurations to an ordered list of trials: pure, apart from fingerprints of the files they name.

`SETTINGS` are the configuration's keys that say how a sweep is run; everything else in it is the trial.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vramsweep.harness import (
    budget,
    credentials,
    mistakes,
    names,
    outcome,
    registry,
    script,
    shards,
    techniques,
    upgrade,
)
from vramsweep.harness import trial as trials
from vramsweep.harness.errors import UserError
from vramsweep.harness.gpus import GPUS
from vramsweep.harness.row import BY_NAME, COLUMNS, Outcome, Row, encodable

MOST_SLOTS = 512  # places for trials on one node


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
    any_system: bool = False
    breaker: int = 10
    objective: str | None = None
    predict: bool | str = True
    cases: Sequence[str] = ()
    answer: str | None = None
    others: bool = False
    slots: int | None = None
    exclusive: bool = False
    budget: str | float | None = None
    max_cost: float | None = None
    price_per_hour: float | None = None
    skip_dominated: bool = False
    edge_of: str | None = None
    shard: str | None = None
    shards: int = 1
    cluster: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})

    def __post_init__(self) -> None:
        allowed = {
            "isolation": ("warm", "cold"),
            "action": ("run", "plan", "resolve"),
            "output": ("text", "all", "json"),
        }
        for key, values in allowed.items():
            if getattr(self, key) not in values:
                value = getattr(self, key)
                raise UserError(f"{key}={value}: allowed is {' or '.join(values)}{mistakes.meant(str(value), values)}")
        for key in ("retry_failed", "report", "any_system", "others", "exclusive", "skip_dominated"):
            if not isinstance(getattr(self, key), bool):
                raise UserError(f"{key}={getattr(self, key)}: allowed is true or false")
        least: dict[str, float] = {
            "repeats": 1,
            "timeout_s": 0.001,
            "retries": 0,
            "backoff_s": 0,
            "breaker": 0,
            "shards": 1,
        }
        for key, least_value in least.items():
            value = getattr(self, key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            most = 1_000_000 if key == "repeats" else math.inf
            if not number or not least_value <= value < most:
                to = f" and less than {most:,}" * (most < math.inf)
                raise UserError(f"{key}={value}: allowed is a number of at least {least_value:g}{to}")
            if key in ("repeats", "retries", "breaker", "shards") and not isinstance(value, int):
                raise UserError(f"{key}={value}: allowed is a whole number of at least {least_value:g}")
        if self.slots is not None and (type(self.slots) is not int or not 1 <= self.slots <= MOST_SLOTS):
            raise UserError(
                f"slots={self.slots}: allowed is null (every card; without cards one trial at a time) or a whole "
                f"number from 1 to {MOST_SLOTS}"
            )
        budget.limit(self.budget, self.max_cost, self.price_per_hour)
        if not self.results:
            raise UserError("results= names no folder; allowed is any that can be written, as results=DIR")
        if self.name and (why := names.wrong(self.name)):  # "" is as null
            raise UserError(
                f"name={self.name[:60]!r}: {why}; a sweep's name is that of one folder in {self.results}, such as "
                "name=night; elsewhere is results=DIR"
            )
        if self.edge_of not in (None, "seq_len", "micro_batch"):
            meant = mistakes.meant(str(self.edge_of), ("seq_len", "micro_batch"))
            raise UserError(f"edge_of={self.edge_of}: allowed is null, seq_len or micro_batch{meant}")
        if self.answer is not None and self.answer not in registry.ANSWERS:
            raise UserError(mistakes.unknown_option("answer", str(self.answer), registry.ANSWERS))
        if self.objective is not None and self.objective not in OBJECTIVES:
            meant = mistakes.meant(str(self.objective), OBJECTIVES)
            some = "such as peak_reserved_bytes, peak_allocated_bytes, tokens_per_s or step_median_s"
            columns = f"allowed is null or a column of numbers, {some} (`vramsweep columns` lists all)"
            raise UserError(f"objective={self.objective}: {columns}{meant}")
        cards = [gpu.name for gpu in GPUS]
        if not isinstance(self.predict, bool) and self.predict not in cards:
            meant = mistakes.meant(str(self.predict), ("true", "false", *cards))
            raise UserError(f"predict={self.predict}: allowed is true, false or a card: {', '.join(cards)}{meant}")
        shards.parse(self.shard)
        if self.shards > shards.MOST:
            raise UserError(f"shards={self.shards}: allowed are up to {shards.MOST:,}")
        if shards.slurm(self.cluster) is None and self.shard is None and self.shards != 1:
            raise UserError(
                f"shards={self.shards} needs cluster=slurm, which starts them; without Slurm start each where it is to "
                f"run, by shard=1/{self.shards} and so on"
            )


# What a sweeper that optimises can be told to look at: the columns that hold one number.
OBJECTIVES = tuple(column.name for column in COLUMNS if column.type in (int, float))
SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))


@dataclass(frozen=True)
class Planned:
    """A trial to be, with its id; `trial` is None and `reason` says why where it cannot run. `position` counts what was
    composed: the same on every machine, whatever can run there."""

    trial_id: str
    resolved: dict[str, Any]
    trial: trials.Trial | None
    reason: str | None
    position: int = 0


def settings(configs: Sequence[Mapping[str, Any]]) -> Settings:
    """The sweep's settings, which must not differ from trial to trial. Raises UserError otherwise."""
    if not configs:
        raise UserError("the sweep is empty: one of its lists or ranges holds no value")
    first = {key: configs[0][key] for key in SETTINGS if key in configs[0]}
    for config in configs[1:]:
        for key in first:
            if config[key] != first[key] and repr(config[key]) != repr(first[key]):  # nan is not equal to itself
                both = f"{_short(first[key])} and {_short(config[key])}"
                raise UserError(f"{key} cannot be swept (it holds {both}); give it one value")
    texts = {key: str(first[key]) for key in ("name", "results") if first[key] is not None}  # name=5 is a text too
    return Settings(**(first | texts))


def _short(value: Any) -> Any:
    return value.get("name") if isinstance(value, Mapping) else value


def expand(configs: Iterable[Mapping[str, Any]], repeats: int) -> list[list[Planned]]:
    """For each configuration its trials, one a repeat."""
    trial_values = [upgrade.layout({k: v for k, v in config.items() if k not in SETTINGS}) for config in configs]
    return [
        [
            dataclasses.replace(_planned(values | {"repeat": repeat}), position=at * repeats + repeat)
            for repeat in range(repeats)
        ]
        for at, values in enumerate(trial_values)
    ]


def _planned(values: dict[str, Any]) -> Planned:
    if said := credentials.found(values):  # no trial that is impossible: it would be written down as one
        raise UserError(said)
    try:
        trial = trials.parse(values)
    except trials.InvalidTrial as error:
        return Planned(trials.trial_id(values), values, None, credentials.masked(str(error)))
    resolved = trial.model_dump(mode="json")
    return Planned(trials.trial_id(resolved), resolved, trial, None)


ALIVE = 8  # templates that there is always room for (warm.LEAST)


def order(expanded: Iterable[Iterable[Planned]]) -> list[Planned]:
    """Every distinct trial, coarse to fine, so that a sweep cut short has the whole curve of each configuration.

    By repeat, then by how early halvings of the ranges of lengths and of batches come to the trial's: first the longest
    with the largest, then the ends of both ranges, then the middles. At each such point all configurations run before
    the next one, so that of any beginning each has as many trials, give or take one. Those that share a template are
    together, and the templates come in turns forward and backward: the next point begins with what is still alive.
    Where there are more than stay alive, the batches of one length are one round. Impossible trials come first.
    """
    planned = list({p.trial_id: p for trials_of_one in expanded for p in trials_of_one}.values())
    possible = {p.trial_id: p.trial for p in planned if p.trial}
    lengths, batches = (_turns(getattr(t, axis) for t in possible.values()) for axis in ("seq_len", "micro_batch"))
    templates = {trial_id: _template(trial) for trial_id, trial in possible.items()}
    number = {template: n for n, template in enumerate(dict.fromkeys(templates.values()))}
    rounds = {
        trial_id: (
            trial.repeat,
            max(_level(lengths[trial.seq_len]), _level(batches[trial.micro_batch])),
            lengths[trial.seq_len],
            batches[trial.micro_batch] if len(number) <= ALIVE else 0,
        )
        for trial_id, trial in possible.items()
    }
    forward = {at: n % 2 == 0 for n, at in enumerate(sorted(set(rounds.values())))}

    def place(p: Planned) -> tuple[tuple[int, ...], int, int]:
        if p.trial is None:
            return (-1,), 0, 0
        at, template = rounds[p.trial_id], number[templates[p.trial_id]]
        return at, template if forward[at] else -template, batches[p.trial.micro_batch]

    return sorted(planned, key=place)


def _turns(values: Iterable[int]) -> dict[int, int]:
    """When a halving of the range of these values comes to each of them."""
    distinct = sorted(set(values))
    return {distinct[position]: n for n, position in enumerate(halving(len(distinct)))}


def _level(turn: int) -> int:
    """How fine a halving is by this turn: 0 for the last, 1 for the first, 2 for the middle, 3 for two quarters, ..."""
    return (turn - 1).bit_length() + 1 if turn else 0


def worker_conf(trial: trials.Trial) -> str:
    """PYTORCH_CUDA_ALLOC_CONF of a trial's worker. A simulated allocator is not torch's: "" whatever its settings."""
    return "" if trial.device.name == "simulated" else trial.allocator.conf


def _template(trial: trials.Trial) -> tuple[Any, ...]:
    """What decides which template a trial's worker is forked from: runner, environment and visible GPUs."""
    return registry.template(trial), trial.device.name, trial.world_size, worker_conf(trial)


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


def pending(
    planned: Iterable[Planned], finished: Mapping[str, Row], retry_failed: bool, outdated: Container[str] = ()
) -> list[Planned]:
    """The trials without an answer that still counts: of the finished ones those that are `outdated`, by id; with
    `retry_failed` also those that failed."""
    return [
        p for p in planned
        if p.trial_id not in finished or p.trial_id in outdated or _again(p, finished[p.trial_id], retry_failed)
    ]  # fmt: skip


def _again(planned: Planned, row: Row, retry_failed: bool) -> bool:
    """Whether a finished trial runs anew. One that was called impossible without a try is decided anew: it is to do
    where it is possible now, or impossible for another reason."""
    if row["outcome"] == Outcome.INVALID and row.get("attempt") == 0:
        return planned.trial is not None or row.get("reason") not in (None, encodable(planned.reason))
    return outcome.runs_again(row["outcome"], retry_failed)


def axes(planned: Planned) -> Row:
    """The axis columns of a row. A value that does not fit its column (an invalid trial's) is left to `trial`."""
    flat = dict(planned.resolved)
    runner = flat.get("runner")
    nested = {name: flat.get(name) for name in ("model", "allocator", "device", "protocol")}
    values: Row = {
        "trial_id": planned.trial_id,
        **{key: value for key, value in flat.items() if key in BY_NAME},
        **{name: value.get("name") if isinstance(value, Mapping) else None for name, value in nested.items()},
        "runner": runner.get("name") if isinstance(runner, Mapping) else None,
        "simulated_gpu": _card(planned) or (nested["device"] or {}).get("gpu"),
        "zero_init": flat.get("zero_init") if flat.get("sharding") == "zero3" else None,
        "versions": ", ".join(f"{k} {v}" for k, v in sorted((flat.get("versions") or {}).items())) or None,
        "allocator_conf": (nested["allocator"] or {}).get("conf"),
        "parameters": (nested["model"] or {}).get("parameters"),
        "unproven": (techniques.unproven(planned.trial) or None) if planned.trial else None,
        "trial": _plain(flat),
    }
    if planned.trial is not None and planned.trial.runner.command is not None:
        values |= dict.fromkeys(script.unseen(planned.trial) & BY_NAME.keys())
    return {name: value for name, value in values.items() if _fits(name, value)}


def _card(planned: Planned) -> str | None:
    """The name of the card that a trial simulates, None where it is measured."""
    simulated = planned.trial is not None and planned.trial.device.name == "simulated"
    return planned.trial.device.card.name if planned.trial and simulated else None


def settings_of(resolved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A resolved trial's settings, by their full keys as device.gpu."""
    for key, value in resolved.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", inner) for name, inner in value.items())
        else:
            yield key, value


def _fits(name: str, value: Any) -> bool:
    kind = BY_NAME[name].type
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return value is None or (isinstance(value, kind) and not (kind is int and isinstance(value, bool)))


def _plain(value: Any) -> Any:
    """The value as a row can keep it; what JSON has no word for, a number that is not finite among it, is text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def invalid(planned: Planned) -> Row:
    """The row of a trial that cannot run: no process was started for it."""
    return axes(planned) | {"attempt": 0, "terminal": True, "outcome": Outcome.INVALID, "reason": planned.reason}
