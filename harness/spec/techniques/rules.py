"""Rules of techniques that values alone do not tell, by the names that entries of the tables give them.

Each yields reasons against a trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.techniques.schema import Rule, version

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


def _fp8_tokens(trial: Trial) -> Iterator[str]:
    tokens = trial.micro_batch * trial.seq_len
    if tokens % 16:
        yield (
            f"precision=fp8 needs a multiple of 16 tokens in a micro-batch, not {tokens}, because of its matrix "
            "products with gradients; change seq_len or micro_batch"
        )


def _labels_are_left(trial: Trial) -> Iterator[str]:
    if trial.runner.options.get("label_smoothing_factor"):
        yield (
            "runner.options.label_smoothing_factor takes the loss out of the model, so "
            f"loss={trial.loss} has no effect; leave one of them out"
        )


def _maskless(trial: Trial) -> Iterator[str]:
    if trial.device.name == "cpu":  # its flash kernel takes masks
        return
    for given, asked in ((trial.padding > 0, "padding"), (trial.packing == "documents", "packing=documents")):
        if given:
            yield f"attention=sdpa_flash takes no mask, which {asked} needs; use sdpa, sdpa_cudnn or flash_attention_2"


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


def _padded(trial: Trial) -> Iterator[str]:
    if not trial.padding:
        return
    if trial.data != "synthetic":
        yield f"padding={trial.padding} needs data=synthetic; other samples have the padding that they need"
    if trial.packing != "none":
        yield f"padding={trial.padding} with packing={trial.packing}: packed samples have no padding; leave one out"
    if not 0 < round(trial.padding * trial.seq_len) < trial.seq_len:
        yield f"padding={trial.padding} of seq_len={trial.seq_len} rounds to no token or to all of them; change one"


def _to_the_left(trial: Trial) -> Iterator[str]:
    if trial.packing != "none" or (trial.data == "synthetic" and not trial.padding):
        yield "padding_side=left has no effect without padding; set padding=, or use a text without packing"


def _uncached(trial: Trial) -> Iterator[str]:
    """Refuse a cache: only without one transformers looks for documents (masking_utils._preprocess_mask_arguments)."""
    from packaging.version import Version  # a script's environment may lack it

    cached = trial.runner.name == "trainer" and Version(version("transformers") or "5").major < 5
    if trial.use_cache == "on" or (trial.use_cache == "default" and cached):
        yield "packing=documents needs use_cache=off, because with a cache transformers does not separate documents"


RULES: dict[str, Rule] = {rule.__name__.removeprefix("_"): rule for rule in (
    _fp8_tokens, _labels_are_left, _maskless, _recorded_first, _one_pass, _padded, _to_the_left, _uncached,
)}  # fmt: skip
