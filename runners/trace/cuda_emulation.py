"""CUDA's behaviour on fake CPU tensors: which operators run, in which dtype, on a GPU of a given generation.

A CPU build of torch casts, attends, drops out and steps its optimizers differently from CUDA, and each difference
changes memory. `behave` puts CUDA's behaviour in place while a step is traced, for any model, without a compiler:

- autocast: CUDA's policy with its cast cache (aten/src/ATen/autocast_mode.cpp) on the CPU's dispatch key;
- scaled_dot_product_attention: the kernel that the GPU would pick (sdpa_kernels.py);
- dropout and rms_norm: the fused kernels, which keep a byte mask and the reciprocal norms;
- recurrent layers: cuDNN's, of which a lower bound is known (recurrent_layers.py);
- optimizers and gradient clipping: the foreach path, which is the default on CUDA;
- GradScaler steps without reading its found-inf flag, which has no value;
- `torch.autocast("cuda")` and `torch.cuda.synchronize()` do not ask for a device;
- a device that the program names "cuda" is the CPU, where the fake tensors are.
"""

import contextlib
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.trace import fake_placement, recurrent_layers
from vramsweep.runners.trace.sdpa_kernels import KERNELS, Attention, chosen_kernel

aten = torch.ops.aten
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
NORM_FUSED = True  # rms_norm is one kernel, since torch 2.9
Kernels = Iterable[tuple[str, Callable[..., Any]]]

# CUDA's autocast policy by operator; every other operator with a CUDA autocast kernel runs in fp32.
_POLICY: dict[str, list[str]] = json.loads(Path(__file__).with_name("autocast.json").read_text("utf-8"))
LOWER, PROMOTE, FP32_OUTPUT = (frozenset(_POLICY[kind]) for kind in ("lower", "promote", "fp32_output"))


@contextlib.contextmanager
def behave(capability: Capability) -> Iterator[set[str]]:
    """Give CPU tensors CUDA's behaviour on a GPU of this compute capability, until the context is left.

    Yields the names of the attention kernels that have run: flash, efficient, math, cudnn.
    """
    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    attended: set[str] = set()
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overriding kernels is the purpose
            composed = {"AutocastCPU": _autocast(casts), "AutogradCPU": _fused(capability, attended)}
            whole = {"CPU": _kernels(), "Meta": recurrent_layers.metas()}
            for key, kernels in (composed | whole).items():
                for name, kernel in kernels:
                    library.impl(name, kernel, key)
        with patched(_replacements(casts)), CudaIsHere():
            yield attended
    finally:
        library._destroy()


class CudaIsHere(TorchFunctionMode):
    """Function mode that runs calls with a CUDA device on the CPU; moving a tensor to it copies nothing already there.

    DeepSpeed's tensors are in host memory (fake_placement.py) if it names "cpu", or makes them next to a tensor that is
    there. So are those that it makes empty without naming a device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return fake_placement.pinned(args[0]) if args[0].is_meta else args[0]
        if func is torch.Tensor.cuda:
            return args[0].to("cpu") if args[0].is_meta else args[0]
        if func is _SET_DATA and args[0].device != args[1].device:
            return move(args[0], args[1].detach())
        host = "cpu"
        made: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        # unwaited copies to the host are page-locked (aten/src/ATen/native/TensorConversions.cpp, _to_copy: pin_out)
        unwaited = func is torch.Tensor.to and bool(kwargs.get("non_blocking")) and not args[0].is_meta
        if unwaited and any(
            isinstance(v, torch.device) and v == fake_placement.HOST for v in (*args[1:], *kwargs.values())
        ):
            made = fake_placement.on_host(pinned=True)
        if func is torch.tensor and not isinstance(args[0], torch.Tensor):  # whose C++ reads tensors in a list
            args = tree_map_only(FakeTensor, torch.Tensor.item, args)
        if _caller().startswith("deepspeed."):
            host = "meta"
            if func is torch.Tensor.cpu:
                func, args = torch.Tensor.to, (args[0], "cpu")
            if func is torch.empty and kwargs.get("device") is None:
                kwargs["device"] = "cpu"
            named = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, torch.device))]
            if "meta" in named:  # DeepSpeed only remembers a shape
                made = fake_placement.without_memory()
            elif "cpu" in named or fake_placement.HOST in named:
                made = fake_placement.on_host(pinned=unwaited or bool(kwargs.pop("pin_memory", False)))
        with made:
            return func(*(_placed(v, host) for v in args), **{k: _placed(v, host) for k, v in kwargs.items()})


def _caller() -> str:
    """Return the module that called a torch function, skipping a mode above ours (`with device` is one)."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "torch.utils._device":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


