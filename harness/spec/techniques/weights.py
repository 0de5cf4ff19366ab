"""Techniques for weights: their precision and that of the arithmetic, quantisation, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.techniques.schema import read_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


def _adapted(trial: Trial) -> Iterator[str]:
    if trial.adapter == "none":
        yield f"quantization={trial.quantization} needs adapter=lora, because the 4-bit weights are frozen"


def _checkpoint(trial: Trial) -> Iterator[str]:
    if trial.device.name == "simulated" or trial.weights == "pretrained":
        return
    yield (
        f"quantization={trial.quantization} needs a quantised checkpoint: model=hub model.path=... "
        "weights=pretrained (device=simulated predicts it for any model)"
    )


def _fp8_alone(trial: Trial) -> Iterator[str]:
    for axis in ("quantization", "adapter"):
        if getattr(trial, axis) != "none":
            yield f"precision=fp8 with {axis}={getattr(trial, axis)} is not supported; use precision=bf16"


def _fp8_tokens(trial: Trial) -> Iterator[str]:
    tokens = trial.micro_batch * trial.seq_len
    if tokens % 16:
        yield (
            f"precision=fp8 needs a multiple of 16 tokens in a micro-batch, not {tokens}, because of its matrix "
            "products with gradients; change seq_len or micro_batch"
        )


# Only the package of fp8 is preloaded, because peft imports bitsandbytes, whose import initialises CUDA (cuda_specs.py:
# get_compute_capabilities). A process that has initialised CUDA cannot be forked. peft 0.18 is the first version that
# can be imported with transformers 5.
AXES, TECHNIQUES = read_table("weights.json", _adapted, _checkpoint, _fp8_alone, _fp8_tokens)
