"""Where a fake tensor is in a simulated run: in the card's memory, in the host's, or nowhere.

Device "cpu" is the card. Device "meta" is host memory for what is moved there from the card or made inside `on_host`,
and for what operators make of it. Every other tensor there has a shape and no memory at all: one that is made there as
such, or inside `without_memory`, as weights that are sharded before they exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from vramsweep.runners.measure.patches import patched

HOST = torch.device("meta")
Place = Literal["pageable", "pinned", "nowhere"]
_told: list[Place] = []  # of the contexts that are entered, innermost last


def current_placement() -> Place | None:
    """What device meta stands for in the context that is entered last; None outside of all."""
    return _told[-1] if _told else None


@contextlib.contextmanager
def _placement(place: Place) -> Iterator[torch.device]:
    _told.append(place)
    try:
        yield HOST
    finally:
        _told.pop()


def on_host(pinned: bool = False) -> contextlib.AbstractContextManager[torch.device]:
    """What is made on device meta inside is in host memory, page-locked if `pinned`; enters with the device."""
    return _placement("pinned" if pinned else "pageable")


def without_memory() -> contextlib.AbstractContextManager[torch.device]:
    """What is made on device meta inside has no memory, whatever it is made of."""
    return _placement("nowhere")


def pinned(like: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """A fresh page-locked tensor of the dtype of `like`, and its shape unless another is given."""
    with on_host(pinned=True):
        return torch.empty(tuple(like.shape if shape is None else shape), dtype=like.dtype, device=HOST)


def weightless() -> contextlib.AbstractContextManager[None]:
    """Modules made inside have their parameters on device meta, each from the moment it is theirs."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            with without_memory():
                parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    return patched([(torch.nn.Module, "register_parameter", register_on_meta)])
