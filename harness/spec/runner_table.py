"""Who drives the training loop, and how ranks divide the work: an entry each, with all that the harness must know.

A new runner is a module under runners/ and an entry in `RUNNERS`; a new way of sharding an entry in `SHARDINGS` and in
the runners that support it. Trials are checked against these tables (trial.py), workers import what they name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vramsweep.harness import ds_config, mistakes, techniques
from vramsweep.harness.errors import UserError

if TYPE_CHECKING:
    from vramsweep.harness.trial import Trial

# The tables that a sweep can end in, each made by an entry of the same name in analysis/answers/registry.py.
ANSWERS = ("claims", "fit-24gb", "forum-gpt2", "composition", "seqlen-zero3")

Rule = Callable[["Trial"], str | None]


@dataclass(frozen=True)
class Sharding:
    """How ranks divide a model's weights, gradients and optimizer state.

    `module` is what does it (runners/shardings/__init__.py says which functions it has), `stage` is ZeRO's, `preload`
    what a template imports for it, `options` arguments of what wraps the model, which runner=torch passes on.
    `measurement` is raised when what is measured under it changes: old rows no longer count then.
    """

    name: str
    meaning: str
    module: str | None = None
    stage: int | None = None
    preload: tuple[str, ...] = ()
    measurement: int = 1
    options: tuple[str, ...] = ()


_PLACE = "vramsweep.runners.shardings"
# the last two are pulled in by DeepSpeed's first initialise
_ZERO_PRELOAD = (f"{_PLACE}.zero", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject")
# fmt: off
SHARDINGS = (
    Sharding("none", "one rank that holds everything"),
    Sharding("ddp", "every rank holds everything; gradients are averaged in buckets (DistributedDataParallel)",
             f"{_PLACE}.ddp", options=("bucket_cap_mb", "gradient_as_bucket_view", "static_graph",
                                       "find_unused_parameters")),
    Sharding("fsdp1", "every rank holds a part of flattened blocks, gathered as needed (FullyShardedDataParallel)",
             f"{_PLACE}.fsdp1", preload=(f"{_PLACE}.fsdp1",),
             options=("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
                      "use_orig_params")),
    Sharding("fsdp2", "every rank holds a part of each tensor, gathered block by block (fully_shard)",
             f"{_PLACE}.fsdp2", preload=(f"{_PLACE}.fsdp2",), measurement=2,
             options=("reshard_after_forward",)),
    Sharding("zero0", "DeepSpeed without sharding: gradients are averaged", f"{_PLACE}.zero", stage=0,
             preload=_ZERO_PRELOAD, measurement=2),
    Sharding("zero1", "optimizer state divided (ZeRO 1)", f"{_PLACE}.zero", stage=1, preload=_ZERO_PRELOAD,
             measurement=2),
    Sharding("zero2", "and gradients (ZeRO 2)", f"{_PLACE}.zero", stage=2, preload=_ZERO_PRELOAD,
             measurement=2),
    Sharding("zero3", "and weights (ZeRO 3)", f"{_PLACE}.zero", stage=3, preload=_ZERO_PRELOAD,
             measurement=3),
)
# fmt: on
ZERO = tuple(s.name for s in SHARDINGS if s.stage is not None)


@dataclass(frozen=True)
class Runner:
    """Who drives the loop.

    `module` has `run(trial, device, meter, folder)`; `preload` is what its first step would otherwise import.
    `measurement` is raised when what it measures changes: old rows then no longer count as finished. `shardings` are
    those it supports, `simulated` those of them that can be predicted. `owned` maps an option (dotted) to the axis that
    says the same, which it therefore must not contradict; `options` are the only ones it takes (None: its library's).
    `rules` say what it cannot do, each with the way out. `starts`: the training is a process that it starts, so the
    module's function is `run(trial, folder)`, and what the axes mean is that process's business; `traced` is the module
    that runs it where it is simulated.
    """

    name: str
    meaning: str
    module: str
    preload: tuple[str, ...]
    measurement: int
    shardings: tuple[str, ...]
    simulated: tuple[str, ...]
    owned: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] | None = ()
    rules: tuple[Rule, ...] = ()
    starts: bool = False
    traced: str | None = None


FSDP = ("fsdp1", "fsdp2")


def _fsdp(trial: Trial) -> str | None:
    """What the plain loop cannot do with FSDP."""
    if trial.sharding not in FSDP:
        return None
    if trial.precision == "fp16":
        return f"sharding={trial.sharding} in fp16 is not supported with runner=torch; use precision=bf16"
    if trial.sharding == "fsdp2" and trial.weights == "pretrained":
        return "sharding=fsdp2 starts from random weights; use weights=random, which changes neither memory nor speed"
    if trial.sharding == "fsdp1" and trial.adapter != "none" and not trial.runner.options.get("use_orig_params"):
        return (
            "sharding=fsdp1 flattens trained and frozen parameters together only with "
            "+runner.options.use_orig_params=true"
        )
    return _one_dtype(trial)


def _one_dtype(trial: Trial) -> str | None:
    """FSDP1 makes one flat parameter of a block's weights, which torch refuses where they differ in dtype."""
    if trial.sharding == "fsdp1" and trial.adapter != "none" and trial.precision == "bf16_pure":
        return (
            "sharding=fsdp1 flattens weights of one dtype only, and adapters are fp32 beside bf16 weights; use "
            "precision=bf16 or sharding=fsdp2"
        )
    return None


def _fsdp_trainer(trial: Trial) -> str | None:
    """What cannot be done with FSDP under the Trainer."""
    if trial.sharding not in FSDP:
        if "fsdp_config" in trial.runner.options:
            return f"runner.options.fsdp_config belongs to sharding=fsdp1 or fsdp2, not {trial.sharding}"
        return None
    if trial.precision == "fp16" and trial.device.name == "simulated":
        return f"sharding={trial.sharding} in fp16 cannot be simulated; use precision=bf16, or measure on device=cuda"
    return _one_dtype(trial)


# TrainingArguments that reach only DistributedDataParallel (transformers 5.23, Trainer._build_accelerator_args)
_DDP_ARGUMENTS = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


def _trainer_parallel(trial: Trial) -> str | None:
    if trial.runner.options.get("parallelism_config") is None:
        return None
    return "runner.options.parallelism_config is not supported: ranks divide the batch; leave it out"


def _ddp_trainer(trial: Trial) -> str | None:
    given = [name for name in _DDP_ARGUMENTS if name in trial.runner.options]
    if given and trial.sharding != "ddp":
        return f"runner.options.{given[0]} belongs to sharding=ddp, not {trial.sharding}; leave it out"
    return None


def _offload(trial: Trial) -> str | None:
    if trial.sharding in FSDP:
        return _fsdp_offload(trial)
    if trial.offload_param and trial.sharding != "zero3":
        return f"offload_param needs sharding=zero3, fsdp1 or fsdp2, not {trial.sharding}"
    if trial.offload_optimizer and trial.sharding == "zero0":
        return "offload_optimizer needs sharding=zero1 to zero3 (stage 0 silently ignores it)"
    if trial.offload_optimizer and trial.sharding not in ZERO:
        return f"offload_optimizer needs runner=deepspeed or trainer with sharding=zero1 to zero3, not {trial.sharding}"
    return None


def _fsdp_offload(trial: Trial) -> str | None:
    """With offload_param parameters, gradients and optimizer state are in host memory; gathered weights are not."""
    if trial.offload_optimizer:
        return f"sharding={trial.sharding} moves optimizer state with the parameters; give offload_param=true alone"
    if not trial.offload_param:
        return None
    if trial.runner.name == "custom":
        return "offload_param: a custom target offloads what it wants itself; leave it out"
    if trial.sharding == "fsdp1" and trial.device.name == "simulated":
        return "sharding=fsdp1 with offload_param cannot be simulated; sharding=fsdp2 can, or measure on device=cuda"
    return None


def _ds_config(trial: Trial) -> str | None:
    if trial.ds_config is None:
        return None
    if trial.runner.name not in ("deepspeed", "trainer"):
        return f"ds_config needs runner=deepspeed or trainer, not {trial.runner.name}"
    try:
        config = ds_config.read(trial.ds_config)
    except UserError as error:
        return str(error)
    wrong = next(ds_config.against(trial, config), None)
    if wrong is not None:
        return f"ds_config {trial.ds_config}: {wrong}"
    if trial.sharding not in ZERO:
        return (
            f"ds_config {trial.ds_config} leaves the stage to sharding={trial.sharding}, which has none; give "
            f"sharding={', '.join(ZERO)}"
        )
    if trial.device.name == "simulated" and ds_config.said(config, "optimizer") and ds_config.adam(config) is None:
        return f"ds_config {trial.ds_config}: {_untraced(ds_config.said(config, 'optimizer.type'))}"
    return None


def _zero_init(trial: Trial) -> str | None:
    if not trial.zero_init and trial.sharding != "zero3":
        return (
            f"zero_init=false changes nothing with sharding={trial.sharding}: zero.Init divides weights, as zero3 does"
        )
    return None


def _zero_precision(trial: Trial) -> str | None:
    if trial.sharding not in ZERO:
        return None
    if trial.precision == "bf16_pure":
        return "deepspeed keeps fp32 master weights, so bf16_pure does not exist there; use bf16"
    if trial.device.name == "cpu" and trial.sharding == "zero0" and trial.precision in ("bf16", "fp16"):
        return f"deepspeed ZeRO-0 in {trial.precision} does not run on device=cpu; use fp32, or sharding=zero1 to zero3"
    return None


def _deepspeed_optimizer(trial: Trial) -> str | None:
    """The axis has DeepSpeed's Adam; its other optimizers are options, which have kernels of their own."""
    asked = trial.runner.options.get("optimizer")
    if asked is None:
        return None
    kind = str(asked.get("type") if isinstance(asked, Mapping) else asked)
    if kind.lower() in ("adam", "adamw"):
        own = "deepspeed_cpu_adam" if trial.offload_optimizer else "deepspeed_fused_adam"
        return f"runner.options.optimizer of type {kind} belongs to the axis optimizer: give optimizer={own}"
    if trial.optimizer != "default":
        return f"runner.options.optimizer contradicts optimizer={trial.optimizer}; give one of them"
    return f"runner.options.{_untraced(kind)}" if trial.device.name == "simulated" else None


def _untraced(kind: Any) -> str:
    return (
        f"optimizer of type {kind} cannot be simulated; leave it out for torch's AdamW, choose one with optimizer=, or "
        "measure on device=cuda"
    )


_MODELS = (
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "gpt2")),
    "torch.utils.flop_counter",
    "vramsweep.runners.run",
)
_PROTOCOL = "protocol (warmup_steps and measured_steps)"
_TRAINER_OWNED = {
    "per_device_train_batch_size": "micro_batch",
    "per_gpu_train_batch_size": "micro_batch",
    "auto_find_batch_size": "micro_batch",
    "gradient_accumulation_steps": "grad_accum",
    "bf16": "precision",
    "fp16": "precision",
    "tf32": "precision",
    "half_precision_backend": "precision",
    "gradient_checkpointing": "checkpointing",
    "gradient_checkpointing_kwargs": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "activation_checkpointing_kwargs": "checkpointing",
    "use_liger_kernel": "kernels",
    "liger_kernel_config": "kernels and loss",
    "torch_compile": "compile",
    "torch_compile_backend": "compile",
    "torch_compile_mode": "compile",
    "accelerator_config.gradient_accumulation_kwargs.num_steps": "grad_accum",
    "accelerator_config.gradient_accumulation_kwargs.sync_each_batch": "no_sync",
    "accelerator_config.split_batches": "micro_batch",
    "max_steps": _PROTOCOL,
    "num_train_epochs": _PROTOCOL,
    "seed": "seed",
    "use_cache": "use_cache",
    "use_cpu": "device",
    "no_cuda": "device",
    "deepspeed": "sharding (zero0 to zero3), or to ds_config, the path of a file",
    "fsdp": "sharding",
    "fsdp_config.version": "sharding",
    "fsdp_config.fsdp_version": "sharding",
    "fsdp_config.cpu_offload": "offload_param",
    "fsdp_config.fsdp_cpu_offload": "offload_param",
    "fsdp_config.fsdp_offload_params": "offload_param",
    "fsdp_config.activation_checkpointing": "checkpointing",
    "fsdp_config.fsdp_activation_checkpointing": "checkpointing",
}


