"""FSDP of both kinds, each block of the model divided over the ranks: in the plain loop, and as the Trainer's `fsdp`.

FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`) flattens a block to one parameter, FSDP2 (`fully_shard`)
divides each tensor. In the plain loop each transformer block is a unit of its own and the rest of the model another.
Precision is FSDP's own, without autocast. bf16 keeps weights, gradients and optimizer state in fp32, gathers and
computes in bf16 and reduces gradients in fp32. bf16_pure keeps everything in bf16; fp32 and tf32 change no dtype.
`runner.options` are arguments of the class (sharding_strategy and backward_prefetch by name) or of `fully_shard`.
The latter takes reshard_after_forward; true frees a block's gathered weights after its forward pass and gathers them
again for its backward pass.

Under the Trainer `runner.options.fsdp_config` is the user's fsdp_config, without what axes set
(harness/spec/runner_table.py). Precision is accelerate's: bf16 and fp16 gather, compute and reduce in half precision,
with parameters in fp32 (accelerate/state.py AcceleratorState, utils/fsdp_utils.py fsdp2_prepare_model, accelerator.py
prepare_model). fsdp_traced.py has what both need without a GPU, and is loaded only there.
"""

import contextlib
import functools
from typing import Any, cast

import torch
import transformers
from accelerate.utils.constants import FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY
from torch.distributed import fsdp as library
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from vramsweep.harness.messages.suggestions import no_such_value
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.model import build
from vramsweep.runners.rank import process_group
from vramsweep.runners.shardings import interface
from vramsweep.runners.shardings.key_usage import KeyUsage
from vramsweep.runners.trace import fake_placement
from vramsweep.runners.trace.fake_placement import weightless

Sharded = tuple[Any, dict[str, Any], dict[str, Any]]


def checked(trial: Trial, net: torch.nn.Module) -> None:
    """Raise InvalidTrial unless the model is divided as the trial's sharding says, over `world_size` ranks."""
    if trial.sharding == "fsdp1":
        if not isinstance(net, FullyShardedDataParallel):
            raise InvalidTrial(f"sharding=fsdp1: {type(net).__name__} is no FullyShardedDataParallel; wrap the model")
        size = net.world_size
    else:
        found = next((p for p in net.parameters() if isinstance(p, DTensor)), None)
        if not any(isinstance(module, FSDPModule) for module in net.modules()) or found is None:
            raise InvalidTrial(f"sharding=fsdp2: {type(net).__name__} and its modules were not passed to fully_shard")
        size = found.device_mesh.size()
    if size != trial.world_size:
        raise InvalidTrial(
            f"sharding={trial.sharding}: the model is divided over {size} ranks, but world_size is {trial.world_size}"
        )


def sharded(trial: Trial, device: torch.device) -> Sharded:
    """Return the model with this rank's shards, FSDP's arguments, and the whole model's parameter counts."""
    if trial.sharding == "fsdp1":
        process_group.join(trial, device)
        return flatten(trial, build.model(trial, interface.host(trial)), device)
    groups = trial.runner.options.get("reshard_after_forward")
    if trial.device.name == "simulated" and type(groups) is int and groups not in (1, trial.world_size):
        raise InvalidTrial(
            f"runner.options.reshard_after_forward={groups}: groups of ranks cannot be predicted; use true or false"
        )
    mesh = process_group.mesh(trial, device)
    with weightless():  # no rank ever holds the whole model
        net = build.model(trial, device)
    return divide_tensors(trial, net, mesh, device)


def flatten(trial: Trial, net: Any, device: torch.device) -> Sharded:
    """Wrap a model that is on the host in FSDP1, each block a unit; return what `sharded` returns."""
    counts = model_description.counts(net)
    units = set(blocks(net))
    options = dict(trial.runner.options)
    kinds = {"sharding_strategy": library.ShardingStrategy, "backward_prefetch": library.BackwardPrefetch}
    for name, kind in kinds.items():
        if options.get(name) is not None:
            chosen = str(options[name])
            known = [one.name for one in kind if "HYBRID" not in one.name]  # HYBRID needs groups of ranks in a node
            if chosen.upper() not in known:
                raise InvalidTrial(no_such_value(f"runner.options.{name}={chosen}", name, chosen, known))
            options[name] = kind[chosen.upper()]
    half = trial.precision == "bf16"
    wrapped = FullyShardedDataParallel(
        net,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
        mixed_precision=library.MixedPrecision(torch.bfloat16, torch.float32) if half else None,
        cpu_offload=library.CPUOffload(trial.offload_param),
        device_id=device,
        **options,
    )
    told = {"units": len(units) + 1, "mixed_precision": str(wrapped.mixed_precision), **trial.runner.options}
    return wrapped, told, counts


def divide_tensors(trial: Trial, net: Any, mesh: DeviceMesh, device: torch.device) -> Sharded:
    """Divide a model without memory by FSDP2, each block a unit, and give it memory; return what `sharded` returns."""
    half = trial.precision == "bf16"
    policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else library.MixedPrecisionPolicy()
    offload = library.CPUOffloadPolicy() if trial.offload_param else library.OffloadPolicy()
    shared = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload, **trial.runner.options}
    units = (*blocks(net), net)
    for unit in units:
        library.fully_shard(unit, **shared)
    materialize(net, interface.host(trial) if trial.offload_param else device)
    told = {"units": len(units), "mp_policy": str(policy), "offload_policy": str(offload), **trial.runner.options}
    return net, told, model_description.counts(net)


