"""Targets of several ranks, which divide their model themselves: DistributedDataParallel, FSDP, or not at all."""

import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from vramsweep.harness.spec.trial import Trial

LET_GO = 0.2  # seconds in which gloo's threads let go of what they have sent, on a busy machine too

Built = tuple[Any, Any, Callable[[Any], torch.Tensor], Callable[[int], torch.Tensor]]


def ddp(trial: Trial) -> Built:
    net = _net()
    if trial.device.name == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return _trained(trial, DistributedDataParallel(net, device_ids=[int(os.environ["LOCAL_RANK"])]))
    return _trained(trial, DistributedDataParallel(net))


def fsdp2(trial: Trial) -> Built:
    net = _net()
    for layer in net:
        fully_shard(layer)
    return _trained(trial, fully_shard(net))


def fsdp1(trial: Trial) -> Built:
    net = _net()
    for index, layer in enumerate(net):
        if list(layer.parameters()):
            net[index] = FullyShardedDataParallel(layer, device_id=torch.get_default_device())
    return _trained(trial, FullyShardedDataParallel(net, device_id=torch.get_default_device()))


def alone(trial: Trial) -> Built:
    return _trained(trial, _net())


def joined_again(trial: Trial) -> Built:
    dist.init_process_group("gloo")
    return ddp(trial)


def in_a_wrapper(trial: Trial) -> Built:
    """FSDP in a model of its own, which also has something called `module`."""
    return _trained(trial, _Wrapper(_net()))


def too_late(trial: Trial) -> Built:
    """The optimizer knows the parameters that there were before the model was divided."""
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())
    _, _, *rest = _trained(trial, fully_shard(net))
    return net, optimizer, rest[0], rest[1]


class _Wrapper(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.module = fully_shard(net)
        self.head = fully_shard(torch.nn.Linear(256, 256))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.module(given))
        return out


def _net() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))


def _trained(trial: Trial, net: Any) -> Built:
    optimizer = torch.optim.AdamW(net.parameters())
    assert dist.get_world_size() == trial.world_size

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(batch).square().mean()
        loss.backward()
        time.sleep(LET_GO)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, optimizer, step, lambda index: torch.randn(trial.micro_batch, 256, device=trial.device.name)


if __name__ == "__main__":  # as a script of several ranks
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.barrier()
    dist.all_gather_object(every := [None] * dist.get_world_size(), os.environ["LOCAL_RANK"])
    assert (dist.get_rank(), dist.get_backend(), every) == (0, "nccl", ["0"] * torch.cuda.device_count())
    asked: Any = SimpleNamespace(device=SimpleNamespace(name="cuda"), world_size=len(every), micro_batch=2)
    with torch.device("cuda"):
        model, _, step, batches = globals()[sys.argv[1]](asked)
    assert all(one.is_cuda and one.device.type == "cuda" for one in model.parameters())
    for index in range(9):
        batch = batches(index)
        loss = step(batch)
