"""Stand-ins for compiled kernels where only memory and time are traced: an operator that reads and changes tensors.

`fused` does nothing. A stand-in makes the tensors that a library's kernel would return and has, with one call of
`fused`, the kernel's traffic counted: `read` once, `changed` read and written; with `filled` written only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_library = torch.library.Library("vramsweep", "DEF")
_library.define("fused(Tensor[] read, Tensor(a!)[] changed) -> ()")
_library.impl("fused", lambda read, changed: None, "CompositeExplicitAutograd")
_library.define("filled(Tensor[] read, Tensor(a!)[] written) -> ()")
_library.impl("filled", lambda read, written: None, "CompositeExplicitAutograd")


def fused(read: Sequence[torch.Tensor], changed: Sequence[torch.Tensor]) -> None:
    """One kernel that reads tensors and changes others in place."""
    torch.ops.vramsweep.fused(list(read), list(changed))


def filled(read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
    """One kernel that reads tensors and writes others, whose values before do not matter."""
    torch.ops.vramsweep.filled(list(read), list(written))
