"""Changes of a trial that may make it fit: what each sets, and what of the training's result it changes.

A new remedy is an entry in `REMEDIES`. Not covered: whether one helps, which a prediction tells (advise.py); which of
them a trial can have, which the rules of settings and techniques tell (trial.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What may change of the result, from what nobody would notice to another training.
SAME, ROUNDING, PRECISION, METHOD = range(4)
ACCEPTED = ("same", "rounding", "precision", "method")  # the same as words of a command
LEVELS = ("the same result", "the same but for rounding", "less precision", "another training")


@dataclass(frozen=True)
class Remedy:
    """A change, as it is typed. Of those of one `group` a trial can have one.

    `change` are values of the resolved trial, of which `level` says how much and `result` what they change in the
    result; "" where it is nothing.
    """

    words: str
    group: str
    change: Mapping[str, Any] = field(hash=False)
    level: int
    result: str = ""


def _axis(group: str, value: Any, level: int, result: str = "") -> Remedy:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Remedy(f"{group}={text}", group, {group: value}, level, result)


_LORA = "adapters of rank 16 are trained, the weights are frozen"
REMEDIES: tuple[Remedy, ...] = (
    _axis("checkpointing", "selective", SAME),
    _axis("checkpointing", "full", SAME),
    _axis("use_cache", "off", SAME),
    _axis("activation_offload", True, SAME),
    Remedy(
        "allocator=expandable",
        "allocator",
        {"allocator": {"name": "expandable", "conf": "expandable_segments:True"}},
        SAME,
    ),
    _axis("optimizer", "adamw_torch_fused", SAME),
    _axis("attention", "sdpa", ROUNDING),
    _axis("loss", "chunked", ROUNDING),
    _axis("loss", "fused_linear", ROUNDING),
    _axis("kernels", "liger", ROUNDING),
    _axis("precision", "bf16", PRECISION, "products in bf16"),
    _axis("precision", "bf16_pure", PRECISION, "weights, gradients and optimizer state in bf16"),
    _axis("optimizer", "adamw_bnb_8bit", PRECISION, "optimizer state in 8 bits"),
    _axis("optimizer", "adafactor", METHOD, "Adafactor instead of AdamW"),
    _axis("optimizer", "lion_8bit", METHOD, "Lion, its state in 8 bits, instead of AdamW"),
    _axis("optimizer", "sgd", METHOD, "SGD without momentum instead of AdamW"),
    _axis("adapter", "lora", METHOD, _LORA),
    Remedy(
        "adapter=lora quantization=nf4_double",
        "adapter",
        {"adapter": "lora", "quantization": "nf4_double"},
        METHOD,
        f"{_LORA} and in 4 bits",
    ),
)


def applicable(resolved: Mapping[str, Any]) -> list[Remedy]:
    """The remedies that change something of this resolved trial, smaller batches of the same sum among them."""
    fixed = [one for one in REMEDIES if any(not _has(resolved, key, value) for key, value in one.change.items())]
    return [*_batches(resolved), *fixed]


def changed(resolved: Mapping[str, Any], remedies: Iterable[Remedy]) -> dict[str, Any]:
    """The resolved trial with these remedies."""
    found = dict(resolved)
    for one in remedies:
        found |= one.change
    return found


def words(given: Sequence[str], remedies: Iterable[Remedy]) -> list[str]:
    """The words of a command with those of remedies, which take the place of words for the same settings."""
    more = [word for one in remedies for word in one.words.split()]
    keys = {word.partition("=")[0] for word in more}
    return [*(word for word in given if word.partition("=")[0] not in keys), *more]


def _has(resolved: Mapping[str, Any], key: str, value: Any) -> bool:
    found = resolved.get(key)
    return found == value if not isinstance(value, Mapping) else value.items() <= dict(found or {}).items()


def _batches(resolved: Mapping[str, Any]) -> list[Remedy]:
    """The same samples a step in more passes: half, a quarter and one at a time."""
    batch, passes = int(resolved["micro_batch"]), int(resolved["grad_accum"])
    sizes = [size for size in (batch // 2, batch // 4, 1) if 1 <= size < batch and batch % size == 0]
    return [
        Remedy(
            f"micro_batch={size} grad_accum={passes * batch // size}",
            "batch",
            {"micro_batch": size, "grad_accum": passes * batch // size},
            SAME,
        )
        for size in dict.fromkeys(sizes)
    ]
