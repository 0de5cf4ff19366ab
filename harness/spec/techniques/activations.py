"""Techniques for activations between forward and backward: recomputing, offloading, compiling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.techniques.schema import read_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


def _not_compiled(trial: Trial) -> Iterator[str]:
    if trial.compile != "none":
        yield f"activation_offload needs compile=none, not {trial.compile}, because a compiler decides what is saved"


def _recorded_first(trial: Trial) -> Iterator[str]:
    """Require two warm-up steps: one without the graph, one that records it (torch/_inductor/cudagraph_trees.py)."""
    if trial.protocol.warmup_steps < 2:
        yield (
            f"compile={trial.compile} records its CUDA graphs in the second step, which is not a warm-up step with "
            f"protocol={trial.protocol.name}; use protocol=quick, or protocol.warmup_steps=2"
        )


def _one_pass(trial: Trial) -> Iterator[str]:
    """Refuse grad_accum > 1: a gradient is an output of the graph, which replays overwrite (pytorch issue 169545)."""
    if trial.grad_accum > 1:
        yield (
            f"compile={trial.compile} with grad_accum={trial.grad_accum}: each pass of the CUDA graph overwrites the "
            "gradients of the pass before; use grad_accum=1 with a larger micro_batch, or compile=default"
        )


AXES, TECHNIQUES = read_table("activations.json", _not_compiled, _recorded_first, _one_pass)
