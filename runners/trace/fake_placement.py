"""Location of a fake tensor in a simulated run: GPU memory, host memory, or nowhere.

Device "cpu" is the GPU. Device "meta" is host memory for what is moved there from the GPU or made inside `on_host`, and
for what operators make from it. Every other tensor on "meta" has a shape and no memory at all. Such a tensor is made
there as such, or inside `without_memory`, as weights that are sharded before they exist.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from vramsweep.runners.measure.patches import patched

HOST = torch.device("meta")
Place = Literal["pageable", "pinned", "nowhere"]
_told: list[Place] = []  # of the entered contexts, innermost last


def current_placement() -> Place | None:
    """Return what device meta stands for in the innermost context, or None outside of all."""
    return _told[-1] if _told else None


@contextlib.contextmanager
def _placement(place: Place) -> Iterator[torch.device]:
    _told.append(place)
    try:
        yield HOST
    finally:
        _told.pop()


def on_host(pinned: bool = False) -> contextlib.AbstractContextManager[torch.device]:
    """Return a context, entered with device meta, in which that is host memory, page-locked if `pinned`."""
    return _placement("pinned" if pinned else "pageable")


def without_memory() -> contextlib.AbstractContextManager[torch.device]:
    """Return a context in which what is made on device meta has no memory, whatever it is made from."""
    return _placement("nowhere")


def pinned(like: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return a new page-locked tensor with the dtype of `like`, and its shape unless another is given."""
    with on_host(pinned=True):
        return torch.empty(tuple(like.shape if shape is None else shape), dtype=like.dtype, device=HOST)


def weightless() -> contextlib.AbstractContextManager[None]:
    """Return a context in which modules have each parameter on device meta from the moment it is registered."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            with without_memory():
                parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    return patched([(torch.nn.Module, "register_parameter", register_on_meta)])
