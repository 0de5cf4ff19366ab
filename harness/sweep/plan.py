"""From resolved configurations to an ordered list of trials: pure, apart from fingerprints of the files they name.

`SETTINGS` are the configuration's keys that say how a sweep is run; all its other keys are the trial.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, FiniteFloat, SkipValidation, ValidationError, model_validator
from pydantic.dataclasses import dataclass as checked
from pydantic_core import ErrorDetails

from vramsweep.harness.files import file_names, redaction
from vramsweep.harness.hardware.gpu_lookup import GPUS
from vramsweep.harness.messages import suggestions, units
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import migrations
from vramsweep.harness.rows.schema import COLUMNS
from vramsweep.harness.spec import gpu_names, runner_table, trial_identity, trial_parser
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.sweep import shards

EMPTY = "the sweep is empty, because one of its lists or ranges has no value"
MOST_SLOTS = 512  # of one node
SLOTS = f"null (every GPU; without GPUs one trial at a time) or a whole number from 1 to {MOST_SLOTS}"


def _at_least(least: float, below: int | None = None) -> Any:
    """Make the field of a number in this range, which `_refusal` describes."""
    more = "" if below is None else f" and less than {below:,}"
    return Field(ge=least, lt=below, description=f"a number of at least {least:g}{more}")


@checked(frozen=True, config=ConfigDict(strict=True))
class Settings:
    """The settings of a sweep; conf/config.yaml documents each. Raises UserError for a value that is not allowed."""

    name: str | None
    results: SkipValidation[str]
    repeats: Annotated[int, _at_least(1, below=1_000_000)]
    isolation: Literal["warm", "cold"]
    timeout_s: Annotated[FiniteFloat | int, _at_least(0.001)]
    retries: Annotated[int, _at_least(0)]
    backoff_s: Annotated[FiniteFloat | int, _at_least(0)]
    retry_failed: bool
    report: bool
    action: Literal["run", "plan", "resolve"]
    output: Literal["text", "all", "json"]
    any_system: bool = False
    breaker: Annotated[int, _at_least(0)] = 10
    objective: SkipValidation[str | None] = None
    predict: SkipValidation[bool | str] = True
    cases: SkipValidation[Sequence[str]] = ()
    answer: SkipValidation[str | None] = None
    others: bool = False
    slots: Annotated[int | None, Field(ge=1, le=MOST_SLOTS, description=SLOTS)] = None
    exclusive: bool = False
    budget: SkipValidation[str | float | None] = None
    max_cost: SkipValidation[float | None] = None
    price_per_hour: SkipValidation[float | None] = None
    skip_dominated: bool = False
    edge_of: Literal["seq_len", "micro_batch"] | None = None
    shard: SkipValidation[str | None] = None
    shards: Annotated[int, _at_least(1)] = 1
    cluster: SkipValidation[Mapping[str, Any]] = field(default_factory=lambda: {"name": "none"})

    @model_validator(mode="wrap")
    @classmethod
    def _refused(cls, values: Any, check: Callable[[Any], Settings]) -> Settings:
        try:
            return check(values)
        except ValidationError as error:
            raise UserError(_refusal(error.errors()[0])) from None

    def __post_init__(self) -> None:
        """Check what depends on other settings, or on tables."""
        units.parse_limit(self.budget, self.max_cost, self.price_per_hour)
        if not self.results:
            raise UserError("results= names no folder; choose a writable folder with results=DIR")
        if self.name and (why := file_names.name_problem(self.name)):  # "" counts as null
            raise UserError(
                f"name={self.name[:60]!r}: {why}; name= is the name of a single folder in {self.results}, such as "
                "name=night; results=DIR sets another place"
            )
        if self.answer is not None and self.answer not in (*runner_table.ANSWERS, *runner_table.FORMER_ANSWERS):
            raise UserError(suggestions.unknown_option("answer", str(self.answer), runner_table.ANSWERS))
        if self.objective is not None and self.objective not in OBJECTIVES:
            meant = suggestions.did_you_mean(str(self.objective), OBJECTIVES)
            some = "such as peak_reserved_bytes, peak_allocated_bytes, tokens_per_s or step_median_s"
            columns = f"allowed is null or a column of numbers, {some} (`vramsweep columns` lists all)"
            raise UserError(f"objective={self.objective}: {columns}{meant}")
        if not isinstance(self.predict, bool) and self.predict not in {gpu.name for gpu in GPUS}:
            raise UserError(gpu_names.unknown_gpu(f"predict={self.predict} (true, false or a GPU)", str(self.predict)))
        shards.parse(self.shard)
        if self.shards > shards.MOST:
            raise UserError(f"shards={self.shards}: allowed is a whole number from 1 to {shards.MOST:,}")
        if shards.slurm(self.cluster) is None and self.shard is None and self.shards != 1:
            raise UserError(
                f"shards={self.shards} needs cluster=slurm; without Slurm run the command once for each shard, with "
                f"shard=1/{self.shards}, shard=2/{self.shards} and so on"
            )


def _refusal(error: ErrorDetails) -> str:
    """Describe a setting that pydantic refuses: the value, what is allowed, and which value was probably meant."""
    key, value = str(error["loc"][0]), error["input"]
    about = Settings.__pydantic_fields__[key]  # type: ignore[attr-defined]
    if error["type"] == "literal_error":
        values = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        *first, last = ["null"] * (type(None) in get_args(about.annotation)) + values
        allowed = f"{', '.join(first)} or {last}{suggestions.did_you_mean(str(value), values)}"
    else:
        allowed = about.description or ("a text or null" if key == "name" else "true or false")
        if error["type"] == "int_type":
            allowed = allowed.replace("a number", "a whole number")
    return f"{key}={value}: allowed is {allowed}"


# The columns that an optimising sweeper can look at: those that hold one number.
OBJECTIVES = tuple(column.name for column in COLUMNS if column.type in (int, float))
SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))


@dataclass(frozen=True)
class Planned:
    """A planned trial with its id. If it cannot run, `trial` is None and `reason` says why. `position` counts the
    composed trials, the same on every machine, whatever can run there."""

    trial_id: str
    resolved: dict[str, Any]
    trial: trials.Trial | None
    reason: str | None
    position: int = 0


def settings(configs: Sequence[Mapping[str, Any]]) -> Settings:
    """Return the sweep's settings, which must not differ from trial to trial. Raises UserError if they do."""
    if not configs:
        raise UserError(EMPTY)
    first = {key: configs[0][key] for key in SETTINGS if key in configs[0]}
    for config in configs[1:]:
        for key in first:
            if config[key] != first[key] and repr(config[key]) != repr(first[key]):  # nan does not equal itself
                both = f"{_short(first[key])} and {_short(config[key])}"
                raise UserError(f"{key} cannot be swept (its values are {both}); give it one value")
    texts = {key: str(first[key]) for key in ("name", "results") if first[key] is not None}  # name=5 is a text too
    return Settings(**(first | texts))


