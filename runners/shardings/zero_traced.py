"""DeepSpeed's engine on fake tensors: the accelerator that it sees, and answers where it asks for values.

`traced` gives DeepSpeed an accelerator like CUDA's, whose streams can only be told apart. Questions that have no answer
here are answered as in a run where all goes well: no overflow, nothing to clip, all ranks agree.

Its streams, events and calls of `record_stream` are recorded for stream_lag.py (stream_events.py). Everything else that
CUDA does differently is in cuda_emulation.py, which also keeps host memory apart.
"""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.shardings import stream_events
from vramsweep.runners.trace import fake_placement, step_tracer


class CudaAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's view of a CUDA device where there is none; torch.cpu's streams stand for CUDA's."""

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    stream, current_stream = staticmethod(torch.cpu.stream), staticmethod(torch.cpu.current_stream)

    def device(self, device_index: Any = None) -> torch.device:
        """Return the only CUDA device, of index 0."""
        return torch.device("cuda", 0)  # made at each call, because cuda_emulation.py makes it the CPU

    def empty_cache(self) -> None:
        """Call torch.cuda.empty_cache, which the tracer records."""
        torch.cuda.empty_cache()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on any device but meta."""
        return tensor.device.type != "meta"

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return a new page-locked tensor: of the same shape if `match_shape`, else flat."""
        return fake_placement.pinned(tensor, None if match_shape else (tensor.numel(),))

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return fake_placement.pinned(tensor, shape)


_ANSWERS = {
    "is_synchronized_device": False,
    "use_host_timers": True,
    "device_name": "cuda",
    "current_device_name": "cuda:0",
    "current_device": 0,
    "device_count": 1,
    "default_stream": torch.cpu._default_cpu_stream,
    "available_memory": 1 << 60,  # a trace does not depend on the size of the GPU
    "is_fp16_supported": True,
}
for _name, _answer in _ANSWERS.items():
    setattr(CudaAccelerator, _name, lambda *args, answer=_answer, **kwargs: answer)


def made_on_host(optimizer: Any, params: Any, lr: float = 1e-3, **settings: Any) -> None:
    """Run DeepSpeedCPUAdam's `__init__` without its kernel, which would have to be compiled.

    DeepSpeed decides by the class itself what ZeRO supports, so no other class can take its place.
    """
    torch.optim.Optimizer.__init__(optimizer, params, {"lr": lr, "amsgrad": False})
    optimizer.opt_id, optimizer.ds_opt_adam = 0, SimpleNamespace(destroy_adam=nothing)


def stepped_on_host(optimizer: Any, closure: Any = None) -> None:
    """Run DeepSpeedCPUAdam's `step`: make its state in host memory, like the parameters, and no temporaries."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
        if not optimizer.state[parameter]:
            moments = {name: torch.zeros_like(parameter.data) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": 0, **moments}


def traced(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which DeepSpeed runs on a GPU that does not exist."""
    replaced = [
        (real_accelerator, "ds_accelerator", CudaAccelerator()),
        (DeepSpeedCPUAdam, "__init__", made_on_host),
        (DeepSpeedCPUAdam, "step", stepped_on_host),
        (zero_utils, "assert_lst_len_same_as_other_ranks", nothing),
        (zero_utils, "get_lst_from_rank0", list),  # this is rank 0
        (torch.cpu.Stream, "synchronize", nothing),
    ]
    tracer = step_tracer.active()
    if tracer is not None:
        replaced += noted(tracer)
    return patched(replaced, create=True)


def noted(tracer: step_tracer.Tracer) -> list[tuple[Any, str, Any]]:
    """Return replacements (owner, name, stand-in) with which the tracer records streams, events and gathering."""

    def synchronize(*device: Any) -> None:  # the accelerator's; DeepSpeed's throughput timer calls it in each step
        for stream in tracer.streams():
            tracer.note("join", stream)

    gather = AllGatherCoalescedHandle.wait

    def gathered(handle: Any, *args: Any, **kwargs: Any) -> None:
        gather(handle, *args, **kwargs)
        tracer.know("communication", [parameter.data for parameter in handle.params])  # copies, not a collective's

    return [
        *stream_events.replaced(tracer),
        (AllGatherCoalescedHandle, "wait", gathered),
        (CudaAccelerator, "synchronize", synchronize),
    ]


def nothing(*args: Any) -> None:
    """Do nothing, in place of functions that have no use here."""


def held(optimizer: Any) -> dict[str, list[torch.Tensor]]:
    """Return the tensors that ZeRO's optimizer keeps for itself at this moment, by category (step_tracer.py)."""
    buckets = [bucket.buffer for bucket in getattr(optimizer, "ipg_buckets", {}).values()]
    buckets.append(getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None))  # on the way to the host
    return {
        "communication": [t for b in buckets for t in (b if isinstance(b, list) else [b]) if t is not None],
        "gradients": [t for t in [getattr(optimizer, "grad_partitions_flat_buffer", None)] if t is not None],
    }