# Optimizers of TrainingArguments that the axis lacks and that are torch's own code, so that they can be traced.
_TRACED = ("adagrad", "rmsprop")


def _trainer_optimizer(trial: Trial) -> str | None:
    asked = trial.runner.options.get("optim")
    if asked is None:
        return None
    name = {"adamw_8bit": "adamw_bnb_8bit"}.get(str(asked), str(asked))  # an alias in TrainingArguments
    axis = next((t.name for t in techniques.entries("optimizer") if t.optim == name), None)
    if axis is not None:
        return f"runner.options.optim={asked} belongs to the axis optimizer: give optimizer={axis}"
    if trial.optimizer != "default":
        return f"runner.options.optim={asked} contradicts optimizer={trial.optimizer}; give one of them"
    if trial.device.name == "simulated" and name not in _TRACED:
        known = ", ".join(map(str, techniques.values("optimizer")))
        return (
            f"runner.options.optim={asked} cannot be simulated: it is another package's code; measure it on "
            f"device=cuda, or choose from optimizer={known}"
        )
    return None


def _trainer_optim_args(trial: Trial) -> str | None:
    """TrainingArguments' optim_args reach only what TrainingArguments make."""
    if "optim_args" not in trial.runner.options or "optim" in trial.runner.options:
        return None
    entry = techniques.technique("optimizer", trial.optimizer)
    if trial.optimizer == "sgd" and "momentum" in str(trial.runner.options["optim_args"]):
        return "runner.options.optim_args: momentum belongs to the axis optimizer: give optimizer=sgd_momentum"
    if trial.optimizer != "default" and entry.optim is None:
        return f"runner.options.optim_args does not reach {entry}, which TrainingArguments lacks; leave it out"
    if entry.packages and trial.device.name == "simulated":
        return f"runner.options.optim_args with {entry} cannot be simulated; leave it out, or measure on device=cuda"
    return None


