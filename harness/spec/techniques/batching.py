"""Techniques for the form of samples: padding, packing; and the cache, which training does not need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.techniques.schema import numbers, read_table, version

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


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


def _full(trial: Trial) -> Iterator[str]:
    if trial.packing == "documents" and trial.data == "synthetic" and trial.seq_len < 2:
        yield "packing=documents needs a seq_len of at least 2"


def _uncached(trial: Trial) -> Iterator[str]:
    """Refuse a cache: only without one transformers looks for documents (masking_utils._preprocess_mask_arguments)."""
    cached = trial.runner.name == "trainer" and (numbers(version("transformers") or "5")) < (5,)
    if trial.use_cache == "on" or (trial.use_cache == "default" and cached):
        yield "packing=documents needs use_cache=off, because with a cache transformers does not separate documents"


AXES, TECHNIQUES = read_table("batching.json", _padded, _to_the_left, _full, _uncached)
