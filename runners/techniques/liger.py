"""Liger's Triton kernels in the place of a model's norms, feed-forward layers, rotary embedding and loss.

They are applied as the Trainer's use_liger_kernel does it (transformers/integrations/liger.py), but with the trial's
loss. loss=default is Liger's own, fused with the output layer; any other value is what that axis puts there.

The rotary embedding is a function in the module of the model's class, and Liger also replaces that module's classes.
All of them are put back when the trial is over.
"""

import contextlib
import sys
from collections.abc import Collection, Iterator
from types import ModuleType
from typing import Any

import torch

from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.techniques import liger_stub, loss

PREDICTED = ("llama", "mistral", "qwen2", "qwen3")  # models with stand-ins; Liger supports more
_before: list[tuple[ModuleType, dict[str, Any]]] = []  # modules that Liger changed, and their contents before


@contextlib.contextmanager
def around(trial: Trial, device: torch.device) -> Iterator[None]:
    """Restore transformers' modules when the context is left."""
    try:
        yield
    finally:
        while _before:
            module, names = _before.pop()
            vars(module).update(names)


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model with Liger's kernels. Raises InvalidTrial for an architecture without any."""
    base = loss.causal(net)
    module = sys.modules[type(base).__module__]
    _before.append((module, dict(vars(module))))
    (_stand_in if trial.device.name == "simulated" else _library)(trial, base)
    return net


def _library(trial: Trial, base: Any) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    _known(base, MODEL_TYPE_TO_APPLY_LIGER_FN, "has no kernels for", "use kernels=none")
    own_loss = trial.loss == "default"
    _apply_liger_kernel_to_instance(model=base, fused_linear_cross_entropy=own_loss, cross_entropy=False)


def _stand_in(trial: Trial, base: Any) -> None:
    _known(base, PREDICTED, "cannot be predicted for", "use kernels=none, or measure on device=cuda")
    liger_stub.patch(base, trial.device.card.multiprocessors)
    vars(sys.modules[type(base).__module__])["apply_rotary_pos_emb"] = liger_stub.rotary
    if trial.loss == "default":
        loss.without_logits(base, loss.fused_linear(trial))


def _known(base: Any, known: Collection[str], lack: str, instead: str) -> None:
    kind = str(base.config.model_type)
    if kind not in known:
        raise InvalidTrial(f"kernels=liger {lack} {kind} models, only for {', '.join(sorted(known))}; {instead}")
