"""DistributedDataParallel: every rank holds the whole model, and gradients are averaged in buckets.

In a simulated run torch's own reducer (torch/csrc/distributed/c10d/reducer.cpp) makes its buckets of fake tensors.
The host tables that it reads are real: the order in which buckets are rebuilt, and which parameters were used.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as library
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.dispatch_modes import HELD_BY_CODE
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.model import build
from vramsweep.runners.rank import process_group
from vramsweep.runners.trace import step_tracer


def sharded(trial: Trial, device: torch.device) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the wrapped model, its arguments with the bucket size in MiB, and the model's parameter counts."""
    net = build.model(trial, device)
    process_group.join(trial, device)
    wrapped = DistributedDataParallel(
        net, device_ids=[device] if device.type == "cuda" else None, **trial.runner.options
    )
    told = {"bucket_cap_mb": wrapped.bucket_bytes_cap / (1 << 20), **trial.runner.options}
    return wrapped, told, model_description.counts(net)


def checked(trial: Trial, net: torch.nn.Module) -> None:
    """Raise InvalidTrial unless the model is or contains a DistributedDataParallel over `world_size` ranks."""
    found = next((m for m in net.modules() if isinstance(m, DistributedDataParallel)), None)
    if found is None:
        raise InvalidTrial(
            f"sharding=ddp: {type(net).__name__} is no DistributedDataParallel and contains none, so ranks exchange no "
            "gradients; wrap the model and return the wrapped one"
        )
    size = dist.get_world_size(found.process_group)
    if size != trial.world_size:
        raise InvalidTrial(f"sharding=ddp: the model averages over {size} ranks, but world_size is {trial.world_size}")


def on_cpu(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Return a context that records new buckets on a CPU, for its count of live tensors: no tensor in Python is one."""
    makers = ((DistributedDataParallel, "_ddp_init_helper"), (c10d.Reducer, "_rebuild_buckets"))
    return patched((*one, _noting(getattr(*one))) for one in makers if trial.device.name == "cpu")


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _Noted():
            return function(*args)

    return run


class _Noted(TorchDispatchMode):
    """Dispatch mode that records newly made floating-point storages in HELD_BY_CODE."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and out.is_floating_point():
            HELD_BY_CODE.append(weakref.ref(out.untyped_storage()))
        return out


@contextlib.contextmanager
def traced(trial: Trial) -> Iterator[None]:
    """Let torch's reducer work on fake tensors inside the context."""
    reducing = _Reducing()
    made = DistributedDataParallel.__init__

    def without_ids(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **rest: Any) -> None:
        made(self, module, **rest)

    replaced = [
        (DistributedDataParallel, "__init__", without_ids),  # a module on the CPU takes no device_ids
        (library, "_verify_param_shape_across_processes", lambda *args, **kwargs: None),  # it compares real ranks
        (DistributedDataParallel, "_ddp_init_helper", reducing.on_host(DistributedDataParallel._ddp_init_helper)),
        (DistributedDataParallel, "_set_static_graph", reducing.on_host(DistributedDataParallel._set_static_graph)),
        (c10d.Reducer, "_rebuild_buckets", reducing.on_host(c10d.Reducer._rebuild_buckets)),
    ]
    tracer = step_tracer.active()
    if tracer is not None:
        tracer.held = reducing.held
    with patched(replaced), reducing:
        yield


class _Reducing(TorchDispatchMode):
    """Dispatch mode with real host tables for the reducer and a result for its averages; the fake group has none."""

    def __init__(self) -> None:
        super().__init__()
        self._making = False  # while the reducer makes its tables
        self._tables: dict[int, torch.Tensor] = {}
        self._buckets: dict[int, weakref.ref[torch.Tensor]] = {}
        self._views = False

    def on_host(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, wrapped so that it makes its integer tables on the host."""

        def run(owner: Any, *args: Any) -> Any:
            self._making = True
            self._views = getattr(owner, "gradient_as_bucket_view", self._views)
            try:
                return function(owner, *args)
            finally:
                self._making = False

        return run

    def held(self) -> dict[str, list[torch.Tensor]]:
        """Return live buckets by category: "gradients" if gradients are views into them, else "communication"."""
        alive = [bucket for reference in self._buckets.values() if (bucket := reference()) is not None]
        return {"gradients" if self._views else "communication": alive}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in args if isinstance(value, torch.Tensor)]
        table = self._making and kwargs.get("dtype") is torch.int32
        if table or (given and all(_key(tensor) in self._tables for tensor in given)):
            with _disable_current_modes():
                out = func(*args, **kwargs)
            if table:
                self._tables[_key(out)] = out
            return out
        out = func(*args, **kwargs)
        if func is not torch.ops.c10d.allreduce_.default:
            return out
        tensors = list(args[0])
        self._buckets |= {_key(t): weakref.ref(t) for t in tensors if t.is_floating_point()}
        future: Any = torch.futures.Future()
        future.set_result(tensors)
        return tensors, c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def _key(tensor: torch.Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)
