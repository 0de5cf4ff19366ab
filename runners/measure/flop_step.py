"""The step that counts FLOPs and notes the attention kernels that ran, and the columns that follow: MFU, HFU.

In: a step and the row so far. Out: columns, and notes that say why one is unknown.
"""

import contextlib
import time
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from vramsweep.harness.hardware.gpu_lookup import peak_flops
from vramsweep.runners.measure.compile_events import Compiler
from vramsweep.runners.measure.counters import HOST_BOUND, backward_boundaries
from vramsweep.runners.measure.dispatch_modes import FlopCount, SdpaKernels
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.measure.steady_memory import NO_BACKWARD
from vramsweep.runners.rank.aggregate_ranks import Columns

QUEUE = 1024  # launches that may wait for a GPU; the host waits for room after that
SYNCHRONIZE = ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"))
COUNTED_EAGERLY = "FLOPs are counted without torch.compile, because compiled code calls no countable operators"
COMPILED = "FLOPs are unknown, because compiled code calls no countable operators"


@dataclass(eq=False)
class Count:
    """Untimed step: counts FLOPs, those of the forward passes separately, and notes attention's kernels.

    The model's FLOPs are 3 x those of the forward passes if all weights are trained. Frozen weights need no gradients,
    and Liger's fused loss computes its gradients in the forward pass. Then they are all counted FLOPs without repeated
    ones. `tokens` is the number of this rank's tokens in the counted step; None if unknown. If the step is our
    `own`, compiled code is counted without torch.compile; a user's step may not fit that way.
    """

    compiler: Compiler
    tokens: int | None
    precision: str | None
    world_size: int
    uneven: bool  # the backward passes are not twice the forward passes
    own: bool = True
    spent: float = 0.0
    compiled: bool = False
    forward: int | None = None  # up to the start of each backward pass
    total: int | None = None
    repeated: int = 0  # part of the total
    uncounted: set[str] = field(default_factory=set)  # operators
    issues_freely: bool | None = None  # the host waits for the GPU nowhere; None if not counted
    kernels: SdpaKernels = field(default_factory=SdpaKernels)
    _uncounted_by_backward: set[str] = field(default_factory=set)
    _began: float | None = None
    _context: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    purpose: ClassVar = "counts FLOPs"

    def enter(self) -> None:
        """Begin to count, unless a user's code is compiled; run our own compiled code without torch.compile."""
        self._began = time.perf_counter()
        self.compiled = self.compiler.compiled()
        if self.compiled and not self.own:
            return
        if self.compiled:
            self._context.enter_context(torch.compiler.set_stance("force_eager"))
        self._count = count = self._context.enter_context(FlopCount())
        self._context.enter_context(self.kernels)
        self._forward: list[int] = []
        self._since = 0

        def entered() -> None:
            self._forward.append(count.total - self._since)

        def left() -> None:
            self._since = count.total
            self._uncounted_by_backward = set(count.uncounted)

        self._context.enter_context(backward_boundaries(entered, left))
        self._context.enter_context(patched((*one, count.waiting(getattr(*one))) for one in SYNCHRONIZE))

    def leave(self, loss: torch.Tensor | None) -> None:
        """Stop counting, and keep the FLOPs and the names of operators that were not counted."""
        self.close()
        if self.compiled and not self.own:
            return
        self.total, self.repeated, self.uncounted = self._count.total, self._count.repeated, self._count.uncounted
        self.forward = sum(self._forward) if self._forward else None
        # A full queue is part of more operators, and hides by how much the GPU is behind.
        self.issues_freely = not self._count.waits and self._count.operators <= QUEUE / (1 - HOST_BOUND)

    def close(self) -> None:
        """Stop watching, also if the step failed; its time counts as a step's in either case."""
        self._context.close()
        if self._began is not None:
            self.spent, self._began = time.perf_counter() - self._began, None

    def columns(self, row: Columns) -> Columns:
        """Return FLOPs and the columns that follow, for the row so far. Values that may be wrong are None and noted."""
        weights = row.get("parameters")
        frozen = weights is None or row.get("trainable_parameters") != weights  # or not known
        model, hardware, found = self._trusted(row.get("attention_effective"), frozen or self.uneven)
        notes = [*(row.get("notes") or ()), *found]
        none = row["tokens_per_s"] is None and row["elapsed_s"] is not None  # the model has no tokens
        tokens = None if none else self.tokens
        of_model = None if model is None or not tokens else model / tokens
        of_hardware = None if hardware is None or not tokens else hardware / tokens
        peak = peak_flops(row["gpu_name"], self.precision) if row["gpu_name"] and self.precision else None
        speed = row["tokens_per_s"]
        used = None if peak is None or speed is None else speed / (peak * self.world_size)
        bound = row.get("bound_by")
        return {
            "model_flops_per_token": of_model,
            "hardware_flops_per_token": of_hardware,
            "peak_flops": peak,
            "mfu": None if of_model is None or used is None else used * of_model,
            "hfu": None if of_hardware is None or used is None else used * of_hardware,
            "bound_by": bound if bound != "host" or self.issues_freely else None,
            "attention_kernels": sorted(self.kernels.seen) or None,
            "notes": notes or None,
        }

    def _trusted(self, attention: str | None, uneven: bool) -> tuple[int | None, int | None, list[str]]:
        """Return the FLOPs of the model and of the hardware, None if they cannot be trusted, and notes that say why.

        `uneven`: the backward pass is not twice the forward pass.
        """
        if self.total is None:
            return None, None, [COMPILED] if self.compiled and not self.own else []
        if attention is not None and "flash" in attention:
            return None, None, [f"FLOPs are unknown, because the kernels of {attention} are not torch operators"]
        hardware = None if self.uncounted else self.total
        model = None if self.forward is None else 3 * self.forward
        if uneven and model is not None:
            model = None if hardware is None else hardware - self.repeated
        notes = [f"model FLOPs are unknown, because {NO_BACKWARD}"] if self.forward is None else []
        notes += [COUNTED_EAGERLY] * self.compiled
        if self._uncounted_by_backward:
            model = None
        if self.uncounted:
            names = ", ".join(sorted(self.uncounted))
            which = "FLOPs" if model is None else "hardware FLOPs"
            formula = "torch.utils.flop_counter.register_flop_formula adds one"
            notes.append(f"{which} are unknown, because there is no formula for {names} ({formula})")
        return model, hardware, notes
