"""Rules on what a runner cannot do with a sharding, an optimizer or an option, each with the way out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec import deepspeed_config
from vramsweep.harness.spec.shardings import FSDP, SHARDINGS, ZERO
from vramsweep.harness.spec.techniques import catalog

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


def _fsdp(trial: Trial) -> Iterator[str]:
    """Yield what the plain loop cannot do with FSDP."""
    if trial.sharding not in FSDP:
        return
    if trial.precision == "fp16":
        yield f"sharding={trial.sharding} in fp16 is not supported with runner=torch; use precision=bf16"
    if trial.sharding == "fsdp2" and trial.weights == "pretrained":
        yield "sharding=fsdp2 starts from random weights; use weights=random, which changes neither memory nor speed"
    if trial.sharding == "fsdp1" and trial.adapter != "none" and not trial.runner.options.get("use_orig_params"):
        yield (
            "sharding=fsdp1 with an adapter needs +runner.options.use_orig_params=true, because it flattens "
            "trained and frozen parameters together"
        )
    yield from _one_dtype(trial)


def _one_dtype(trial: Trial) -> Iterator[str]:
    """Refuse weights of two dtypes: FSDP1 makes one flat parameter of a block's weights, for which torch needs one."""
    if trial.sharding == "fsdp1" and trial.adapter != "none" and trial.precision == "bf16_pure":
        yield (
            "sharding=fsdp1 flattens weights of one dtype only, and adapters are fp32 next to bf16 weights; use "
            "precision=bf16 or sharding=fsdp2"
        )


def _fsdp_trainer(trial: Trial) -> Iterator[str]:
    """Yield what cannot be done with FSDP under the Trainer."""
    if trial.sharding in FSDP and trial.precision == "fp16" and trial.device.name == "simulated":
        yield f"sharding={trial.sharding} in fp16 cannot be predicted; use precision=bf16, or measure on device=cuda"
    yield from _one_dtype(trial)


def _trainer_arguments(trial: Trial) -> Iterator[str]:
    if trial.runner.options.get("parallelism_config") is not None:
        yield "runner.options.parallelism_config is not supported, because ranks divide only the batch; leave it out"
    for option in trial.runner.options:
        owners = [s.name for s in SHARDINGS if option in s.arguments]
        if owners and trial.sharding not in owners:
            way = f"sharding={' or '.join(owners)}, not {trial.sharding}"
            yield f"runner.options.{option} belongs to {way}; leave it out"


def fsdp_offload(trial: Trial) -> Iterator[str]:
    """Yield what FSDP cannot offload.

    With offload_param, parameters, gradients and optimizer state are in host memory, but gathered weights are not.
    """
    if trial.offload_optimizer:
        yield f"sharding={trial.sharding} offloads optimizer state with parameters; give offload_param=true alone"
    if trial.offload_param and trial.sharding == "fsdp1" and trial.device.name == "simulated":
        yield "sharding=fsdp1 with offload_param cannot be predicted; use sharding=fsdp2, or measure on device=cuda"


def ds_config_file(trial: Trial, runners: str) -> Iterator[str]:
    """Yield what in the user's DeepSpeed configuration contradicts the axes or cannot be had; `runners` take one."""
    if trial.ds_config is None:
        return
    if trial.runner.name not in runners.split(" or "):
        yield f"ds_config needs runner={runners}, not {trial.runner.name}; add runner=deepspeed"
    try:
        config = deepspeed_config.read(trial.ds_config)
    except UserError as error:
        yield str(error)
        return
    for wrong in deepspeed_config.contradictions(trial, config):
        yield f"ds_config {trial.ds_config}: {wrong}"
    if trial.sharding not in ZERO:
        yield (
            f"ds_config {trial.ds_config} leaves the stage to sharding={trial.sharding}, which has no stage; give "
            f"sharding={' or '.join(ZERO)}"
        )
    untraced = deepspeed_config.stated_values(config, "optimizer") and deepspeed_config.adam(config) is None
    if untraced and trial.device.name == "simulated":
        yield f"ds_config {trial.ds_config}: {_untraced(deepspeed_config.stated_values(config, 'optimizer.type'))}"


def zero_init(trial: Trial) -> Iterator[str]:
    """Refuse zero_init=false where it has no meaning."""
    if not trial.zero_init and trial.sharding != "zero3":
        yield f"zero_init=false has no effect with sharding={trial.sharding}, which has no zero.Init; leave it out"


