"""Techniques for the computation of layers: attention, fused kernels, the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.techniques.schema import read_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


def _labels_are_left(trial: Trial) -> Iterator[str]:
    if trial.runner.options.get("label_smoothing_factor"):
        yield (
            "runner.options.label_smoothing_factor takes the loss out of the model, so "
            f"loss={trial.loss} has no effect; leave one of them out"
        )


def _half_precision(trial: Trial) -> Iterator[str]:
    if trial.device.name != "cpu" and trial.precision in ("fp32", "tf32"):
        yield f"attention={trial.attention} takes fp16 and bf16 only; use precision=bf16 or attention=sdpa"


def _maskless(trial: Trial) -> Iterator[str]:
    if trial.device.name == "cpu":  # its flash kernel takes masks
        return
    for given, asked in ((trial.padding > 0, "padding"), (trial.packing == "documents", "packing=documents")):
        if given:
            yield f"attention=sdpa_flash takes no mask, which {asked} needs; use sdpa, sdpa_cudnn or flash_attention_2"


def _one_row(trial: Trial) -> Iterator[str]:
    if trial.packing == "documents" and trial.micro_batch > 1:
        yield (
            "attention=flash_attention_2 separates documents only if the micro-batch is one sample (transformers, "
            "_is_packed_sequence); use micro_batch=1 with a longer seq_len, or attention=sdpa"
        )


AXES, TECHNIQUES = read_table("layers.json", _labels_are_left, _half_precision, _maskless, _one_row)
