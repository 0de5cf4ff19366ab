"""Changes of a trial that may make it fit: what each sets, and what of the training's result it changes.

A new remedy is an entry in `REMEDIES`. Not covered: whether one helps, which a prediction tells (advise.py); which of
them a trial can have, which the rules of settings and techniques tell (trial.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# What may change of the result, from what nobody would notice to another training.
SAME, ROUNDING, PRECISION, METHOD = range(4)
ACCEPTED = ("same", "rounding", "precision", "method")  # the same as words of a command
LEVELS = ("the same result", "the same but for rounding", "less precision", "another training")


@dataclass(frozen=True)
class Remedy:
    """A change, as it is typed. Of those of one `group` a trial can have one.

    `change` are values of the resolved trial, of which `level` says how much and `result` what they change in the
    result; "" where it is nothing. On cards below `capability` it is left out, with the reason `instead`; where `where`
    is not so of the resolved trial it changes nothing that is there.
    """

    words: str
    group: str
    change: Mapping[str, Any] = field(hash=False)
    level: int
    result: str = ""
    capability: tuple[int, int] | None = None
    instead: str = ""
    where: Callable[[Mapping[str, Any]], bool] = field(default=lambda resolved: True, compare=False)


def _axis(group: str, value: Any, level: int, result: str = "", **more: Any) -> Remedy:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Remedy(f"{group}={text}", group, {group: value}, level, result, **more)


def _in_fp32(resolved: Mapping[str, Any]) -> bool:
    return resolved["precision"] in ("fp32", "tf32")


_ZERO = ("zero1", "zero2", "zero3")
_BF16: dict[str, Any] = {
    "capability": (8, 0),
    "instead": "bf16 is emulated below 8.0, which is slow; precision=fp16 is not",
}
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
        where=lambda resolved: not resolved["allocator"]["conf"],  # else its settings would be lost
    ),
    _axis("offload_optimizer", True, SAME, where=lambda resolved: resolved["sharding"] in _ZERO),
    _axis("offload_param", True, SAME, where=lambda resolved: resolved["sharding"] in ("zero3", "fsdp1", "fsdp2")),
    _axis("optimizer", "adamw_torch_fused", ROUNDING),
    _axis("attention", "sdpa", ROUNDING),
    _axis(
        "attention",
        "flash_attention_2",
        ROUNDING,
        capability=(8, 0),
        instead="flash-attn needs 8.0",
        where=lambda resolved: resolved["precision"] not in ("fp32", "tf32"),
    ),
    _axis("loss", "chunked", ROUNDING),
    _axis("loss", "fused_linear", ROUNDING),
    _axis("kernels", "liger", ROUNDING),
    _axis("precision", "fp16", PRECISION, "products in fp16, the loss scaled", where=_in_fp32),
    _axis("precision", "bf16", PRECISION, "products in bf16", **_BF16),
    _axis("precision", "bf16_pure", PRECISION, "weights, gradients and optimizer state in bf16", **_BF16),
    _axis("optimizer", "adamw_bnb_8bit", PRECISION, "optimizer state in 8 bits"),
    _axis("optimizer", "paged_adamw_8bit", PRECISION, "optimizer state in 8 bits, in memory that the host has too"),
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
    able = (one for one in fixed if one.where(resolved))
    return [*_batches(resolved), *(_without_cache(one) if resolved["use_cache"] == "on" else one for one in able)]


def too_old(one: Remedy, capability: tuple[int, int]) -> str | None:
    """Why a card of this compute capability is too old for the remedy; None where it is not."""
    if one.capability is None or capability >= one.capability:
        return None
    return f"{one.instead}, and the card has {capability[0]}.{capability[1]}"


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


def _without_cache(one: Remedy) -> Remedy:
    """Checkpointing goes with no cache: where the trial asks for one, that goes too."""
    if one.group != "checkpointing":
        return one
    return replace(one, words=f"{one.words} use_cache=off", change={**one.change, "use_cache": "off"})


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
            ROUNDING,
        )
        for size in dict.fromkeys(sizes)
    ]