def blocks(net: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the transformer blocks: the elements of the module list that has most parameters.

    Raises InvalidTrial for a model without a module list.
    """
    lists = [list(m) for m in net.modules() if isinstance(m, torch.nn.ModuleList)]
    if not lists:
        raise InvalidTrial("FSDP divides block by block, but the model has no list of blocks (torch.nn.ModuleList)")
    return max(lists, key=lambda found: sum(map(model_description.parameters, found)))


def materialize(net: torch.nn.Module, device: torch.device) -> None:
    """Give this rank's shards memory on the device and the random values that a transformer usually starts from."""
    with fake_placement.on_host():  # has an effect only if the device is the host
        net._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            shard = cast(DTensor, parameter).to_local()
            if parameter.dim() > 1:
                shard.normal_(0, 0.02)
            else:
                shard.fill_(0 if name.endswith("bias") else 1)


def arguments(trial: Trial) -> dict[str, Any]:
    """Return TrainingArguments for this version of FSDP. Raises InvalidTrial for an invalid key of fsdp_config."""
    version = int(trial.sharding.removeprefix("fsdp"))
    own = trial.runner.options.get("fsdp_config", {})
    for key, value in own.items():
        if key.startswith("xla"):
            raise InvalidTrial(
                f"runner.options.fsdp_config.{key} is for torch_xla, which is not supported; leave it out"
            )
        wanted = _wanted(key.removeprefix("fsdp_"), value, version)
        if wanted:
            where = f"runner.options.fsdp_config.{key}"
            raise InvalidTrial(f"{where} is {value}; with sharding=fsdp{version} it must be {wanted}")
    policy = own.get("auto_wrap_policy", own.get("fsdp_auto_wrap_policy"))
    if {"min_num_params", "fsdp_min_num_params"} & set(own) and str(policy).upper() != "SIZE_BASED_WRAP":
        raise InvalidTrial(
            "runner.options.fsdp_config.min_num_params has no effect without auto_wrap_policy=SIZE_BASED_WRAP"
        )
    told: dict[str, Any] = {"fsdp": True, "fsdp_config": KeyUsage({"version": version, **own})}
    if trial.offload_param:
        told["fsdp_config"]["cpu_offload"] = True
        if trial.device.name == "cuda" and "ddp_backend" not in trial.runner.options:
            told["ddp_backend"] = "cuda:nccl,cpu:gloo"  # as `accelerate launch` does: norms are computed on the host
    return told


def _wanted(key: str, value: Any, version: int) -> str | None:
    """Return what a value of fsdp_config must be, or None if it is valid; accelerate would raise a KeyError at most."""
    if key == "reshard_after_forward" and version == 2:
        return None if str(value).lower() in ("true", "false") else "true or false"
    if key == "transformer_layer_cls_to_wrap":
        names = value if isinstance(value, list) else [value]
        return None if all(isinstance(name, str) for name in names) else "a name or a list of names"
    listed = {
        "reshard_after_forward": FSDP_SHARDING_STRATEGY,  # as accelerate calls FSDP1's sharding_strategy
        "sharding_strategy": FSDP_SHARDING_STRATEGY,
        "backward_prefetch": FSDP_BACKWARD_PREFETCH,
    }.get(key)
    if listed is None or value is None or version == 2:
        return None
    numbered = listed is FSDP_SHARDING_STRATEGY and str(value) in map(str, range(1, len(listed) + 1))
    return None if numbered or (isinstance(value, str) and value.upper() in listed) else " or ".join(listed)


def place(trial: Trial, device: torch.device) -> torch.device:
    """Return the host, where the model is made; FSDP moves it unit by unit."""
    return interface.host(trial)


def fitting(trial: Trial, net: torch.nn.Module, made: TrainingArguments) -> None:
    """Raise InvalidTrial for a key that transformers ignores, and for a class to wrap that the model lacks."""
    config: Any = made.fsdp_config
    ignored = next((key for key in config if key not in config.asked), None)
    if ignored == "version":  # we set it; transformers 4.57 lacks it and would not wrap layers either
        raise InvalidTrial(
            f"sharding={trial.sharding} with runner=trainer: TrainingArguments of transformers "
            f"{transformers.__version__} have no setting for FSDP's version; install a newer one, or use runner=torch"
        )
    if ignored is not None:
        raise InvalidTrial(
            f"runner.options.fsdp_config.{ignored}: transformers {transformers.__version__} ignores it with "
            f"sharding={trial.sharding}; leave it out"
        )
    asked = {key.removeprefix("fsdp_"): value for key, value in trial.runner.options.get("fsdp_config", {}).items()}
    named = asked.get("transformer_layer_cls_to_wrap") or []
    there = {type(module).__name__ for module in net.modules()}
    for name in [named] if isinstance(named, str) else named:
        if name not in there:
            usual = ", ".join(getattr(net, "_no_split_modules", None) or ()) or "not named by the model"
            raise InvalidTrial(
                f"runner.options.fsdp_config.transformer_layer_cls_to_wrap: {type(net).__name__} has no {name}; its "
                f"layers are {usual}, which is the default"
            )


def told(net: torch.nn.Module) -> dict[str, Any]:
    """Return the number of wrapped units as a column, the model included; 1 means that it is gathered as a whole."""
    units = sum(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in net.modules())
    return {"runner_config": {"fsdp_units": units}}


def on_cpu(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which FSDP runs over ranks that have no GPU."""
    from vramsweep.runners.shardings import fsdp_traced  # uses private names; no run on a GPU must depend on them

    return fsdp_traced.on_cpu(trial)


def traced(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which FSDP runs on fake tensors."""
    from vramsweep.runners.shardings import fsdp_traced

    return fsdp_traced.traced(trial)