def zero_precision(trial: Trial) -> Iterator[str]:
    """Refuse the precisions that DeepSpeed does not have."""
    if trial.sharding not in ZERO:
        return
    if trial.precision == "bf16_pure":
        yield "DeepSpeed has no bf16_pure, because it keeps fp32 master weights; use precision=bf16"
    if trial.device.name == "cpu" and trial.sharding == "zero0" and trial.precision in ("bf16", "fp16"):
        yield f"DeepSpeed's ZeRO-0 in {trial.precision} does not run on device=cpu; use fp32 or sharding=zero1 to zero3"


def _deepspeed_optimizer(trial: Trial) -> Iterator[str]:
    """Check the option `optimizer`: DeepSpeed's Adam belongs to the axis; the others, with own kernels, are options."""
    if (asked := trial.runner.options.get("optimizer")) is None:
        return
    kind = str(asked.get("type") if isinstance(asked, Mapping) else asked)
    if kind.lower() in ("adam", "adamw"):
        own = "deepspeed_cpu_adam" if trial.offload_optimizer else "deepspeed_fused_adam"
        yield f"runner.options.optimizer of type {kind} belongs to the setting optimizer: give optimizer={own}"
    if trial.optimizer != "default":
        yield f"runner.options.optimizer contradicts optimizer={trial.optimizer}; leave one out"
    if trial.device.name == "simulated":
        yield f"runner.options.{_untraced(kind)}"


def _untraced(kind: Any) -> str:
    return (
        f"optimizer of type {kind} cannot be predicted; leave it out for torch's AdamW, choose one with optimizer=, or "
        "measure on device=cuda"
    )


# Optimizers of TrainingArguments that the axis lacks. They can be traced, because they are torch's own code.
_TRACED = ("adagrad", "rmsprop")


def _trainer_optimizer(trial: Trial) -> Iterator[str]:
    if (asked := trial.runner.options.get("optim")) is None:
        return
    name = {"adamw_8bit": "adamw_bnb_8bit"}.get(str(asked), str(asked))  # an alias in TrainingArguments
    axis = next((t.name for t in catalog.entries("optimizer") if t.optim == name), None)
    if axis is not None:
        yield f"runner.options.optim={asked} belongs to the setting optimizer: give optimizer={axis}"
    if trial.optimizer != "default":
        yield f"runner.options.optim={asked} contradicts optimizer={trial.optimizer}; leave one out"
    if trial.device.name == "simulated" and name not in _TRACED:
        known = ", ".join(map(str, catalog.values("optimizer")))
        yield (
            f"runner.options.optim={asked} cannot be predicted, because it is another package's code; measure it "
            f"on device=cuda, or choose from optimizer={known}"
        )


def _trainer_optim_args(trial: Trial) -> Iterator[str]:
    """Refuse optim_args for optimizers that TrainingArguments do not make, because they would not reach them."""
    if "optim_args" not in trial.runner.options or "optim" in trial.runner.options:
        return
    entry = catalog.technique("optimizer", trial.optimizer)
    if trial.optimizer == "sgd" and "momentum" in str(trial.runner.options["optim_args"]):
        yield "runner.options.optim_args: momentum belongs to the setting optimizer: give optimizer=sgd_momentum"
    if trial.optimizer != "default" and entry.optim is None:
        yield f"runner.options.optim_args does not reach {entry}, which TrainingArguments lacks; leave it out"
    if entry.packages and trial.device.name == "simulated":
        yield f"runner.options.optim_args with {entry} cannot be predicted; leave it out, or measure on device=cuda"


def _static_graph(trial: Trial, option: str = "static_graph") -> Iterator[str]:
    """Refuse a pass that does not average: torch 2.13's reducer fails in it (reducer.cpp: expect_autograd_hooks_)."""
    if trial.runner.options.get(option) is True and trial.no_sync and trial.grad_accum > 1:
        way = "use no_sync=false or grad_accum=1" if option == "static_graph" else "use grad_accum=1"
        yield f"runner.options.{option} fails in torch unless every accumulated pass averages gradients; {way}"


def _own_offload(trial: Trial) -> Iterator[str]:
    if trial.offload_param:
        yield "offload_param has no effect with runner=custom, whose target offloads by itself; leave it out"


_ddp_static_graph = partial(_static_graph, option="ddp_static_graph")
RULES: dict[str, tuple[Callable[[Trial], Iterator[str]], ...]] = {
    "torch": (_static_graph, _fsdp),
    "custom": (_own_offload,),
    "trainer": (_ddp_static_graph, _trainer_optimizer, _trainer_optim_args, _trainer_arguments, _fsdp_trainer),
    "deepspeed": (_deepspeed_optimizer,),
}
