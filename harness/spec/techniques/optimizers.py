"""Techniques for the update of weights: the optimizer, and when ranks average gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.techniques.schema import read_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


def _fused_under_deepspeed(trial: Trial) -> Iterator[str]:
    if trial.runner.name == "deepspeed" and trial.device.name == "cpu":
        yield "optimizer=adamw_torch_fused with runner=deepspeed needs CUDA; on device=cpu use adamw_torch"


def _accumulating(trial: Trial) -> Iterator[str]:
    if trial.grad_accum == 1:
        yield "no_sync=false has no effect with grad_accum=1, because the only pass averages gradients anyway"


# Least versions: before them, bitsandbytes had blocks of 2,048 elements, and torchao's optimizers were prototypes.
AXES, TECHNIQUES = read_table("optimizers.json", _fused_under_deepspeed, _accumulating)
