"""LoRA with FSDP1 where each adapter is a unit of its own, as peft's `fsdp_auto_wrap_policy` and llama-recipes'
policy do.

`qlora_script`: AnswerDotAI/fsdp_qlora's train.py with --train_type lora: adapters in the weights' precision (as old
peft has them), no mixed precision, flattened parameters, checkpointing inside FSDP's units, and the output, with the
logits, held until the step is over. `no_shard`: the same with NO_SHARD, which the script calls ddp. `trainer`: the
Trainer's: adapters in fp32, use_orig_params, gradients clipped to a norm of 1, checkpointing around FSDP's units (as
models of transformers 4.48 have it), and the loss of 4.46 to 4.48.

Simulated only: rank 0 of two, whose other does not exist. Sharding is not the trial's axis here: the target was there
before custom targets knew FSDP1, and joins the ranks itself. The trial's other axes say the rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from vramsweep.harness.spec.trial import DeviceAxis, RunnerAxis, Trial
from vramsweep.runners.model import apply_techniques
from vramsweep.runners.model import build as parts
from vramsweep.runners.rank import process_group
from vramsweep.runners.shardings import fsdp, interface
from vramsweep.runners.techniques import lora
from vramsweep.runners.trace import fake_placement

RANKS = 2
CLIP = 1.0
_OPEN = contextlib.ExitStack()  # what is around the whole run, for as long as this process lives


def qlora_script(trial: Trial) -> tuple[Any, ...]:
    """The script, weights divided."""
    return _script(trial, ShardingStrategy.FULL_SHARD)


def no_shard(trial: Trial) -> tuple[Any, ...]:
    """The script, weights whole on each rank."""
    return _script(trial, ShardingStrategy.NO_SHARD)


def trainer(trial: Trial) -> tuple[Any, ...]:
    """The Trainer with peft."""
    inner, device = _joined(trial.model_copy(update={"checkpointing": "none"}))
    with fake_placement.on_host():
        net = parts.model(inner, interface.host(inner))
    net.loss_function = _shifted
    net.enable_input_require_grads()
    whole = _divided(net, device, True, ShardingStrategy.FULL_SHARD)
    stack = net.model.layers
    for index, layer in enumerate(stack):  # before GradientCheckpointingLayer: around FSDP's units
        stack[index] = wrapping.checkpoint_wrapper(layer, checkpoint_impl=wrapping.CheckpointImpl.REENTRANT)
    return whole, *_loop(inner, whole, device, clip=True)


def _script(trial: Trial, strategy: ShardingStrategy) -> tuple[Any, ...]:
    inner, device = _joined(trial.model_copy(update={"checkpointing": "none"}))
    keep, lora.Adapter.raise_to_fp32 = lora.Adapter.raise_to_fp32, lambda self: None
    try:
        with fake_placement.on_host():
            net = parts.model(inner, interface.host(inner))
    finally:
        lora.Adapter.raise_to_fp32 = keep
    layers = set(fsdp.blocks(net))
    net.loss_function = _shifted
    net.lm_head.register_forward_hook(lambda module, given, logits: logits.float())  # before transformers 4.46
    whole = _divided(net, device, False, strategy)
    net.enable_input_require_grads()
    wrapping.apply_activation_checkpointing(
        whole,
        checkpoint_wrapper_fn=functools.partial(
            wrapping.checkpoint_wrapper, checkpoint_impl=wrapping.CheckpointImpl.REENTRANT
        ),
        check_fn=layers.__contains__,
    )
    return whole, *_loop(inner, whole, device, clip=False, held=True)


def _joined(trial: Trial) -> tuple[Trial, torch.device]:
    inner = trial.model_copy(
        update={
            "runner": RunnerAxis(name="torch"),
            "device": DeviceAxis(name="simulated", gpu="a100-80gb"),
            "sharding": "fsdp1",
            "world_size": RANKS,
        }
    )
    device = torch.empty(0).device
    for hook in apply_techniques.hooks(inner, "around"):
        _OPEN.enter_context(hook(inner, device))
    _OPEN.enter_context(interface.without_card(inner))
    process_group.join(inner, device)
    return inner, device


def _divided(net: nn.Module, device: torch.device, original: bool, strategy: ShardingStrategy) -> FSDP:
    units = set(fsdp.blocks(net))

    def unit(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        leaf = not list(module.named_children())
        return module in units or (leaf and weight is not None and bool(weight.requires_grad))

    return FSDP(
        net,
        sharding_strategy=strategy,
        auto_wrap_policy=functools.partial(lambda_auto_wrap_policy, lambda_fn=unit),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=original,
        device_id=device,
    )


def _loop(
    inner: Trial, whole: FSDP, device: torch.device, clip: bool, held: bool = False
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Optimizer and step. The script's `output`, with the logits, is `held` until its step is over."""
    optimizer = parts.optimizer(inner, whole.parameters(), device)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = whole(input_ids=batch["input_ids"], labels=batch["labels"])
        loss: torch.Tensor = output.loss
        output = output if held else None
        loss.backward()
        if clip:
            whole.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return optimizer, step


def _shifted(logits: torch.Tensor, labels: torch.Tensor, **rest: Any) -> torch.Tensor:
    whole = logits.float()
    shifted = whole[..., :-1, :].contiguous()
    following = labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), following.view(-1))
