"""Where a fake tensor is in a simulated run: in the card's memory, in the host's, or nowhere.

Device "cpu" is the card. Device "meta" is host memory for what was made inside `host`, and for what operators make of
it; every other tensor there has a shape and no memory at all, as weights that are sharded before they exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

HOST = torch.device("meta")
_told: list[bool] = []  # the contexts that are entered, innermost last: whether theirs is page-locked


@contextlib.contextmanager
def host(pinned: bool = False) -> Iterator[torch.device]:
    """What is made on device meta inside is host memory, page-locked if `pinned`; yields the device to make it on."""
    _told.append(pinned)
    try:
        yield HOST
    finally:
        _told.pop()


def told() -> bool | None:
    """Whether what is made on device meta now is page-locked host memory (True), other host memory, or none (None)."""
    return _told[-1] if _told else None


def pinned(like: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A fresh page-locked tensor of the dtype of `like`, and its shape unless another is given."""
    with host(pinned=True):
        return torch.empty(tuple(like.shape if shape is None else shape), dtype=like.dtype, device=HOST)
