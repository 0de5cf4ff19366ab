"""Stand-ins for compiled kernels where only memory and time are traced: an operator that reads and changes tensors,
and an optimizer made of it.

`fused` does nothing. A stand-in makes the tensors that a library's kernel would return and has, with one call of
`fused`, the kernel's traffic counted: `read` once, `changed` read and written; with `filled` written only. `Optimizer` is
the same for optimizers, whose libraries differ in the state that they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_library = torch.library.Library("vramsweep", "DEF")
_library.define("fused(Tensor[] read, Tensor(a!)[] changed) -> ()")
_library.impl("fused", lambda read, changed: None, "CompositeExplicitAutograd")
_library.define("filled(Tensor[] read, Tensor(a!)[] written) -> ()")
_library.impl("filled", lambda read, written: None, "CompositeExplicitAutograd")


def fused(read: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
    """One kernel that reads tensors and changes others in place."""
    torch.ops.vramsweep.fused(list(read), list(changed))


class Optimizer(torch.optim.Optimizer):
    """An optimizer with its library's state, in bytes and in order, and no arithmetic.

    `stands_for` is what the row of a measured run calls it.
    """

    stands_for = ""

    def __init__(self, params: Any, lr: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr})

    def new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the library makes for a parameter on its first step, by name; "qmap" in the name is a table."""
        raise NotImplementedError

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """The kernels of one parameter's step: one that reads the gradient and tables and changes everything else."""
        tables = [t for name, t in state.items() if "qmap" in name]
        fused([grad, *tables], [p, *(t for name, t in state.items() if "qmap" not in name)])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make what state is missing, and change parameters and state."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p].update(self.new_state(p))
                self.update(p, p.grad, self.state[p])


def filled(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    """One kernel that reads tensors and writes others, whose values before do not matter."""
    torch.ops.vramsweep.filled(list(read), list(written))
