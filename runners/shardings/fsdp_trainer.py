"""The Trainer's `fsdp` arguments, of FSDP1 and FSDP2 alike.

`runner.options.fsdp_config` is the user's fsdp_config; what axes say is not in it (harness/registry.py). Precision is
accelerate's: with bf16 and fp16 a policy that gathers, computes and reduces in half precision, and parameters in fp32
(accelerate/state.py AcceleratorState, utils/fsdp_utils.py fsdp2_prepare_model, accelerator.py prepare_model).

Not covered: what accelerate and FSDP need where there is no card (fsdp_traced.py, loaded only there).
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers
from accelerate.utils.constants import FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import TrainingArguments

from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import shardings
from vramsweep.runners.shardings.asked import Asked


def arguments(trial: Trial, version: int) -> dict[str, Any]:
    """TrainingArguments for this version of FSDP."""
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
    told: dict[str, Any] = {"fsdp": True, "fsdp_config": Asked({"version": version, **own})}
    if trial.offload_param:
        told["fsdp_config"]["cpu_offload"] = True
        if trial.device.name == "cuda" and "ddp_backend" not in trial.runner.options:
            told["ddp_backend"] = "cuda:nccl,cpu:gloo"  # as `accelerate launch` does: norms are taken on the host
    return told


def _wanted(key: str, value: Any, version: int) -> str | None:
    """What a value of fsdp_config must be, where it is not: accelerate meets it with a KeyError or less."""
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
    """The model is made on the host; FSDP moves it unit by unit."""
    return shardings.host(trial)


def fitting(trial: Trial, net: torch.nn.Module, made: TrainingArguments) -> None:
    """Raise InvalidTrial for a key that is not heeded, and for a class to wrap that the model lacks."""
    config: Any = made.fsdp_config
    ignored = next((key for key in config if key not in config.asked), None)
    if ignored == "version":  # ours, which 4.57 has no word for: it would not wrap layers either
        raise InvalidTrial(
            f"sharding={trial.sharding} with runner=trainer: TrainingArguments of transformers "
            f"{transformers.__version__} know no version of FSDP; install a newer one, or use runner=torch"
        )
    if ignored is not None:
        raise InvalidTrial(
            f"runner.options.fsdp_config.{ignored}: transformers {transformers.__version__} does not look at it with "
            f"sharding={trial.sharding}; it would have no effect"
        )
    asked = {key.removeprefix("fsdp_"): value for key, value in trial.runner.options.get("fsdp_config", {}).items()}
    named = asked.get("transformer_layer_cls_to_wrap") or []
    there = {type(module).__name__ for module in net.modules()}
    for name in [named] if isinstance(named, str) else named:
        if name not in there:
            usual = ", ".join(getattr(net, "_no_split_modules", None) or ()) or "none that it names itself"
            raise InvalidTrial(
                f"runner.options.fsdp_config.transformer_layer_cls_to_wrap: {type(net).__name__} has no {name}; its "
                f"layers are {usual}, which is the default"
            )


def told(net: torch.nn.Module) -> dict[str, Any]:
    """How many units were wrapped, the model itself among them: 1 is a model that is gathered as a whole."""
    units = sum(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in net.modules())
    return {"runner_config": {"fsdp_units": units}}


def on_cpu(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """FSDP over ranks that have no card."""
    from vramsweep.runners.shardings import fsdp_traced  # private names, which no card is to depend on

    return fsdp_traced.on_cpu(trial)


def traced(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """FSDP on fake tensors."""
    from vramsweep.runners.shardings import fsdp_traced

    return fsdp_traced.traced(trial)
