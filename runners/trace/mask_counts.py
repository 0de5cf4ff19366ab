"""How many elements a mask selects where only a GPU knows: an assumption, which `counts_of_values` reports.

Mixture-of-experts models take each expert's tokens by a mask: `idx, nth = torch.where(chosen == expert)`. A whole
number from topk, sort, argmax or max over a dimension of E names each of E choices equally often. So a comparison with
one of them, and a one-hot code, selects 1/E of its elements, and `any` over k of them k/E. All other masks select all
elements, which is the most that they can.
"""

import math
from fractions import Fraction
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
_CHOOSING = {aten.topk.default: 2, aten.sort.default: 1, aten.argmax.default: 1, aten.max.dim: 1}  # where `dim` is
_EQUAL = frozenset((aten.eq.Scalar, aten.eq.Tensor))
_KEEPING = frozenset((aten._to_copy.default, aten.clone.default))


def note_share(tracer: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Keep with an operator's results what share of choices, or of a mask's elements, is one choice.

    `any` of such a mask, by which experts may be skipped, gets the value assumed; in a forward pass its sum, too. Other
    sums are counts that a script prints, such as right answers.
    """
    if (at := _CHOOSING.get(func)) is not None and args[0].dim():
        dim = kwargs.get("dim", args[at] if len(args) > at else None if func is aten.argmax.default else -1)
        choices = args[0].numel() if dim is None else args[0].size(dim)
        chosen: Any = out if isinstance(out, torch.Tensor) else out[1]
        chosen._choice = Fraction(1, max(1, choices))
    compared = args[:2] if func is aten.eq.Tensor else args[:1]
    choice: Fraction | None = next((one._choice for one in compared if hasattr(one, "_choice")), None)
    share: Fraction | None = getattr(args[0], "_share", None) if args else None
    if choice is not None and func in _EQUAL:
        out._share = choice
    elif choice is not None and (func in _KEEPING or func.is_view):
        for tensor in tree_iter(out):
            tensor._choice = choice
    elif share is None:
        return
    elif func._schema.is_mutable:  # it may select more now
        args[0]._share = Fraction(1)
    elif func is aten.any.default or (func is aten.sum.default and tracer.in_module()):
        count = count_selected(tracer, args[0])
        with unset_fake_temporarily():
            tracer.known.give(out, torch.tensor(count).to(out.dtype))
    elif func is aten.any.dim:
        out._share = min(Fraction(1), share * args[0].size(args[1]))
    elif func in _KEEPING or func.is_view or (func is aten.eq.Scalar and args[1] == 1):
        for tensor in tree_iter(out):
            tensor._share = share


def count_selected(tracer: Any, mask: torch.Tensor) -> int:
    """Return how many elements an unknown mask is taken to select, and report it."""
    share = getattr(mask, "_share", Fraction(1))
    tracer.leave_out("counts_of_values", "all elements" if share == 1 else f"{share} of the elements")
    return math.ceil(share * mask.numel())
