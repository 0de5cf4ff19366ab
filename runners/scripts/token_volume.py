"""Counts of the tokens that a script's steps train on, from the shapes of token ids that its models are called with.

A forward pass counts only once a backward pass has followed it, so an evaluation's does not count.
"""

from itertools import combinations
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Shapes = tuple[tuple[int, ...], ...]
Shape = tuple[int, int] | None  # samples and tokens per sample of one forward pass; None without token ids


class Volume:
    """The counter of forward and backward passes of every step."""

    def __init__(self) -> None:
        self.steps: list[list[Shape]] = []
        # Of each step, by module and number of tensors that it is called with: their shapes in each call.
        self.inputs: list[dict[tuple[int, int], list[Shapes]]] = []
        self.backwards: list[int] = []  # backward passes of each step
        self._batches: list[int] = []  # those of them with a forward pass before
        self._pending: list[Shape] = []  # forward passes since the last backward pass
        self._lost: set[int] = set()  # steps that went through some samples several times

    def begin_step(self) -> None:
        """Begin the next step."""
        self.steps.append([])
        self.inputs.append({})
        self.backwards.append(0)
        self._batches.append(0)
        self._pending.clear()

    def forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Record that a forward pass of a module with these arguments begins."""
        self._pending.append(_shape(args, kwargs))
        given = tuple(tuple(one.shape) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor))
        self.inputs[-1].setdefault((id(module), len(given)), []).append(given)

    def varying(self, last: int) -> set[tuple[int, ...]]:
        """Return the shapes of which a module was given others, in the same place, in another of the `last` steps."""
        found: set[tuple[int, ...]] = set()
        for (first, one), (_, other) in combinations(enumerate(self.inputs[-last:]), 2):
            for key in one.keys() & other.keys():
                if len(one[key]) == len(other[key]):
                    for calls in zip(one[key], other[key], strict=True):
                        found |= {shape for pair in zip(*calls, strict=True) if pair[0] != pair[1] for shape in pair}
                elif first:  # the first step may have begun amid its calls
                    found.update(*set(one[key]) ^ set(other[key]))
        return found

    def backward(self, over: bool) -> None:
        """Record the end of a backward pass; not `over` if it, or a forward pass before it, raised an exception."""
        if over and self.steps:
            self.steps[-1] += self._pending
            self.backwards[-1] += 1
            self._batches[-1] += bool(self._pending)
        self._pending.clear()

    def again(self) -> None:
        """Mark this step as unknown: its optimizer runs the passes itself, perhaps more than once."""
        self._lost.add(len(self.steps) - 1)

    def tokens_of(self, step: int) -> int | None:
        """Return the tokens of a step; None if they were not seen."""
        shapes = self.steps[step] if self.steps else []
        if not shapes or None in shapes or step % len(self.steps) in self._lost:
            return None
        return sum(b * n for b, n in filter(None, shapes))

    def columns(self, steps: list[int], seconds: float | None) -> dict[str, Any]:
        """Return this rank's columns of speed over these steps, which took `seconds`; empty if tokens were not seen."""
        tokens = [self.tokens_of(step) for step in steps]
        if not tokens or None in tokens or seconds is None:
            return {}
        samples = sum(shape[0] for step in steps for shape in self.steps[step] if shape)
        return {"tokens_per_s": sum(filter(None, tokens)) / seconds, "samples_per_s": samples / seconds}

    def batches_of(self, step: int) -> int | None:
        """Return the number of batches of a step. Return None if a backward pass has no forward pass of its own. It may
        be of a further batch, or of another loss of the same batch."""
        passes = self.backwards[step]
        return passes if passes == 1 or passes == self._batches[step] > 0 else None

    def said(self) -> dict[str, Any]:
        """Return the distinct shapes and the distinct numbers of batches a step."""
        shapes = [shape for step in self.steps for shape in step]
        return {
            "shapes": sorted({shape for shape in shapes if shape is not None}),
            "shapes_known": bool(shapes) and None not in shapes,
            # The first step may begin amid its passes, and the last is not complete.
            "batches": list({self.batches_of(step) for step in range(1, len(self.steps) - 1)}),
            "repeated": bool(self._lost),
        }


def _shape(args: Any, kwargs: Any) -> Shape:
    """Return (samples, tokens) of the token ids among a model's arguments; None if there are none."""
    ids = kwargs.get("input_ids")
    if ids is None:
        ids = next((one for one in args if isinstance(one, torch.Tensor)), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        return None
    return int(ids.shape[0]), int(ids.shape[1])