RUNNERS = (
    Runner(
        "torch",
        "the plain loop: forward, backward, optimizer step",
        module="vramsweep.runners.torch_loop",
        preload=("vramsweep.runners.torch_loop", *_MODELS),
        measurement=1,
        shardings=("none", "ddp", *FSDP),
        simulated=("none", "ddp", *FSDP),
        rules=(_fsdp,),
    ),
    Runner(
        "trainer",
        "Hugging Face Trainer with its defaults; options are TrainingArguments",
        module="vramsweep.runners.trainer",
        # accelerate imports deepspeed, where it is installed, to unwrap any model
        preload=("vramsweep.runners.trainer", "deepspeed", *_MODELS),
        measurement=1,
        shardings=("none", "ddp", *FSDP, *ZERO),
        simulated=("none", "ddp", *FSDP, *ZERO),
        owned=_TRAINER_OWNED,
        options=None,
        rules=(_trainer_optimizer, _trainer_optim_args, _trainer_parallel, _ddp_trainer, _fsdp_trainer),
    ),
    Runner(
        "deepspeed",
        "DeepSpeed's engine; options are merged over the generated ds_config",
        module="vramsweep.runners.deepspeed_zero",
        preload=("vramsweep.runners.deepspeed_zero", *_MODELS),
        measurement=3,
        shardings=ZERO,
        simulated=ZERO,
        owned={key: axis for key, (axis, _) in ds_config.OWNED.items()},
        options=None,
        rules=(_deepspeed_optimizer,),
    ),
    Runner(
        "custom",
        "your own model and step (docs/custom.md); options are the target's",
        module="vramsweep.runners.custom",
        preload=("vramsweep.runners.custom", *_MODELS),
        measurement=2,
        shardings=("none", "ddp", *FSDP),
        simulated=("none", "ddp", *FSDP),
        options=None,
    ),
    Runner(
        "script",
        "a command of your own, as it is (docs/script.md); options are placeholders of your own",
        module="vramsweep.runners.script",
        preload=(),
        measurement=1,
        shardings=(),
        simulated=(),
        options=None,
        starts=True,
        traced="vramsweep.runners.traced_script",
    ),
)
_RUNNERS = {runner.name: runner for runner in RUNNERS}
_SHARDINGS = {sharding.name: sharding for sharding in SHARDINGS}


