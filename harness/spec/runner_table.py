"""The table of runners, which drive the training loop: an entry each, with all that the harness must know of it.

A new runner is a module under runners/ and an entry in runners.json, which is its option `runner=` too
(harness/config/overrides.py). Trials are checked against this table and that of shardings (shardings.py). Workers
import the modules that the tables name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramsweep.harness.files import plain_json
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec import deepspeed_config, runner_rules
from vramsweep.harness.spec.shardings import FSDP, SHARDINGS, ZERO, Sharding, tuples
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.techniques.catalog import Technique

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

# Answers that a sweep can end in, each made by the entry of its name in analysis/answers/answer_table.py; then those of
# earlier versions, which plans and presets may still name.
ANSWERS = ("claims",)
FORMER_ANSWERS = ("fit-24gb", "forum-gpt2", "composition", "seqlen-zero3")

Rule = Callable[["Trial"], Iterator[str]]
MIB = 1 << 20


@dataclass(frozen=True)
class Runner:
    """A runner, which drives the training loop.

    `module` has `run(trial, device, meter, folder)`; `preload` is what its first step would otherwise import (for the
    Trainer also deepspeed, because accelerate imports it, if it is installed, to unwrap any model).
    `measurement` is raised when what it measures changes, because old rows then no longer count as finished.
    `shardings` are those it supports, next to those that name it. `owned` maps an option (dotted) to the axis that sets
    the same; such an option is refused. `options` are the only ones it takes (None: its library's). `rules` yield what
    it cannot do, each with the way out. `starts`: it starts a process that trains. Then the module's function is
    `run(trial, folder)`, the process decides what the axes mean, and `traced` is the module that runs a simulation.
    `targets`: the training code is the user's function, runner.target.

    `monotonic`: more length or batch is known never to need less memory. `jobs`: it can run protocol=job.
    `loader_workers` is the option for the number of processes that load data. `host_bytes` is the anonymous memory of a
    process after its imports (`vramsweep.runners.worker.worker.preload`), by benchmarks/host_check.py: torch
    2.13.0+cpu, transformers 5.23.0, accelerate 1.15.0, deepspeed 0.19.8, Python 3.11. It excludes what a CUDA build and
    its context take; processes on an H100 and an H200 had 472 to 582 MiB after their imports (results/reference).
    """

    name: str
    meaning: str
    module: str
    preload: tuple[str, ...] = ()
    measurement: int = 1
    shardings: tuple[str, ...] = ("none",)
    owned: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] | None = ()
    rules: tuple[Rule, ...] = ()
    starts: bool = False
    traced: str | None = None
    targets: bool = False
    monotonic: bool = False
    jobs: bool = False
    loader_workers: str | None = None
    host_bytes: int = 0

    @property
    def user_code(self) -> bool:
        """Return whether the training code is the user's, which applies techniques itself."""
        return self.starts or self.targets


def _read(entry: dict[str, Any], models: list[str]) -> Runner:
    """Return the runner of an entry of runners.json, in whose preload "models" stands for these modules."""
    preload = [name for one in entry.pop("preload", ()) for name in (models if one == "models" else [one])]
    host_bytes, name = entry.pop("host_mib", 279) * MIB, entry["name"]
    owned, rules = _OWNED.get(name, {}), runner_rules.RULES.get(name, ())
    plain = {field: tuples(value) for field, value in entry.items()}
    return Runner(**plain, preload=tuple(preload), owned=owned, rules=rules, host_bytes=host_bytes)


# The Trainer's arguments by the axis that sets the same; of a node with several such arguments, the first counts.
_TRAINER_AXES = json.loads(Path(__file__).with_name("trainer_arguments.json").read_text("utf-8"))
_OWNED: dict[str, dict[str, str]] = {
    "trainer": {name: axis for axis, names in _TRAINER_AXES.items() for name in names},
    "deepspeed": {key: axis for key, (axis, _) in deepspeed_config.OWNED.items()},
}
_TABLE = json.loads(Path(__file__).with_name("runners.json").read_text("utf-8"))
RUNNERS = tuple(_read(entry, _TABLE["models"]) for entry in _TABLE["runners"])
SIMULATED = "simulated"  # the fork server of predictions
USER_CODE = tuple(r.name for r in RUNNERS if r.user_code)
STARTING = tuple(r.name for r in RUNNERS if r.starts)
TARGETED = tuple(r.name for r in RUNNERS if r.targets)
_RUNNERS = {runner.name: runner for runner in RUNNERS}
_SHARDINGS = {sharding.name: sharding for sharding in SHARDINGS}


def runner(name: str) -> Runner:
    """Return the entry of a runner. Raises KeyError for an unknown name."""
    return _RUNNERS[name]


def module(trial: Trial) -> str:
    """Return the module that runs a trial, measured or traced."""
    entry = _RUNNERS[trial.runner.name]
    return entry.traced if entry.traced and trial.device.name == "simulated" else entry.module


def sharding(name: str) -> Sharding:
    """Return the entry of a sharding. Raises KeyError for an unknown name."""
    return _SHARDINGS[name]


def shardings_of(entry: Runner) -> tuple[str, ...]:
    """Return the shardings that go with a runner: those that it names, then those that name it."""
    return (*entry.shardings, *(s.name for s in SHARDINGS if entry.name in s.runners and s.name not in entry.shardings))


def technique_runners(entry: Technique) -> tuple[str, ...]:
    """Return the runners that go with a technique, among those whose training code is ours."""
    return tuple(r.name for r in RUNNERS if not r.user_code and r.name in (entry.runners or (r.name,)))


def fork_server_name(trial: Trial) -> str:
    """Return the name of the fork server that a trial's worker is forked from.

    It has imported what its trials import. The fork server of predictions imports nothing until a trace must be made.
    """
    ours = trial.runner.name not in STARTING  # the others start a script, which imports in its own order
    return SIMULATED if ours and trial.device.name == "simulated" else imports_name(trial)


def imports_name(trial: Trial) -> str:
    """Return the name of a trial's imports: its runner, then "+" and each sharding or technique that imports more."""
    entry = _RUNNERS[trial.runner.name]
    mine = () if entry.starts else _SHARDINGS[trial.sharding].preload
    more = [next(s.name for s in SHARDINGS if s.preload == mine)] if mine else []  # the first with the same imports
    ours = not entry.user_code and trial.device.name != "simulated"
    techniques = [str(one) for one in catalog.chosen_techniques(trial) if one.preload] if ours else []
    return "+".join((trial.runner.name, *more, *techniques))


def preload(name: str) -> tuple[str, ...]:
    """Return the modules that a name of imports stands for."""
    if name == SIMULATED:
        return (".predict.make_trace", *_TABLE["models"])
    runner_name, *parts = name.split("+")
    modules = list(_RUNNERS[runner_name].preload)
    for part in parts:
        axis, equals, value = part.partition("=")
        modules += catalog.technique(axis, value).preload if equals else _SHARDINGS[part].preload
    return tuple(modules)


def markdown_table() -> str:
    """Return the runners and shardings as Markdown tables for the documentation."""
    lines = ["**runners**", "", "| runner | who drives the loop | sharding |", "|---|---|---|"]
    lines += [f"| `{r.name}` | {r.meaning} | {', '.join(f'`{name}`' for name in shardings_of(r))} |" for r in RUNNERS]
    lines += ["", "**sharding**", "", "| sharding | how ranks divide the work |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{s.name}` | {s.meaning} |" for s in SHARDINGS)]) + "\n"


