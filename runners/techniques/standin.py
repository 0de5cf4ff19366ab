"""Stand-ins for compiled kernels where only memory and time are traced: operators that read and change tensors.

`fused` does nothing. A stand-in makes the tensors that a library's kernel would return and has, with one call of
`fused`, the kernel's traffic counted: `read` once, `changed` read and written, `made` written. `accumulate` is a matrix
product added to what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_library = torch.library.Library("vramsweep", "DEF")
_library.define("fused(Tensor[] read, Tensor(a!)[] changed) -> ()")
_library.impl("fused", lambda read, changed: None, "CompositeExplicitAutograd")
_library.define("fused_making(Tensor[] read, Tensor(a!)[] changed, Tensor(b!)[] made) -> ()")
_library.impl("fused_making", lambda read, changed, made: None, "CompositeExplicitAutograd")
_library.define("accumulate(Tensor a, Tensor b, Tensor(a!) into) -> ()")
_library.impl("accumulate", lambda a, b, into: None, "CompositeExplicitAutograd")


def fused(read: Sequence[torch.Tensor], changed: Sequence[torch.Tensor], made: Sequence[torch.Tensor] = ()) -> None:
    """One kernel that reads tensors, changes others in place and fills those that were just made."""
    if made:
        torch.ops.vramsweep.fused_making(list(read), list(changed), list(made))
    else:
        torch.ops.vramsweep.fused(list(read), list(changed))


def accumulate(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
    """`into` (m, n) += `a` (m, k) @ `b` (k, n) in one kernel, whatever the dtypes (addmm with out_dtype)."""
    torch.ops.vramsweep.accumulate(a, b, into)


@register_flop_formula(torch.ops.vramsweep.accumulate, get_raw=True)
def _product(a: torch.Tensor, b: torch.Tensor, into: torch.Tensor, *, out_val: Any = None) -> int:
    return 2 * a.numel() * b.shape[1]