def runner(name: str) -> Runner:
    """The entry of this runner. Raises KeyError for a name that is not there."""
    return _RUNNERS[name]


def module(trial: Trial) -> str:
    """The module that runs a trial, measured or traced."""
    entry = _RUNNERS[trial.runner.name]
    return entry.traced if entry.traced and trial.device.name == "simulated" else entry.module


def sharding(name: str) -> Sharding:
    """The entry of this way of sharding. Raises KeyError for a name that is not there."""
    return _SHARDINGS[name]


def template(trial: Trial) -> str:
    """Names the template that a trial's worker is forked from: the runner, "+" the sharding and techniques that need
    more than it imports."""
    entry = _RUNNERS[trial.runner.name]
    mine = () if entry.starts else _SHARDINGS[trial.sharding].preload
    more = [next(s.name for s in SHARDINGS if s.preload == mine)] if mine else []  # those that import the same share
    return "+".join((trial.runner.name, *more, *map(str, techniques.preloads(trial))))


def preload(name: str) -> tuple[str, ...]:
    """The modules that the template of this name imports."""
    runner_name, *parts = name.split("+")
    modules = list(_RUNNERS[runner_name].preload)
    for part in parts:
        axis, equals, value = part.partition("=")
        modules += techniques.technique(axis, value).preload if equals else _SHARDINGS[part].preload
    return tuple(modules)