def runner_rules_of(trial: Trial) -> Iterator[str]:
    """Yield what the tables say against a trial, reason by reason."""
    if (entry := _RUNNERS.get(trial.runner.name)) is None:
        yield suggestions.no_such_value(f"runner {trial.runner.name}", "runner", trial.runner.name, _RUNNERS)
        return
    if trial.sharding not in _SHARDINGS:
        yield suggestions.no_such_value(f"sharding={trial.sharding}", "sharding", trial.sharding, _SHARDINGS)
        return
    if not entry.starts:
        yield from runner_rules.ds_config_file(trial, _runners_of(*ZERO))
        yield from _supported(trial, entry)
        yield from _offload(trial, entry)
        yield from runner_rules.zero_init(trial)
        yield from runner_rules.zero_precision(trial)
        yield from _options(trial, entry)
        for rule in entry.rules:
            yield from rule(trial)
    yield from catalog.technique_rules(trial, entry.user_code)


def _runners_of(*names: str) -> str:
    """Return, in words, the runners that go with any of these shardings."""
    return " or ".join(r.name for r in RUNNERS if set(names) & set(shardings_of(r)))


def _offload(trial: Trial, entry: Runner) -> Iterator[str]:
    """Yield why optimizer state or parameters cannot be moved to host memory under this sharding."""
    if trial.sharding in FSDP:
        yield from runner_rules.fsdp_offload(trial)
    for axis in ("offload_param", "offload_optimizer"):
        able = [s.name for s in SHARDINGS if axis in s.offloads]
        if getattr(trial, axis) and trial.sharding not in able:
            why = " (stage 0 silently ignores it)" if _SHARDINGS[trial.sharding].stage == 0 else ""
            mine = [name for name in able if name in shardings_of(entry)]
            who = "" if mine else f"runner={_runners_of(*able)} with "
            yield f"{axis} needs {who}sharding={' or '.join(mine or able)}, not {trial.sharding}{why}"


