"""torchao's AdamW with 8-bit and 4-bit state, with the Trainer's block of 256 elements (torchao's own for 4 bits: 128).

The stand-in has the state of torchao/optim/adam.py (`_new_buffer`) and its subclasses' `zeros`. Each moment has codes,
an fp32 scale per block and a table of its own. Tensors of less than 4,096 elements or with a part of a block have state
of the parameter's dtype. The step counter and the learning rate are on the host.

`single_param_adam` is compiled, parameter by parameter. Its temporaries were read off the code that Inductor (torch
2.11 and 2.13, torchao 0.18) generates for CUDA. If a parameter's rows are not its blocks (any matrix whose last
dimension is not the block's), they are the scaled moments: two of the parameter's size in fp32. With 4 bits they also
have the codes before packing: two of its size in int64.

A kernel with several ways to launch is timed with each on its first run, as a recording on an H200 shows
(results/reference/h200-141gb, 62253bc0214d1bb1). The timing makes a copy of what the kernel changes, and two of what it
also reads. The copies come and go once alone, then a hundred times next to a block as large as the GPU's cache, which
is overwritten in between (torch/_inductor/runtime/triton_heuristics.py `CachingAutotuner.bench`, benchmarking.py
`InductorBenchmarker`). Copies stay below the peak allocated so far, or are made in host memory
(`copy_args_to_cpu_if_needed`). This happens in the first step, for each shape, unless Inductor's cache has an earlier
run's choice. The prediction assumes a fresh cache. The timing adds 148 MiB to what GPT-2 reserves with 4 bits, and 594
MiB to Qwen1.5-0.5B.

Not covered: those copies in host memory; a smaller cache, which counts if this block is a small model's peak; peaks
that are reset before, which leave less room. Small kernels with one way to launch are taken to be timed as well.
"""

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.techniques import kernel_stubs
from vramsweep.runners.trace import step_tracer
from vramsweep.runners.trace.storage_log import hint

BLOCK = 256
LEAST = 4096  # elements
CACHE = 60 << 20  # bytes of an H200's; few GPUs have more (from 4 MiB), and this much is free by then
MOMENTS = ("exp_avg", "exp_avg_sq")


class Standin(kernel_stubs.Optimizer):
    """State of `bits` per value and moment."""

    bits = 0

    def __init__(self, params: Any, lr: float = 1e-5, block_size: int = BLOCK) -> None:
        super().__init__(params, lr)
        self.block = block_size
        self._compiled: set[torch.Size] = set()  # shapes whose kernels have run

    def new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return codes, scales and a table per moment; a plain moment if small or not a multiple of the block."""
        state: dict[str, torch.Tensor] = {}
        for moment in MOMENTS:
            if p.numel() < LEAST or p.numel() % self.block:
                state[moment] = torch.zeros_like(p)
            else:
                state[f"{moment}.codes"] = torch.zeros(p.numel() * self.bits // 8, dtype=torch.uint8, device=p.device)
                state[f"{moment}.scale"] = torch.zeros(p.numel() // self.block, device=p.device)
                state[f"{moment}.qmap"] = torch.empty(1 << self.bits, device=p.device)
        return state

    def update(self, p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Call the kernel of a step, with the buffers of unfused kernels, and of timing at a shape's first step."""
        first = p.shape not in self._compiled
        self._compiled.add(p.shape)
        if "exp_avg.codes" not in state:
            if first:
                timed([t for t in (p, *state.values()) for _ in range(2)])
        elif self.bits == 4 or (p.dim() > 1 and p.shape[-1] != self.block):
            self._apart(p, state, first)
        super().update(p, grad, state)

    def _apart(self, p: torch.Tensor, state: dict[str, torch.Tensor], first: bool) -> None:
        """Stand in for a kernel that makes the scaled moments, and for others that store them."""
        codes = [state[f"{moment}.codes"] for moment in MOMENTS]
        scales = [torch.empty(p.numel() // self.block, device=p.device) for _ in MOMENTS]
        moments = [torch.empty(p.numel(), device=p.device) for _ in MOMENTS]
        unpacked = [torch.empty(p.numel(), dtype=torch.int64, device=p.device) for _ in MOMENTS if self.bits == 4]
        kernel_stubs.fused(list(state.values()), [*scales, *moments, *unpacked])
        if first and unpacked:
            timed([p, p])
            timed(codes[:1])
            del moments[0], unpacked[0]
        elif first:
            timed([t for t in (p, *codes) for _ in range(2)])
            moments.clear()
        if first:
            timed([state["exp_avg.scale"]])


def timed(copied: list[torch.Tensor]) -> None:
    """Allocate what timing a kernel's launches does, with copies of these tensors."""
    tracer = step_tracer.active()
    room = 0 if tracer is None else tracer.books[0].room()
    if copied[0].is_meta:
        return  # in host memory, where other code is compiled
    fit = []
    for tensor in copied:
        size = hint(tensor.numel()) * tensor.element_size()
        if size <= room:
            fit.append(tensor)
            room -= size

    def copy() -> None:
        copies = [torch.empty_like(tensor) for tensor in fit]
        copies.clear()

    copy()
    overwritten = torch.empty(CACHE // 4, dtype=torch.int32, device=copied[0].device)
    copy()
    del overwritten


class AdamW8bit(Standin):
    """AdamW with one byte per value."""

    stands_for, bits = "AdamW8bit", 8


class AdamW4bit(Standin):
    """AdamW with half a byte per value."""

    stands_for, bits = "AdamW4bit", 4


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the arguments that the Trainer gives it."""
    of = AdamW4bit if trial.optimizer == "adamw_torch_4bit" else AdamW8bit
    given = {"lr": 1e-5, "block_size": BLOCK}
    if trial.device.name == "simulated":
        return of, given
    import torchao.optim

    return getattr(torchao.optim, of.__name__), given


def around(trial: Trial, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Hide the optimizer from the modes that watch a step's operators (runners/measure/dispatch_modes.py), because
    `torch.compile` refuses to run under them. So the memory of device=cpu lacks the kernels' own buffers."""
    if trial.device.name == "simulated":
        return contextlib.nullcontext()
    from torchao.optim.adam import _AdamBase

    step = _AdamBase.step

    def unwatched(self: Any, closure: Any = None) -> Any:
        with _disable_current_modes():
            return step(self, closure)

    return patched([(_AdamBase, "step", unwatched)])
