"""What samples look like: padding, packing; and the cache that training has no use for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vramsweep.harness.techniques.entry import H200, Axis, Technique, numbers, version

if TYPE_CHECKING:
    from vramsweep.harness.trial import Trial

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


def _padded(trial: Trial) -> str | None:
    if not trial.padding:
        return None
    if trial.data != "synthetic":
        return f"padding={trial.padding} is of data=synthetic; the samples of a text have the padding that they need"
    if trial.packing != "none":
        return f"padding={trial.padding} with packing={trial.packing}: packed samples have none; give one of them"
    if not 0 < round(trial.padding * trial.seq_len) < trial.seq_len:
        return f"padding={trial.padding} of seq_len={trial.seq_len} is no token or all of them; change one of them"
    return None


def _to_the_left(trial: Trial) -> str | None:
    if trial.packing != "none" or (trial.data == "synthetic" and not trial.padding):
        return (
            "padding_side=left changes nothing where samples have no padding; give padding=, or a text without packing"
        )
    return None


def _full(trial: Trial) -> str | None:
    if trial.packing == "documents" and trial.data == "synthetic" and trial.seq_len < 2:
        return "packing=documents needs a seq_len of at least 2"
    return None


def _uncached(trial: Trial) -> str | None:
    """transformers looks for documents where there is no cache only (masking_utils._preprocess_mask_arguments)."""
    cached = trial.runner.name == "trainer" and (numbers(version("transformers") or "5")) < (5,)
    if trial.use_cache == "on" or (trial.use_cache == "default" and cached):
        return "packing=documents: with a key-value cache transformers does not keep documents apart; use use_cache=off"
    return None


# fmt: off
TECHNIQUES: tuple[Technique, ...] = (
    Technique("padding_side", "right", "after the text", checked=("cpu", "simulated"), rules=(_padded,)),
    Technique("padding_side", "left", "before the text", checked=("cpu", "simulated"),
              proven=H200, rules=(_padded, _to_the_left)),
    Technique("packing", "none", "one document a sample"),
    Technique("packing", "wrapped", "documents joined and cut at the sequence length, each token sees all before it",
              checked=("cpu", "simulated"), proven=H200),
    Technique("packing", "documents", "documents joined and cut; positions start anew with each, whose tokens see no "
              "other", module="vramsweep.runners.techniques.packing", checked=("cpu", "simulated"), proven=H200,
              rules=(_full, _uncached), source="https://huggingface.co/docs/transformers/main_classes/data_collator"),
    Technique("use_cache", "default", "the runner's own way: off, but for the Trainer before transformers 5"),
    Technique("use_cache", "on", "the model makes one", checked=("cpu", "simulated"), proven=H200, excludes=(
        ("checkpointing", ("full", "selective"), "transformers takes the cache from a checkpointed layer; use "
         "use_cache=off"),)),
    Technique("use_cache", "off", "the model makes none", checked=("cpu", "simulated"), proven=H200),
)
# fmt: on