def _supported(trial: Trial, entry: Runner) -> Iterator[str]:
    if trial.sharding not in (supported := shardings_of(entry)):
        yield (
            f"sharding={trial.sharding} needs runner={_runners_of(trial.sharding)}; runner={entry.name} takes "
            f"sharding={', '.join(supported)}"
        )
    if trial.world_size > 1 and trial.sharding == "none":
        ways = ", ".join(s.name for s in SHARDINGS if s.name not in ("none", "fsdp2"))
        yield f"world_size={trial.world_size} needs a sharding (none is for one rank); add sharding=fsdp2, or {ways}"
    if trial.device.name == "simulated" and not _SHARDINGS[trial.sharding].simulated:
        yield f"sharding={trial.sharding} with runner={entry.name} cannot be predicted; measure it on device=cuda"


def _divides(value: Any, trial: Trial) -> bool:
    return isinstance(value, bool) or (isinstance(value, int) and value > 0 and trial.world_size % value == 0)


# What an option's value must be, in words, and the check of a value
_KINDS: dict[str, tuple[str, Callable[[Any, Trial], bool]]] = {
    **dict.fromkeys(
        ("bucket_cap_mb", "ddp_bucket_cap_mb"),
        ("a number of MiB", lambda value, trial: type(value) in (int, float) and value > 0),
    ),
    "reshard_after_forward": ("true, false or a number of ranks that divides world_size", _divides),
    "dataloader_num_workers": ("a whole number of processes", lambda value, trial: type(value) is int and value >= 0),
    **dict.fromkeys(
        ("gradient_as_bucket_view", "static_graph", "find_unused_parameters", "forward_prefetch", "limit_all_gathers",
         "use_orig_params", "ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph"),
        ("true or false", lambda value, trial: isinstance(value, bool)),
    ),
}  # fmt: skip


def _options(trial: Trial, entry: Runner) -> Iterator[str]:
    if not plain_json.is_finite(trial.runner.options):
        yield "runner.options has a number that is not finite, which no row can store; leave it out"
    for option, value in flatten_options(trial.runner.options):
        if option in ("fsdp_config", "accelerator_config") and isinstance(value, str) and entry.name == "trainer":
            yield f"runner.options.{option} names a file; give its keys: +runner.options.{option}.KEY=VALUE"
        whole = not isinstance(value, Mapping)  # it would replace a node that has a key of an axis
        axis = next((a for o, a in entry.owned.items() if option == o or (whole and o.startswith(f"{option}."))), None)
        if axis is not None:
            yield f"runner.options.{option} belongs to the setting {axis}; give that instead, so that the row shows it"
    if entry.options is not None:
        known = (*entry.options, *_SHARDINGS[trial.sharding].options)
        if unknown := sorted(set(trial.runner.options) - set(known)):
            others = " or ".join(s.name for s in SHARDINGS if unknown[0] in s.options)
            where = f" (it belongs to sharding={others})" if others else ""
            takes = f"with sharding={trial.sharding} takes {', '.join(known) or 'no options'}"
            yield f"runner.options.{unknown[0]}: runner={entry.name} {takes}{where}"
    for option, value in () if entry.user_code else trial.runner.options.items():
        words, fits = _KINDS.get(option, ("", lambda value, trial: True))
        left = value is None and entry.options is None  # left to the library
        if not left and not fits(value, trial):
            yield f"runner.options.{option} is {value}; it must be {words}"


def flatten_options(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of nested options as a dotted name, with its value; inner nodes too."""
    for key, value in options.items():
        yield f"{before}{key}", value
        if isinstance(value, Mapping):
            yield from flatten_options(value, f"{before}{key}.")
