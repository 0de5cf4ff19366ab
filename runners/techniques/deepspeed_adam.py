"""DeepSpeed's own Adam, with decoupled weight decay: FusedAdam on the GPU, DeepSpeedCPUAdam for offloaded state.

A ds config's `"optimizer": {"type": "AdamW"}` gives these. Both are compiled on first use, by nvcc or a C++ compiler.
A simulation leaves out only the compiled part. FusedAdam's own Python code makes the state (fused_adam.py, `step`: two
tensors like the parameter) and calls a kernel without temporaries. CPUAdam's state is in host memory.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.op_builder import FusedAdamBuilder

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.techniques.kernel_stubs import fused


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and its arguments, with decoupled weight decay."""
    if trial.optimizer == "deepspeed_fused_adam":
        return FusedAdam, {"lr": 1e-5, "adam_w_mode": True}
    return DeepSpeedCPUAdam, {"lr": 1e-5, "adamw_mode": True}


def around(trial: Trial, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Give a simulated FusedAdam a kernel that does nothing, in place of the compiled one."""

    def kernel(chunk: int, skip: torch.Tensor, lists: list[list[torch.Tensor]], *settings: Any) -> None:
        gradients, *changed = lists
        fused(gradients, [tensor for each in changed for tensor in each])

    compiled = SimpleNamespace(multi_tensor_adam=kernel)
    simulated = trial.device.name == "simulated"
    return patched([(FusedAdamBuilder, "load", lambda *args, **kwargs: compiled)] if simulated else [])