def move(old: torch.Tensor, new: torch.Tensor) -> None:
    """Give a fake tensor the memory of another on another device, which for torch is another kind of tensor."""
    here: Any = old
    there: Any = new.requires_grad_(old.requires_grad)
    torch._C._swap_tensor_impl(old, new)
    here.fake_device, there.fake_device = there.fake_device, here.fake_device


def _placed(value: Any, host: str) -> Any:
    if isinstance(value, str):
        return "cpu" if value.partition(":")[0] == "cuda" else host if value == "cpu" else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _autocast(casts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Kernels:
    """Yield CUDA's autocast kernels; operators that only the CPU casts fall through. `casts` holds the cast weights."""
    cuda = _registered("AutocastCUDA")
    for name in sorted(cuda):
        yield name, _autocast_kernel(name, casts)
    for name in sorted(_registered("AutocastCPU") - cuda):
        yield name, torch.library.fallthrough_kernel


def _autocast_kernel(name: str, casts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(aten, packet), overload or "default")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    places = [argument.name for argument in operator._schema.arguments]
    at = places.index("dtype") if name in FP32_OUTPUT and "dtype" in places else None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        lower = torch.get_autocast_dtype("cpu")
        if at is not None and _castable(args[0]):
            if len(args) > at:
                args = (*args[:at], args[at] or torch.float32, *args[at + 1 :])
            elif kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.float32
        elif name in LOWER:
            args, kwargs = cast_all(args, kwargs, lower)
        elif name in PROMOTE:
            dtypes = {x.dtype for x in tree_leaves((args, kwargs)) if _castable(x)}
            args, kwargs = cast_all(args, kwargs, torch.float32 if torch.float32 in dtypes else lower)
        elif at is None:
            args, kwargs = cast_all(args, kwargs, torch.float32)
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operator(*args, **kwargs)

    def cast_all(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        """Cast the last argument first, because C++ casts them within a call's (), which gcc evaluates from the right.

        aten/src/ATen/autocast_mode.h, WrapFunction_: `cached_cast(...)...`; torch's builds for Linux are gcc's.
        """
        last_first = sorted(kwargs, key=places.index, reverse=True)
        named = {key: tree_map(lambda x: cast_one(x, dtype), kwargs[key]) for key in last_first}
        return tuple(tree_map(lambda x: cast_one(x, dtype), value) for value in reversed(args))[::-1], named

    def cast_one(value: Any, dtype: torch.dtype) -> Any:
        if not _castable(value) or value.dtype is dtype:
            return value
        weight = dtype is not torch.float32 and value.dtype is torch.float32 and value.requires_grad and value.is_leaf
        if not (weight and torch.is_autocast_cache_enabled()) or value._is_view():
            return value.to(dtype)
        if id(value) not in casts:
            casts[id(value)] = (value, value.to(dtype))
        return casts[id(value)][1]

    return kernel


def _castable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _fused(capability: Capability, attended: set[str]) -> Kernels:
    """Yield composite operators that CUDA runs as one kernel."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked = Attention(*args, **kwargs)
        kernel = chosen_kernel(asked, capability)
        attended.add(kernel)
        return KERNELS[kernel](asked)

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if p == 0 or not train or input.numel() == 0:
            return input
        if p == 1:
            return input * torch.zeros((), dtype=input.dtype)
        return cast(torch.Tensor, aten.native_dropout(input, p, train)[0])

    yield "scaled_dot_product_attention", attention
    yield "dropout", dropout
    yield from recurrent_layers.kernels()
    if hasattr(aten, "_fused_rms_norm"):

        def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> torch.Tensor:
            whole = NORM_FUSED and (weight is None or weight.dtype is input.dtype)  # as rms_norm_symint decides
            norm = aten._fused_rms_norm.default if whole else aten._fused_rms_norm.default.decompose
            return cast(torch.Tensor, norm(input, normalized_shape, weight, eps)[0])

        yield "rms_norm", rms_norm


def _kernels() -> Kernels:
    """Yield operators that a CPU build decomposes and CUDA does not (test_dispatch_tables.py lists them).

    With a kernel they stay whole on fake tensors, and autograd keeps what their own formula names.
    """
    if hasattr(aten, "_fused_rms_norm"):
        yield "_fused_rms_norm", lambda *args: aten._fused_rms_norm.default.decompose(*args)


def _replacements(casts: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Replacement]:
    """Yield (owner, name, stand-in) for Python code of torch and transformers that asks for a CUDA device."""
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__init__
    clear = torch.clear_autocast_cache
    enabled = torch.is_autocast_enabled

    def autocast_on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        dtype = torch.float16 if dtype is None and device_type == "cuda" else dtype
        enter(self, "cpu" if device_type == "cuda" else device_type, dtype, *args, **kwargs)

    def is_autocast_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def clear_casts() -> None:
        casts.clear()
        clear()

    def step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    swap_tensors = torch.utils.swap_tensors

    def swap(old: torch.Tensor, new: torch.Tensor) -> None:
        """Swap fake parameters for `Module.to`; torch's own function refuses if fake mode watches them."""
        if isinstance(old, DTensor):
            swap_tensors(old, new)
        elif old.device == new.device:
            old.data = new.data
        else:
            move(old, new)

    metas = importlib.import_module("torch._meta_registrations")

    def grouped_mm(a: Any, b: Any, *args: Any, offs: Any = None, out_dtype: Any = None, **kwargs: Any) -> Any:
        """Make the output in any dtype, because CUDA multiplies group by group what is not bf16 (_grouped_mm_fallback
        of aten/src/ATen/native/GroupedMMUtils.h)."""
        plain = kwargs.get("scale_a") is None and a.dtype is b.dtype
        if plain and a.dtype in (torch.float32, torch.float16):
            return metas._create_grouped_mm_output_tensor(a, b, offs, out_dtype)
        return grouped_meta(a, b, *args, offs=offs, out_dtype=out_dtype, **kwargs)

    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_backward_here(*args: Any, **kwargs: Any) -> Any:
        """Run `backward` in our function mode: a mode steps aside for it, but hooks in it name devices too."""
        with CudaIsHere():
            return run_backward(*args, **kwargs)

    iterator = torch.utils.data.DataLoader._get_iterator

    def without_workers(self: Any) -> Any:
        """Load without workers, because fake tensors cannot be forked.

        The memory that workers take is known without them (harness/machine/host_memory.py)."""
        self.num_workers = 0
        return iterator(self)

    # infer shapes outside all modes: DTensor uses its own fake tensors, of the whole shape, without memory
    shapes = _disable_current_modes()(ShardingPropagator._propagate_tensor_meta_non_cached)
    yield ShardingPropagator, "_propagate_tensor_meta_non_cached", shapes
    loader = torch.utils.data.dataloader._BaseDataLoaderIter  # shuffles and collates on the host, with values
    yield loader, "__next__", _disable_current_modes()(loader.__next__)
    yield torch.utils.data.DataLoader, "_get_iterator", without_workers
    yield autocast, "__init__", autocast_on_cpu
    yield torch, "clear_autocast_cache", clear_casts
    yield torch.cuda, "set_device", lambda device: None
    yield torch, "is_autocast_enabled", is_autocast_enabled
    if hasattr(torch.nn.functional, "grouped_mm"):  # since torch 2.10; before, CUDA takes bf16 alone too
        grouped_meta = metas._meta_grouped_mm_common
        yield metas, "_meta_grouped_mm_common", grouped_mm
    yield torch.autograd, "_engine_run_backward", run_backward_here
    yield torch.Tensor, "record_stream", lambda tensor, stream: None
    yield torch.utils, "swap_tensors", swap
    yield torch.amp.GradScaler, "_maybe_opt_step", step
    for owner in (importlib.import_module("torch.optim.optimizer"), torch.utils._foreach_utils):
        yield owner, "_get_foreach_kernels_supported_devices", lambda: ["cpu", "cuda"]
        yield owner, "_foreach_supported_types", [*owner._foreach_supported_types, FakeTensor]
    for name in ("_lazy_init", "synchronize", "reset_peak_memory_stats"):
        yield torch.cuda, name, lambda *args, **kwargs: None
    # imported here, because a cold worker would import it only once the model is built, and then keep the original
    masks = importlib.import_module("transformers.masking_utils")
    if hasattr(masks, "find_packed_sequence_indices"):
        # it reads the values of the positions; a custom target's count as not packed, mask_facts.py has the others
        yield masks, "find_packed_sequence_indices", lambda position_ids: None