def _short(value: Any) -> Any:
    return value.get("name") if isinstance(value, Mapping) else value


def expand_trials(configs: Iterable[Mapping[str, Any]], repeats: int) -> list[list[Planned]]:
    """Return for each configuration its trials, one a repeat."""
    own = ({key: value for key, value in config.items() if key not in SETTINGS} for config in configs)
    return [
        [replace(_planned(values | {"repeat": n}), position=at * repeats + n) for n in range(repeats)]
        for at, values in enumerate(map(migrations.upgrade_layout, own))
    ]


def _planned(values: dict[str, Any]) -> Planned:
    if said := redaction.secrets_problem(values):  # no impossible trial, because its row would record the secret
        raise UserError(said)
    try:
        trial = trial_parser.parse(values)
    except trials.InvalidTrial as error:
        return Planned(trial_identity.trial_id(values), values, None, redaction.mask_text(str(error)))
    return plan_trial(trial)


def plan_trial(trial: trials.Trial) -> Planned:
    """Plan a trial that can run, under its own id."""
    resolved = trial.model_dump(mode="json")
    return Planned(trial_identity.trial_id(resolved), resolved, trial, None)


ALIVE = 8  # fork servers that may always be alive (fork_server.LEAST)


def order_trials(expanded: Iterable[Iterable[Planned]]) -> list[Planned]:
    """Order the distinct trials coarse to fine, so that a sweep cut short has the whole curve of each configuration.

    Sort by repeat, then by how early halvings of the ranges of lengths and batches reach the trial. First comes the
    longest length with the largest batch, then the ends of both ranges, then the middles. At each such point all
    configurations run before the next, so at any time each configuration has as many trials, give or take one. Trials
    of one fork server are together. The fork servers come in turns forward and backward, so the next point begins with
    those still alive. If more than stay alive, the batches of one length are one round. Impossible trials come first.
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


def take_share(planned: Sequence[Planned], shard: shards.Shard) -> list[Planned]:
    """Return a shard's own of the planned trials, in their order: as many as the others', give or take one."""
    by_lot = sorted(planned, key=lambda one: hashlib.sha256(str(one.position).encode()).digest())
    own = {id(one) for one in by_lot[shard.number - 1 :: shard.count]}
    return [one for one in planned if id(one) in own]


def _turns(values: Iterable[int]) -> dict[int, int]:
    """Return for each value its turn in a halving of their range."""
    distinct = sorted(set(values))
    return {distinct[position]: n for n, position in enumerate(halving(len(distinct)))}


def _level(turn: int) -> int:
    """Return how fine a halving is by this turn: 0 for the last, 1 the first, 2 the middle, 3 two quarters, ..."""
    return (turn - 1).bit_length() + 1 if turn else 0


def _template(trial: trials.Trial) -> tuple[Any, ...]:
    """Return the key of a trial's fork server: what it imports, its device, ranks and allocator setting."""
    return runner_table.imports_name(trial), trial.device.name, trial.world_size, trial.allocator_variable()


def halving(count: int) -> list[int]:
    """Return 0..count-1 in the order of a halving: the last, the first, then middles of ever smaller gaps.

    The longest comes first because it fails first: memory too small, deadline too short.
    """
    if count < 2:
        return list(range(count))
    order, gaps = [count - 1, 0], [(0, count - 1)]
    for low, high in gaps:  # which grows meanwhile
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order
