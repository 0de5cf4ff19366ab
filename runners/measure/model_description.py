"""Columns about the built model and optimizer: parameters, trained parameters, classes of attention and optimizer.

It imports torch alone, because it also describes scripts of the user's own (observer.py).
"""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch

LEFT: weakref.WeakKeyDictionary[Any, list[weakref.ref[torch.Tensor]]] = weakref.WeakKeyDictionary()  # by optimizer


def look_at_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note, after a step (a closure may do the passes), which parameters have had no gradient after any step so far."""
    left = LEFT.get(optimizer)
    if left is None:
        left = [weakref.ref(p) for group in optimizer.param_groups for p in group["params"]]
    LEFT[optimizer] = [one for one in left if (p := one()) is not None and p.grad is None]


def without_gradient(nets: Sequence[torch.nn.Module]) -> int | None:
    """Count the elements of trained parameters that never had a gradient; None unless optimizers stepped all of them.

    Those of ZeRO step copies. Of FSDP1's parameters, a rank may hold no part.
    """
    every = {id(p): p for net in nets for p in net.parameters() if p.requires_grad}
    stepped, had = set(), set()
    for optimizer, left in LEFT.items():
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        stepped |= own
        had |= own - {id(one()) for one in left}
    if not every or not every.keys() <= stepped or any(hasattr(p, "_fsdp_flattened") for p in every.values()):
        return None
    return sum(p.numel() for key, p in every.items() if key not in had)


def parameters(net: torch.nn.Module, trained: bool = False) -> int:
    """Count the parameters, or those that are trained; shared ones once, and under ZeRO-3 whole ones, not shards.

    Packed weights count as the weights that they stand for.
    """
    modules: list[Any] = list(net.modules())
    packed = {id(m.weight): m.in_features * m.out_features for m in modules if hasattr(m, "quant_state")}
    found = [p for p in net.parameters() if p.requires_grad or not trained]
    total: int = sum(packed.get(id(p), getattr(p, "ds_numel", p.numel())) for p in found)
    buffers: int = sum(m.in_features * m.out_features for m in modules if "qweight" in m._buffers)  # GPTQ's
    return total if trained else total + buffers


def counts(net: Any) -> dict[str, Any]:
    """Return the columns about a model's parameters. The model must be whole, or divided in a way that shows them."""
    return {"parameters": parameters(net), "trainable_parameters": parameters(net, trained=True)}


def describe(net: Any, optim: Any) -> dict[str, Any]:
    """Return the columns about the model and optimizer that were really built."""
    return {
        **counts(net),
        "parameters_without_gradient": without_gradient([net]),
        "attention_effective": getattr(getattr(net, "config", None), "_attn_implementation", None),
        "optimizer_effective": optimizer_name(optim),
    }


def script(nets: Sequence[Any], optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the columns about a user's script, which may train several models, as far as the script shows them."""
    inner = [getattr(net, "_orig_mod", net) for net in nets]  # torch.compile's
    inner = [getattr(net, "module", net) for net in inner]  # data parallel's, DeepSpeed's
    found: dict[str, Any] = {"padding_fraction": None}
    # of FullyShardedDataParallel a rank holds only its part of the weights, so that they cannot be counted
    divided = any(type(one).__name__ == "FullyShardedDataParallel" for net in nets for one in net.modules())
    if nets and not divided:
        whole = list(inner)
        if without_gradient(inner) is not None:  # no copies are stepped, so the rest is of modules that were not seen
            own = {id(p) for net in inner for p in net.parameters()}
            stepped = [p for one in optimizers for group in one.param_groups for p in group["params"]]
            rest = [p for p in stepped if id(p) not in own and isinstance(p, torch.nn.Parameter)]
            whole += [torch.nn.ParameterList(rest)] * bool(rest)
        found |= counts(whole[0] if len(whole) == 1 else torch.nn.ModuleList(whole))
        found["parameters_without_gradient"] = without_gradient(whole)
    kinds = {getattr(getattr(net, "config", None), "_attn_implementation", None) for net in inner}
    found["attention_effective"] = kinds.pop() if len(kinds) == 1 else None
    if optimizers:
        found["optimizer_effective"] = ", ".join(sorted({optimizer_name(one) for one in optimizers}))
    if any(type(net).__name__ == "DeepSpeedEngine" for net in nets):
        found["deepspeed_version"] = getattr(sys.modules.get("deepspeed"), "__version__", None)
    return found


def allocator() -> dict[str, Any]:
    """Return the backend of torch's CUDA allocator, and its settings in force as far as torch reports them."""
    backend = torch.cuda.get_allocator_backend()
    settings = torch.cuda.memory._snapshot()["allocator_settings"] if backend == "native" else {}
    return {"backend": backend, "allocator_settings": settings}


def optimizer_name(optim: Any) -> str:
    """Return the optimizer's class (of a stand-in, the class it stands for), with an inner one's in parentheses.

    bitsandbytes' classes serve several values of the axis, so the kind of their state is added.
    """
    inner, name = getattr(optim, "optimizer", None), type(optim).__name__
    if isinstance(inner, torch.optim.Optimizer):
        return f"{name}({optimizer_name(inner)})"
    if type(optim).__module__.startswith("bitsandbytes."):
        return label(name, optim.args.optim_bits, optim.is_paged)
    return str(getattr(optim, "stands_for", name))


def label(name: str, bits: int, paged: bool) -> str:
    """Return the name of a class in rows, with its bits, because one class serves several values of the axis."""
    return f"{name}({bits}-bit{', paged' if paged else ''})"
