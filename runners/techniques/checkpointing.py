"""Activation checkpointing of a model's layers: full, or selective, which keeps the results of chosen operators.

Layers are transformers' own (`GradientCheckpointingLayer`), whose flag says whether one is checkpointed. The function
that does it is torch.utils.checkpoint. Selective is `create_selective_checkpoint_contexts`. It keeps the results of the
chosen operators in a layer's forward pass, and gives them back when the layer is recomputed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from vramsweep.harness.messages.suggestions import did_you_mean
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.dispatch_modes import FUSED_ATTENTION

# Matrix products and attention kernels, because they are expensive to compute again. Batched products are left out,
# because they are the scores of attention=eager. torchtitan's list is alike, but leaves out every second product
# (torchtitan distributed/activation_checkpoint.py).
DEFAULT_OPS = (
    *("mm", "addmm", *(f"_scaled_dot_product_{kernel}" for kernel in FUSED_ATTENTION)),
    # flash_attention_2, and its stand-in
    *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward", "vramsweep::flash_forward"),
)


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model, in which every N-th layer recomputes its activations in the backward pass."""
    arguments: dict[str, Any] = {"use_reentrant": trial.checkpointing_reentrant}
    if trial.checkpointing == "selective":
        arguments["context_fn"] = _contexts(trial.checkpointing_ops)
    if hasattr(net, "activation_checkpointing_enable"):  # its name since transformers 5.23
        net.activation_checkpointing_enable(activation_checkpointing_kwargs=arguments)
    else:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    layers = [module for module in net.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers and trial.checkpointing_every > 1:
        name = type(net).__name__
        raise InvalidTrial(f"checkpointing_every: {name} can only checkpoint all layers or none; use 1")
    for index, layer in enumerate(layers):
        layer.gradient_checkpointing = index % trial.checkpointing_every == 0
    return net


def _contexts(names: str) -> Callable[[], Any]:
    """Return the `context_fn` of torch.utils.checkpoint, which is called once for each layer and forward pass.

    It raises InvalidTrial, from the second layer on, if no layer calls a named operator, which would keep nothing.
    """
    asked = () if names == "default" else tuple(names.split("+"))
    kept = {overload: name for name in asked or DEFAULT_OPS for overload in _overloads(name, bool(asked))}
    missing = set(asked)
    layers = 0

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        missing.discard(kept[operator])
        return CheckpointPolicy.MUST_SAVE

    def contexts() -> Any:
        nonlocal layers
        layers += 1
        if layers > 1 and missing:
            uncalled = "+".join(sorted(missing))
            raise InvalidTrial(f"checkpointing_ops: no layer of this model calls {uncalled}; leave it out")
        return create_selective_checkpoint_contexts(policy)

    return contexts


@functools.cache
def _overloads(name: str, must: bool) -> tuple[Any, ...]:
    """Return an operator's overloads, none if it does not exist. Raises InvalidTrial then if it `must`."""
    namespace, _, operator = name.rpartition("::")
    packet = getattr(getattr(torch.ops, namespace or "aten"), operator, None)
    if packet is not None:
        return tuple(getattr(packet, overload) for overload in packet.overloads())
    if not must:
        return ()
    there = {full.partition(".")[0].removeprefix("aten::") for full in torch._C._dispatch_get_all_op_names()}
    raise InvalidTrial(f"checkpointing_ops: torch has no operator {name}{did_you_mean(name, there)}")
