"""What samples look like: padding, packing; and the cache that training has no use for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.techniques.schema import H200, Axis, Technique, numbers, version

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

# fmt: off
AXES = (
    Axis("padding", float, 0.0, "share of the tokens of each synthetic sample that is padding"),
    Axis("padding_side", str, "right", "where padding stands"),
    Axis("padding_to", str, "longest", "what samples of data=lengths:... are padded to: longest (of the micro-batch), "
         "a multiple such as 64, max (seq_len)"),
    Axis("packing", str, "none", "several documents in one sample"),
    Axis("use_cache", str, "default", "the model's key-value cache, which training has no use for"),
)
# fmt: on


def _padded(trial: Trial) -> Iterator[str]:
    if not trial.padding:
        return
    if trial.data != "synthetic":
        yield f"padding={trial.padding} is of data=synthetic; the samples of a text have the padding that they need"
    if trial.packing != "none":
        yield f"padding={trial.padding} with packing={trial.packing}: packed samples have none; give one of them"
    if not 0 < round(trial.padding * trial.seq_len) < trial.seq_len:
        yield f"padding={trial.padding} of seq_len={trial.seq_len} is no token or all of them; change one of them"


def _to_the_left(trial: Trial) -> Iterator[str]:
    if trial.packing != "none" or (trial.data == "synthetic" and not trial.padding):
        yield (
            "padding_side=left changes nothing where samples have no padding; give padding=, or a text without packing"
        )


def _full(trial: Trial) -> Iterator[str]:
    if trial.packing == "documents" and trial.data == "synthetic" and trial.seq_len < 2:
        yield "packing=documents needs a seq_len of at least 2"


def _uncached(trial: Trial) -> Iterator[str]:
    """transformers looks for documents where there is no cache only (masking_utils._preprocess_mask_arguments)."""
    cached = trial.runner.name == "trainer" and (numbers(version("transformers") or "5")) < (5,)
    if trial.use_cache == "on" or (trial.use_cache == "default" and cached):
        yield "packing=documents: with a key-value cache transformers does not keep documents apart; use use_cache=off"


# fmt: off
TECHNIQUES: tuple[Technique, ...] = (
    Technique("padding_side", "right", "after the text", checked=("cpu", "simulated"), rules=(_padded,)),
    Technique("padding_side", "left", "before the text", checked=("cpu", "simulated"),
              proven=H200, rules=(_padded, _to_the_left)),
    Technique("packing", "none", "one document a sample"),
    Technique("packing", "wrapped", "documents joined and cut at the sequence length, each token sees all before it",
              checked=("cpu", "simulated"), proven=H200),
    Technique("packing", "documents", "documents joined and cut; positions start anew with each, whose tokens see no "
              "other", module=".techniques.packing", checked=("cpu", "simulated"), proven=H200,
              rules=(_full, _uncached), source="https://huggingface.co/docs/transformers/main_classes/data_collator"),
    Technique("use_cache", "default", "the runner's own way: off, but for the Trainer before transformers 5"),
    Technique("use_cache", "on", "the model makes one", checked=("cpu", "simulated"), proven=H200, excludes=(
        ("checkpointing", ("full", "selective"), "transformers takes the cache from a checkpointed layer; use "
         "use_cache=off"),)),
    Technique("use_cache", "off", "the model makes none", checked=("cpu", "simulated"), proven=H200),
)
# fmt: on
