"""Liger's Triton kernels in the place of a model's norms, feed-forward layers, rotary embedding and loss.

They are applied as the Trainer's use_liger_kernel does it (transformers/integrations/liger.py), but the loss is the
trial's: with loss=default Liger's own, fused with the output layer; with any other value what that axis puts there.

The rotary embedding is a function of the module that the model's class is from, and Liger replaces the module's classes
too: all is put back when the trial is over.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from vramsweep.harness import gpus
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners.techniques import liger_standin, loss

PREDICTED = ("llama", "mistral", "qwen2", "qwen3")  # what the stand-ins know; Liger knows more
_before: list[tuple[ModuleType, dict[str, Any]]] = []  # modules that Liger changed, and what was in them


@contextlib.contextmanager
def around(trial: Trial, device: torch.device) -> Iterator[None]:
    """Put back what was replaced in transformers' modules."""
    try:
        yield
    finally:
        while _before:
            module, names = _before.pop()
            vars(module).update(names)


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """The model with Liger's kernels. Raises InvalidTrial for an architecture without any."""
    base = loss.causal(net)
    kind = str(base.config.model_type)
    module = sys.modules[type(base).__module__]
    _before.append((module, dict(vars(module))))
    own_loss = trial.loss == "default"
    if trial.device.name == "simulated":
        _known(kind, PREDICTED, "cannot be simulated for", "; use kernels=none, or measure on device=cuda")
        card = gpus.named(trial.device.gpu)
        liger_standin.patch(base, card.multiprocessors)
        vars(module)["apply_rotary_pos_emb"] = liger_standin.rotary
        if own_loss:
            loss.without_logits(base, loss.fused_linear(trial))
        return net
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    _known(kind, MODEL_TYPE_TO_APPLY_LIGER_FN, "has nothing for", "; use kernels=none")
    _apply_liger_kernel_to_instance(model=base, fused_linear_cross_entropy=own_loss, cross_entropy=False)
    return net


def _known(kind: str, known: Any, what: str, instead: str) -> None:
    if kind not in known:
        raise InvalidTrial(f"kernels=liger {what} {kind} models, only for {', '.join(sorted(known))}{instead}")
