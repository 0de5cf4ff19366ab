"""The two memories of a traced script: the card's, whose tensors are fake, and the host's.

Elsewhere in a trace every tensor is the card's unless device meta says otherwise (fake_placement.py). A script is the
user's own code, which keeps data on the host and moves it. So what it makes without naming a card is a real tensor,
with its values: data sets, shuffled indices, counts, masks. Parameters are the exception, as a model may be too large
to be made: they are fake from the start, and of the host by account until they are moved, which copies, as on a card.
What is the card's says so: its device is cuda to whoever asks from outside of torch's operators.

Not covered: tensors that want gradients and are no parameters are the card's at once.
"""

from __future__ import annotations

import functools
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.trace.known_values import small
from vramsweep.runners.trace.step_tracer import Place, Tracer

CARD = torch.device("cuda", 0)
_DEVICE: Any = FakeTensor.device
_IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_OF_DEVICES = (torch.device, torch._C._nn._parse_to)
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
NOWHERE = 1 << 62  # added to an address, none of a process's: who reads there ends, and reads nothing of others
_HERE = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)


class TwoMemories(TorchFunctionMode):
    """Makes the host's tensors real, and copies what is moved; entered above everything else that a trace needs."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.default: torch.device | None = None  # set_default_device

    def replacements(self) -> Iterator[Replacement]:
        """What of torch is replaced meanwhile: owner, name, stand-in."""
        make = torch.nn.Parameter.__new__

        def parameter(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            return make(cls, self.fake(data, "host") if _real(data) else data, requires_grad)

        def default(device: Any) -> None:
            self.default = None if device is None else torch.device(device)

        yield torch.nn.Parameter, "__new__", staticmethod(parameter)
        yield torch, "set_default_device", default
        yield torch, "load", self.loading(torch.load)
        yield FakeTensor, "device", property(self.device)
        yield from _addresses()

    def device(self, tensor: Any) -> torch.device:
        """A fake tensor's device: where the script asks, the card's is cuda; inside of operators it is the trace's."""
        told: torch.device = _DEVICE.fget(tensor)
        outside = self in _get_current_function_mode_stack() and self.tracer in _get_current_dispatch_mode_stack()
        return CARD if outside and told.type == "cpu" and not self.tracer.on_host(tensor) else told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _OF_DEVICES:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if func is torch.Tensor.__deepcopy__:
            return self.copied(*args)
        if func == _IS_CUDA and isinstance(args[0], FakeTensor):
            return args[0].device.type == "cpu" and not self.tracer.on_host(args[0])
        if func in _device_constructors():
            kwargs.pop("pin_memory", None)  # page-locked is host memory, too, and needs a driver
            if kwargs.get("device") is None and self.default is not None:
                kwargs["device"] = self.default
            known = not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
            if known and str(kwargs.get("device") or "cpu") == "cpu" and not kwargs.get("requires_grad"):
                with _disable_current_modes():
                    return func(*args, **kwargs)
            if known and func in _OF_DATA:  # made on the host, from numbers that are there, and copied
                with _disable_current_modes():
                    made = func(*args, **kwargs | {"device": "cpu"})
                return made if made.requires_grad else self.fake(made, "card")
        elif func in _HERE and isinstance(args[0], torch.Tensor):
            device, dtype = self.target(func, args[1:], kwargs)
            if device == "cuda" and self.on_host(args[0]):
                return self.moved(args[0], dtype, "card")
            if device == "cpu" and isinstance(args[0], FakeTensor) and not self.on_host(args[0]):
                return self.moved(args[0], dtype, "host")
        return func(*args, **kwargs)

    def copied(self, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """copy.deepcopy's, which copies storages byte by byte: fake ones have none."""
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                copied: torch.Tensor = tensor.__deepcopy__(memo)
                return copied
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        found: torch.Tensor = memo[id(tensor)]
        return found

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether it is a tensor in host memory, which can be moved from there."""
        if isinstance(tensor, FakeTensor):
            return self.tracer.on_host(tensor)
        return _real(tensor) and not tensor.requires_grad

    def target(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str | None, torch.dtype | None]:
        """Where a tensor is to be: cuda, cpu, or None for where it is; and its dtype, if that is named."""
        if func is torch.Tensor.cuda:
            return "cuda", None
        if func is torch.Tensor.cpu:
            return "cpu", None
        given = (*args, *kwargs.values())
        like = next((one for one in given if isinstance(one, torch.Tensor)), None)
        if like is not None:
            return ("cpu" if self.on_host(like) else "cuda"), like.dtype
        dtype = next((one for one in given if isinstance(one, torch.dtype)), None)
        device = next((one for one in given if isinstance(one, (str, torch.device)) or type(one) is int), None)
        if device is None or isinstance(device, int):
            return (None if device is None else "cuda"), dtype
        return str(device).partition(":")[0], dtype

    def moved(self, tensor: torch.Tensor, dtype: torch.dtype | None, place: Place) -> torch.Tensor:
        """A copy in the other memory; another dtype is made where it comes from (aten/src/ATen/native/cuda/Copy.cu)."""
        if dtype is not None and dtype != tensor.dtype:
            tensor = tensor.to(dtype)
        if not isinstance(tensor, FakeTensor):
            return self.fake(tensor, place)
        with self.tracer.placing(place):
            return tensor.clone()

    def fake(self, tensor: torch.Tensor, place: Place, own: bool = False) -> torch.Tensor:
        """A fake tensor for a real one, whose value is known where known_values.py keeps it; `own`: nobody has it."""
        with self.tracer.placing(place):
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
        if self.tracer.known is not None and small(made):
            with _disable_current_modes():
                self.tracer.known.give(made, tensor.detach() if own else tensor.detach().clone())
        return made

    def loading(self, load: Any) -> Any:
        """torch.load, which in a trace would return tensors without values: those on the host are real, here too."""

        @functools.wraps(load)
        def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self not in _get_current_function_mode_stack() or str(map_location) == "meta":
                return load(f, map_location, *args, **kwargs)
            rebuild = torch._utils._rebuild_tensor
            moved: dict[int, Any] = {}  # storages that belong on the card, and what they are there

            def located(storage: Any, location: str) -> Any:
                if callable(map_location):
                    return map_location(storage, location)
                to = map_location.get(location, location) if isinstance(map_location, dict) else map_location
                if str(location if to is None else to).startswith("cuda"):
                    moved[storage._cdata] = None
                return storage

            def rebuilt(storage: Any, offset: int, size: Any, stride: Any) -> Any:
                key = storage._untyped_storage._cdata
                if key not in moved:
                    return rebuild(storage, offset, size, stride)
                if moved[key] is None:
                    whole = rebuild(storage, 0, (storage._size(),), (1,))
                    moved[key] = self.fake(whole, "card", own=True)  # an old file's values are read only later
                return moved[key].as_strided(size, stride, offset)

            if isinstance(f, (str, os.PathLike)) and zipfile.is_zipfile(f):
                kwargs.setdefault("mmap", True)  # weights that nobody reads take no memory
            unseen = [(torch._guards, name, lambda *_: None) for name in ("detect_fake_mode", "active_fake_mode")]
            with patched([(torch._utils, "_rebuild_tensor", rebuilt), *unseen]):
                return load(f, located, *args, **kwargs)

        return loaded


def _addresses() -> Iterator[Replacement]:
    """Addresses of fake tensors' own, where nothing lies: torch has them all at 0, where those who save see one
    tensor."""
    of_storage, of_tensor = torch.UntypedStorage.data_ptr, torch.Tensor.data_ptr

    def storage_at(storage: Any) -> int:
        if storage.device.type != "meta":
            return of_storage(storage)
        return int(storage._cdata) | NOWHERE if storage.nbytes() else 0

    def tensor_at(tensor: Any) -> int:
        if not isinstance(tensor, FakeTensor):
            return of_tensor(tensor)
        start = storage_at(tensor.untyped_storage())
        return start and start + int(tensor.storage_offset()) * tensor.element_size()

    yield torch.UntypedStorage, "data_ptr", storage_at
    yield torch.Tensor, "data_ptr", tensor_at


def _real(tensor: Any) -> bool:
    """Whether it is an ordinary tensor with values."""
    return (
        isinstance(tensor, torch.Tensor)
        and not isinstance(tensor, FakeTensor)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )
