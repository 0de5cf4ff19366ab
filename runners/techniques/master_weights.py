"""bf16 weights with fp32 master copies, in the plain loop: the optimizer steps on the copies.

The model computes in bf16, without autocast; gradients are bf16, and add up in bf16 over accumulated passes. At the
step each is cast to fp32 and freed. Then the optimizer changes the copies, and these are rounded into the weights. So
does Megatron-LM's Float16OptimizerWithFloat16Params (`_copy_model_grads_to_main_grads`,
`_copy_main_params_to_model_params`).
"""

from collections.abc import Callable
from typing import Any

import torch

from vramsweep.harness.spec.trial import Trial


class MasterWeights:
    """An optimizer over fp32 copies of `parameters`, for the plain loop."""

    def __init__(
        self, parameters: list[torch.nn.Parameter], make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]
    ) -> None:
        self.parameters = parameters
        self.masters = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in parameters]
        self.optimizer = make(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        """Cast the gradients, step, and round the copies into the weights."""
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_([*self.parameters], self.masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the weights' gradients; each step frees those of the copies."""
        for p in self.parameters:
            p.grad = None


def stepping(
    trial: Trial, make: Callable[[list[Any]], torch.optim.Optimizer], parameters: list[torch.nn.Parameter]
) -> MasterWeights:
    """Return the trial's optimizer, over master copies."""
    return MasterWeights(parameters, make)