def markdown_table() -> str:
    """The runners and ways of sharding as tables for the documentation."""
    lines = ["**runners**", "", "| runner | who drives the loop | sharding |", "|---|---|---|"]
    lines += [f"| `{r.name}` | {r.meaning} | {', '.join(f'`{name}`' for name in r.shardings)} |" for r in RUNNERS]
    lines += ["", "**sharding**", "", "| sharding | how ranks divide the work |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{s.name}` | {s.meaning} |" for s in SHARDINGS)]) + "\n"


def rules(trial: Trial) -> Iterator[str | None]:
    """What the tables say against a trial, reason by reason; None where they say nothing."""
    entry = _RUNNERS.get(trial.runner.name)
    if entry is None:
        yield mistakes.no_such(f"runner {trial.runner.name}", "runner", trial.runner.name, _RUNNERS)
        return
    if entry.starts:
        return
    yield _ds_config(trial)
    yield _supported(trial, entry)
    yield _offload(trial)
    yield _zero_init(trial)
    yield _zero_precision(trial)
    yield _options(trial, entry)
    yield _static_graph(trial)
    for rule in entry.rules:
        yield rule(trial)


def _supported(trial: Trial, entry: Runner) -> str | None:
    if trial.sharding not in entry.shardings:
        others = [r.name for r in RUNNERS if trial.sharding in r.shardings]
        return (
            f"sharding={trial.sharding} needs runner={' or '.join(others)}; runner={entry.name} takes "
            f"sharding={', '.join(entry.shardings)}"
        )
    if trial.world_size > 1 and trial.sharding == "none":
        ways = ", ".join(s.name for s in SHARDINGS if s.name != "none")
        return f"world_size {trial.world_size} needs a sharding ({ways}); sharding=none is one rank"
    if trial.device.name == "simulated" and trial.sharding not in entry.simulated:
        return f"sharding={trial.sharding} with runner={entry.name} cannot be simulated; measure it on device=cuda"
    return None


def _divides(value: Any, trial: Trial) -> bool:
    return isinstance(value, bool) or (isinstance(value, int) and value > 0 and trial.world_size % value == 0)


# What options must be: in words, and whether a value is
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


def _options(trial: Trial, entry: Runner) -> str | None:
    if not _finite(trial.runner.options):
        return "runner.options holds a number that is not finite, which no row can keep; leave it out"
    for option, value in flat(trial.runner.options):
        if option in ("fsdp_config", "accelerator_config") and isinstance(value, str) and entry.name == "trainer":
            return f"runner.options.{option} is a file; give its keys: +runner.options.{option}.KEY=VALUE"
        whole = not isinstance(value, Mapping)  # it would take the place of a node in which an axis has its say
        axis = next((a for o, a in entry.owned.items() if option == o or (whole and o.startswith(f"{option}."))), None)
        if axis is not None:
            return f"runner.options.{option} belongs to the axis {axis}; give that instead, so that the row says it"
    if entry.options is not None:
        known = (*entry.options, *_SHARDINGS[trial.sharding].options)
        unknown = sorted(set(trial.runner.options) - set(known))
        if unknown:
            others = " or ".join(s.name for s in SHARDINGS if unknown[0] in s.options)
            where = f" (it belongs to sharding={others})" if others else ""
            takes = f"with sharding={trial.sharding} takes {', '.join(known) or 'no options'}"
            return f"runner.options.{unknown[0]}: runner={entry.name} {takes}{where}"
    for option, value in trial.runner.options.items() if entry.name != "custom" else ():
        words, fits = _KINDS.get(option, ("", lambda value, trial: True))
        left = value is None and entry.options is None  # to the library
        if not left and not fits(value, trial):
            return f"runner.options.{option} is {value}; it must be {words}"
    return None


def _static_graph(trial: Trial) -> str | None:
    """torch 2.13's reducer fails in a pass that does not average (reducer.cpp: expect_autograd_hooks_)."""
    option = {"torch": "static_graph", "trainer": "ddp_static_graph"}.get(trial.runner.name, "")
    if trial.runner.options.get(option) is True and trial.no_sync and trial.grad_accum > 1:
        way = "use no_sync=false or grad_accum=1" if option == "static_graph" else "use grad_accum=1"
        return f"runner.options.{option} fails in torch unless every accumulated pass averages; {way}"
    return None


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    nested = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return all(map(_finite, nested))


def flat(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of nested options as a dotted name, with its value; the inner nodes too."""
    for key, value in options.items():
        yield f"{before}{key}", value
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{key}.")
