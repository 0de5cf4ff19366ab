"""Logits and cross entropy: transformers' own, without its upcast to fp32, or without ever having all logits.

transformers computes the logits of every token, casts them to fp32 and takes their cross entropy (ForCausalLMLoss in
loss/loss_utils.py), which keeps the log-probabilities too. These are three tensors as large as the vocabulary times the
tokens. This module replaces the model's `loss_function`. `no_upcast` works on the logits as they are. For the other two
the output layer lets the hidden states through, and the loss function applies the layer itself. `chunked` does so for
an eighth of the tokens at a time, and again in the backward pass. `fused_linear` does so in Liger's function, which
computes the gradients in the forward pass, chunk by chunk. Liger's own loss with kernels=liger is in liger.py.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.techniques import liger_stub

IGNORED = -100  # the label of a token that does not count
CHUNKS = 8  # num_output_chunks of torchtune's LinearCrossEntropyLoss; torchtitan's chunked loss has as many

Loss = Callable[..., Tensor]


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model with the trial's loss in its forward pass. Raises InvalidTrial if an output layer is missing."""
    base = causal(net)
    if trial.loss == "no_upcast":
        base.loss_function = no_upcast
    elif trial.loss == "chunked":
        without_logits(base, chunked)
    elif trial.loss == "fused_linear":
        without_logits(base, fused_linear(trial))
    return net


def causal(net: Any) -> Any:
    """Return the language model itself: the model inside if it has adapters."""
    return net.get_base_model() if hasattr(net, "get_base_model") else net


def no_upcast(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
) -> Tensor:
    """Compute ForCausalLMLoss in the dtype of `logits`. Autocast is off inside, because it would cast them to fp32."""
    with torch.autocast(logits.device.type, enabled=False):
        flat, targets = logits.view(-1, vocab_size), _targets(labels)
        if num_items_in_batch is None:
            return F.cross_entropy(flat, targets, ignore_index=IGNORED)
        total = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
        return total / num_items_in_batch  # the Trainer's number accumulated


def chunked(
    layer: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Compute the loss of hidden states (batch, length, width) in `CHUNKS` parts of their tokens, one by one."""

    def part(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(layer(hidden).float(), targets, ignore_index=IGNORED, reduction="sum")

    targets = _targets(labels)
    parts = zip(hidden.flatten(0, 1).chunk(CHUNKS), targets.chunk(CHUNKS), strict=True)
    losses = [checkpoint(part, h, t, use_reentrant=False, preserve_rng_state=False) for h, t in parts]
    items = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return torch.stack(losses).sum() / items


def fused_linear(trial: Trial) -> Loss:
    """Return Liger's LigerForCausalLMLoss or its stand-in, as a function of output layer, hidden states and labels."""
    if trial.device.name == "simulated":
        fused: Loss = functools.partial(liger_stub.causal_loss, trial.device.card.capability)
    else:
        from liger_kernel.transformers.model.loss_utils import LigerForCausalLMLoss

        fused = LigerForCausalLMLoss

    def loss(layer: Any, hidden: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        head = layer.__self__
        width = hidden.shape[-1]
        return fused(hidden, head.weight, labels, width, num_items_in_batch=num_items_in_batch, bias=head.bias)

    return loss


def without_logits(base: Any, loss: Loss) -> None:
    """Let the output layer pass hidden states through, and use `loss(layer, hidden, labels, number of items)`."""
    head = base.get_output_embeddings()
    if head is None:
        raise InvalidTrial(f"{type(base).__name__} has no output layer; use loss=plain")
    layer = head.forward
    passed: Tensor | None = None  # hidden states from the output layer, until their loss is taken

    def through(hidden: Tensor) -> Tensor:
        nonlocal passed
        passed = hidden
        return hidden

    def of_hidden(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        nonlocal passed
        hidden, passed = passed, None
        if logits is not hidden:
            name = type(base).__name__
            raise InvalidTrial(f"{name} changes its logits after the output layer, so it needs them; use loss=plain")
        return loss(layer, hidden, labels, num_items_in_batch)

    forward = base.forward

    @functools.wraps(forward)  # because others look up its arguments in its signature
    def without(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        return type(out)(**{key: value for key, value in out.items() if key != "logits"})

    head.forward, base.loss_function, base.forward = through, of_hidden, without


def _targets(labels: Tensor) -> Tensor:
    """Return the token after each one, and IGNORED after the last; flat."""
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous().view(-1)
