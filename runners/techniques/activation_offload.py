"""Activation offload: tensors that autograd saves in the forward pass wait in host memory for the backward pass.

It works like torch.autograd.graph.save_on_cpu with pinned memory, whose copies run on the computing stream. TRL and
torchtune offload in the same way, with streams of their own for speed. Parameters and buffers stay where they are,
because they live as long as the model; so do tensors below 1 KiB (TRL's and torchtune's `min_offload_size`). Weights
that autocast has cast are copies, so they are offloaded. With checkpointing=full the saved tensors are layers' inputs.

Simulated, host memory is device meta (fake_placement.py).
"""

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.trace import fake_placement

SMALL = 1024  # bytes


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model, whose forward pass saves in host memory."""
    return offloaded(net, fake_placement.HOST if trial.device.name == "simulated" else torch.device("cpu"))


def offloaded(net: torch.nn.Module, host: torch.device) -> torch.nn.Module:
    """Return the model with hooks that keep on `host` what autograd saves from start to end of its forward pass."""
    lasting: set[int] = set()  # storages

    def pack(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        small = tensor.numel() * tensor.element_size() < SMALL
        if small or tensor.layout is not torch.strided or tensor.untyped_storage()._cdata in lasting:
            return tensor.device, tensor
        if host.type == "meta":
            return tensor.device, fake_placement.pinned(tensor)
        pinned = tensor.device.type == "cuda"
        away = torch.empty(tensor.shape, dtype=tensor.dtype, device=host, pin_memory=pinned)
        return tensor.device, away.copy_(tensor, non_blocking=pinned)

    def unpack(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = packed
        if tensor.device.type == "meta":
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return tensor.to(device, non_blocking=True)

    hooks: list[saved_tensors_hooks] = []

    def enter(*_: Any) -> None:
        if not lasting:
            lasting.update(t.untyped_storage()._cdata for t in (*net.parameters(), *net.buffers()))
        hooks.append(saved_tensors_hooks(pack, unpack))
        hooks[-1].__enter__()

    def leave(*_: Any) -> None:
        hooks.pop().__exit__()

    net.register_forward_pre_hook(enter)
    net.register_forward_hook(leave, always_call=True)
    return net
