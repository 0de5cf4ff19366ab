"""Stand-ins for compiled kernels where only memory and time are traced: operators that read and change tensors, and
an optimizer made of them.

`fused` does nothing. A stand-in makes the tensors that a library's kernel would return, and calls `fused` once. That
counts the kernel's traffic: `read` once, `changed` read and written, `made` written. `accumulate` adds a matrix
product to a tensor. `Optimizer` is for libraries that differ in the state that they keep.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("vramsweep", "DEF")
_library.define("fused(Tensor[] read, Tensor(a!)[] changed, Tensor(b!)[] made) -> ()")
_library.impl("fused", lambda read, changed, made: None, "CompositeExplicitAutograd")
_library.define("accumulate(Tensor a, Tensor b, Tensor(a!) into) -> ()")
_library.impl("accumulate", lambda a, b, into: None, "CompositeExplicitAutograd")


def fused(
    read: Sequence[torch.Tensor], changed: Sequence[torch.Tensor] = (), made: Sequence[torch.Tensor] = ()
) -> None:
    """Stand in for one kernel that reads tensors, changes others in place and fills those that were just made."""
    torch.ops.vramsweep.fused(list(read), list(changed), list(made))


def accumulate(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
    """Stand in for `into` (m, n) += `a` (m, k) @ `b` (k, n) in one kernel, in any dtypes (addmm with out_dtype)."""
    torch.ops.vramsweep.accumulate(a, b, into)


@register_flop_formula(torch.ops.vramsweep.accumulate, get_raw=True)
def _product(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor, *, out_val: Any = None) -> int:
    return 2 * a.numel() * b.shape[1]


class Optimizer(torch.optim.Optimizer):
    """An optimizer with its library's state, in bytes and in order, and no arithmetic. `stands_for` is its name in the
    row of a measured run."""

    stands_for = ""

    def __init__(self, params: Any, lr: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr})

    def new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return by name the state that the library makes on a parameter's first step; "qmap" in a name is a table."""
        raise NotImplementedError

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Call the kernel of one parameter's step, which reads the gradient and tables and changes everything else."""
        tables = [t for name, t in state.items() if "qmap" in name]
        fused([grad, *tables], [p, *(t for name, t in state.items() if "qmap" not in name)])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the missing state, and change parameters and state."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self.state[p].update(self.new_state(p))
                self.update(p, p.grad, self.state[p])
