"""What was built, as columns: how many parameters a model has, how many are trained, which classes are at work.

It needs torch alone, as what it describes may be a script of the user's own (observer.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch


def parameters(net: torch.nn.Module, trained: bool = False) -> int:
    """Number of parameters, or of those that are trained; shared ones once; under ZeRO-3 the whole ones, not shards.

    Packed weights count as those that they stand for.
    """
    modules: list[Any] = list(net.modules())
    packed = {id(m.weight): m.in_features * m.out_features for m in modules if hasattr(m, "quant_state")}
    found = [p for p in net.parameters() if p.requires_grad or not trained]
    total: int = sum(packed.get(id(p), getattr(p, "ds_numel", p.numel())) for p in found)
    buffers: int = sum(m.in_features * m.out_features for m in modules if "qweight" in m._buffers)  # GPTQ's
    return total if trained else total + buffers


def counts(net: Any) -> dict[str, Any]:
    """Columns about the parameters of a model, which must be whole, or divided in a way that still tells."""
    return {"parameters": parameters(net), "trainable_parameters": parameters(net, trained=True)}


def describe(net: Any, optim: Any) -> dict[str, Any]:
    """Columns about what was really built."""
    return {
        **counts(net),
        "attention_effective": getattr(getattr(net, "config", None), "_attn_implementation", None),
        "optimizer_effective": optimizer_name(optim),
    }


def script(nets: Sequence[Any], optimizers: Sequence[Any]) -> dict[str, Any]:
    """The same of a script of the user's own, which may train several models; what it does not tell is left out."""
    inner = [getattr(net, "_orig_mod", net) for net in nets]  # torch.compile's
    inner = [getattr(net, "module", net) for net in inner]  # data parallel's, DeepSpeed's
    found: dict[str, Any] = {"padding_fraction": None}
    if nets and not any(map(_divided, nets)):
        found |= counts(inner[0] if len(inner) == 1 else torch.nn.ModuleList(inner))
    kinds = {getattr(getattr(net, "config", None), "_attn_implementation", None) for net in inner}
    found["attention_effective"] = kinds.pop() if len(kinds) == 1 else None
    if optimizers:
        found["optimizer_effective"] = ", ".join(sorted({optimizer_name(one) for one in optimizers}))
    if any(type(net).__name__ == "DeepSpeedEngine" for net in nets):
        found["deepspeed_version"] = getattr(sys.modules.get("deepspeed"), "__version__", None)
    return found


def allocator() -> dict[str, Any]:
    """What torch says of its allocator on a card: which one it is, and the settings in force as far as it tells."""
    backend = torch.cuda.get_allocator_backend()
    settings = torch.cuda.memory._snapshot()["allocator_settings"] if backend == "native" else {}
    return {"backend": backend, "allocator_settings": settings}


def _divided(net: Any) -> bool:
    """Whether a rank holds only its part of the weights, so that they cannot be counted."""
    return any(type(one).__name__ == "FullyShardedDataParallel" for one in net.modules())


def optimizer_name(optim: Any) -> str:
    """Class of the optimizer (a stand-in's: the class it stands for), with that of the one inside in parentheses.

    bitsandbytes' classes serve several values of the axis, so their state's kind is said too.
    """
    inner, name = getattr(optim, "optimizer", None), type(optim).__name__
    if isinstance(inner, torch.optim.Optimizer):
        return f"{name}({optimizer_name(inner)})"
    if type(optim).__module__.startswith("bitsandbytes."):
        return label(name, optim.args.optim_bits, optim.is_paged)
    return str(getattr(optim, "stands_for", name))


def label(name: str, bits: int, paged: bool) -> str:
    """What rows call it: one class serves several of the axis's values."""
    return f"{name}({bits}-bit{', paged' if paged else ''})"
