"""How much a script's steps train on: the shapes of the token ids that its models are called with.

A forward pass counts once a backward pass has followed it; one that was followed by none, as an evaluation's, does not.
"""

from __future__ import annotations

from typing import Any

import torch

Shape = tuple[int, int] | None  # samples and tokens of one forward pass; None where it had no token ids


class Volume:
    """The forward passes of every step."""

    def __init__(self) -> None:
        self.steps: list[list[Shape]] = []
        self.backwards: list[int] = []  # passes of each step
        self._batches: list[int] = []  # those of them that a forward pass came before
        self._pending: list[Shape] = []  # since the last backward pass
        self._lost: set[int] = set()  # steps that went through some samples several times

    def begin_step(self) -> None:
        """What follows is the next step's."""
        self.steps.append([])
        self.backwards.append(0)
        self._batches.append(0)
        self._pending.clear()

    def forward(self, args: Any, kwargs: Any) -> None:
        """A forward pass with these arguments begins."""
        self._pending.append(_shape(args, kwargs))

    def backward(self, over: bool) -> None:
        """A backward pass has ended; not `over`: an exception came, in it or in a forward pass before it."""
        if over and self.steps:
            self.steps[-1] += self._pending
            self.backwards[-1] += 1
            self._batches[-1] += bool(self._pending)
        self._pending.clear()

    def again(self) -> None:
        """The optimizer itself asks for the passes of this step, so it may have asked more than once."""
        self._lost.add(len(self.steps) - 1)

    def tokens_of(self, step: int) -> int | None:
        """Tokens of a step; None where they were not seen."""
        shapes = self.steps[step] if self.steps else []
        if not shapes or None in shapes or step % len(self.steps) in self._lost:
            return None
        return sum(b * n for b, n in filter(None, shapes))

    def columns(self, steps: list[int], seconds: float | None) -> dict[str, Any]:
        """Columns of this rank, which took so long for these steps; what was not seen is left out."""
        tokens = [self.tokens_of(step) for step in steps]
        if not tokens or None in tokens or seconds is None:
            return {}
        samples = sum(shape[0] for step in steps for shape in self.steps[step] if shape)
        return {"tokens_per_s": sum(filter(None, tokens)) / seconds, "samples_per_s": samples / seconds}

    def batches_of(self, step: int) -> int | None:
        """How many batches a step went through. None where it has backward passes without a forward pass of their own:
        they may be of further batches, or of another loss of the same one."""
        passes = self.backwards[step]
        return passes if passes == 1 or passes == self._batches[step] > 0 else None

    def said(self) -> dict[str, Any]:
        """The distinct shapes, and numbers of batches that a step has."""
        shapes = [shape for step in self.steps for shape in step]
        return {
            "shapes": sorted({shape for shape in shapes if shape is not None}),
            "shapes_known": bool(shapes) and None not in shapes,
            # The first step may begin amid its passes, and the last is not over.
            "batches": list({self.batches_of(step) for step in range(1, len(self.steps) - 1)}),
            "repeated": bool(self._lost),
        }


def _shape(args: Any, kwargs: Any) -> Shape:
    """(samples, tokens) of the token ids among a model's arguments; None where there are none."""
    ids = kwargs.get("input_ids")
    if ids is None:
        ids = next((one for one in args if isinstance(one, torch.Tensor)), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        return None
    return int(ids.shape[0]), int(ids.shape[1])
