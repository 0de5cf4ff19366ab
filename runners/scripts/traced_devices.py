"""The two memories of a traced script: the GPU's, whose tensors are fake, and the host's.

Elsewhere in a trace every tensor is the GPU's unless device meta says otherwise (fake_placement.py). A script is the
user's own code, which keeps data on the host and moves it. So a tensor that it makes without naming a GPU is real, with
its values: data sets, shuffled indices, counts, masks. Parameters are the exception, because a model may be too large
to be made. They are fake from the start and counted as the host's until they are moved; a move copies, as with a GPU.
Tensors of the GPU have device cuda for all code outside torch's operators. Other tensors that require gradients are the
GPU's at once.
"""

import functools
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.trace.known_values import small
from vramsweep.runners.trace.step_tracer import Place, Tracer

CARD = torch.device("cuda", 0)
_DEVICE: Any = FakeTensor.device
_PLACE: Any = torch.Tensor.device.__get__
_IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_OF_DEVICES = (torch.device, torch._C._nn._parse_to)
_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
NOWHERE = 1 << 62  # added to an address, so that no process has it: a read there crashes, and reads no other data
_HERE = (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu)


class TwoMemories(TorchFunctionMode):
    """A mode that makes the host's tensors real and copies moved ones; entered above all else that a trace needs."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer
        self.default: torch.device | None = None  # as by set_default_device

    def replacements(self) -> Iterator[Replacement]:
        """Yield what to replace of torch during the trace: owner, name, stand-in."""
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
        """Return a fake tensor's device: cuda for the GPU's if the script asks, the trace's device inside operators."""
        told: torch.device = _DEVICE.fget(tensor)
        outside = self in _get_current_function_mode_stack() and self.tracer in _get_current_dispatch_mode_stack()
        return CARD if outside and told.type == "cpu" and not self.tracer.on_host(tensor) else told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: CARD if name == "device" and type(one) is int else one for name, one in (kwargs or {}).items()}
        at = 0 if func in _OF_DEVICES else 1  # where a GPU's number may be given as the device
        if func in (*_OF_DEVICES, torch.Tensor.to) and len(args) > at and type(args[at]) is int:
            args = (*args[:at], CARD, *args[at + 1 :])
        if func in _OF_DEVICES:
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if func is torch.Tensor.__deepcopy__:
            return self.copied(*args)
        if func in (_IS_CUDA, _PLACE) and isinstance(args[0], (FakeTensor, DTensor)):
            local: Any = args[0]._local_tensor if isinstance(args[0], DTensor) else args[0]
            here = local.device.type == "cpu" and not self.tracer.on_host(local)
            return here if func == _IS_CUDA else CARD if here else local.device
        if func in _device_constructors():
            kwargs.pop("pin_memory", None)  # page-locked memory is host memory too, and needs a driver
            if kwargs.get("device") is None and self.default is not None:
                kwargs["device"] = self.default
            known = not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values()))
            if known and str(kwargs.get("device") or "cpu") == "cpu" and not kwargs.get("requires_grad"):
                with _disable_current_modes():
                    return func(*args, **kwargs)
            if known and func in _OF_DATA:  # made on the host from known numbers, then copied
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
        """Return a deep copy for copy.deepcopy, which copies storages byte by byte, while fake ones have no bytes."""
        if not isinstance(tensor, FakeTensor):
            with _disable_current_modes():
                copied: torch.Tensor = tensor.__deepcopy__(memo)
                return copied
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        found: torch.Tensor = memo[id(tensor)]
        return found

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is in host memory and can be moved from there."""
        if isinstance(tensor, FakeTensor):
            return self.tracer.on_host(tensor)
        return _real(tensor) and not tensor.requires_grad

    def target(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str | None, torch.dtype | None]:
        """Return the requested device (cuda, cpu, or None to stay) and the dtype, None if not named."""
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
        """Return a copy in the other memory, cast to the dtype at its source (aten/src/ATen/native/cuda/Copy.cu)."""
        if dtype is not None and dtype != tensor.dtype:
            tensor = tensor.to(dtype)
        if not isinstance(tensor, FakeTensor):
            return self.fake(tensor, place)
        with self.tracer.placing(place):
            return tensor.clone()

    def fake(self, tensor: torch.Tensor, place: Place, own: bool = False) -> torch.Tensor:
        """Return a fake tensor for a real one, with its value if known_values.py keeps it. `own`: it is not shared."""
        with self.tracer.placing(place):
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cuda")
        if self.tracer.known is not None and small(made):
            with _disable_current_modes():
                self.tracer.known.give(made, tensor.detach() if own else tensor.detach().clone())
        return made

    def loading(self, load: Any) -> Any:
        """Return a stand-in for torch.load with real host tensors; in a trace its tensors would have no values."""

        @functools.wraps(load)
        def loaded(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self not in _get_current_function_mode_stack() or str(map_location) == "meta":
                return load(f, map_location, *args, **kwargs)
            rebuild = torch._utils._rebuild_tensor
            moved: dict[int, Any] = {}  # storages that belong on the GPU, with their fake tensors

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
                kwargs.setdefault("mmap", True)  # so that unread weights take no memory
            unseen = [(torch._guards, name, lambda *_: None) for name in ("detect_fake_mode", "active_fake_mode")]
            with patched([(torch._utils, "_rebuild_tensor", rebuilt), *unseen]):
                return load(f, located, *args, **kwargs)

        return loaded


def _addresses() -> Iterator[Replacement]:
    """Yield stand-ins that give each fake tensor its own unused address. With torch all are at 0, and code that saves
    takes them for one tensor."""
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
    """Return whether this is an ordinary CPU tensor with values."""
    return (
        isinstance(tensor, torch.Tensor)
        and not isinstance(tensor, (FakeTensor, DTensor))
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
    )
