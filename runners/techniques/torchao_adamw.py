"""torchao's AdamW with 8-bit and 4-bit state, with the Trainer's block of 256 elements (torchao's own for 4 bits: 128).

The stand-in has the state of torchao/optim/adam.py (`_new_buffer`) and its subclasses' `zeros`: codes, an fp32 scale a
block and a table of its own for each moment; of the parameter's dtype for tensors of less than 4,096 elements or of a
part of a block. The step counter and the learning rate are on the host.

`single_param_adam` is compiled, parameter by parameter. What it has beside its arguments was read off the code that
Inductor (torch 2.11 and 2.13, torchao 0.18) generates for CUDA: where a parameter's rows are not its blocks (any matrix
whose last dimension is not the block's), the scaled moments, two of the parameter's size in fp32; with 4 bits also
their codes before they are packed, two of its size in int64.

A kernel that can be launched in several ways is timed with each when it first runs, as a recording on an H200 shows it
(results/reference/h200-141gb, 62253bc0214d1bb1): with a copy of what it changes, two of what it also reads. They come
and go once alone, then a hundred times beside a block as large as the card's cache, which is overwritten in between
(torch/_inductor/runtime/triton_heuristics.py `CachingAutotuner.bench`, benchmarking.py `InductorBenchmarker`). Copies
stay below the peak of what was allocated so far, or are made in host memory (`copy_args_to_cpu_if_needed`). That is in
the first step, for each shape, unless an earlier run has left its choice in Inductor's cache: a fresh one is predicted.
It is 148 MiB of what GPT-2 reserves with 4 bits, 594 of Qwen1.5-0.5B's.

Not covered: those copies in host memory; a smaller cache, which counts where the model is so small that this block is
its peak; peaks that are reset before, which leave less room. Small kernels, which are launched in one way only, are
taken to be timed as well.
"""

from __future__ import annotations

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
CACHE = 60 << 20  # bytes of an H200's; few cards have more (from 4 MiB), and what it takes is free by then
MOMENTS = ("exp_avg", "exp_avg_sq")


class Standin(kernel_stubs.Optimizer):
    """State of `bits` a value and moment."""

    bits = 0

    def __init__(self, params: Any, lr: float = 1e-5, block_size: int = BLOCK) -> None:
        super().__init__(params, lr)
        self.block = block_size
        self._compiled: set[torch.Size] = set()  # shapes whose kernels have run

    def new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
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
        first = p.shape not in self._compiled
        self._compiled.add(p.shape)
        if "exp_avg.codes" not in state:
            if first:
                timed([t for t in (p, *state.values()) for _ in range(2)])
        elif self.bits == 4 or (p.dim() > 1 and p.shape[-1] != self.block):
            self._apart(p, state, first)
        super().update(p, grad, state)

    def _apart(self, p: torch.Tensor, state: dict[str, torch.Tensor], first: bool) -> None:
        """A kernel that makes the scaled moments, and others that store them."""
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
    """A kernel's launches are tried, with copies of these tensors."""
    tracer = step_tracer.active()
    room = 0 if tracer is None else tracer.room()
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
    """A byte a value."""

    stands_for, bits = "AdamW8bit", 8


class AdamW4bit(Standin):
    """Half a byte a value."""

    stands_for, bits = "AdamW4bit", 4


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and what the Trainer tells it."""
    of = AdamW4bit if trial.optimizer == "adamw_torch_4bit" else AdamW8bit
    given = {"lr": 1e-5, "block_size": BLOCK}
    if trial.device.name == "simulated":
        return of, given
    import torchao.optim

    return getattr(torchao.optim, of.__name__), given


def around(trial: Trial, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Steps in which every operator is watched (runners/measure/dispatch_modes.py) step the optimizer unwatched, as
    `torch.compile` refuses to run otherwise: the kernels' own buffers are not in the memory of device=cpu."""
    if trial.device.name == "simulated":
        return contextlib.nullcontext()
    from torchao.optim.adam import _AdamBase

    step = _AdamBase.step

    def unwatched(self: Any, closure: Any = None) -> Any:
        with _disable_current_modes():
            return step(self, closure)

    return patched([(_AdamBase, "step", unwatched)])
