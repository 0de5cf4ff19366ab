"""Targets whose steps depend on the length of their batches in ways of their own."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vramsweep.harness.spec.trial import Trial

Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[Any], Tensor]]
WIDTH = 64


def _trained(look: Callable[[Tensor], Tensor]) -> Built:
    """A small model whose step does `look` with what it has embedded, of (batch, length, width)."""
    net = nn.Sequential(nn.Embedding(512, WIDTH), nn.Linear(WIDTH, WIDTH)).to("cuda")
    optimizer = torch.optim.AdamW(net.parameters())

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = look(net(batch["input_ids"])).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, optimizer, step


def branch(trial: Trial) -> Built:
    return _trained(lambda x: x.exp() if x.shape[1] > 1000 else x)


def padded(trial: Trial) -> Built:
    return _trained(lambda x: nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8)) if x.shape[1] % 8 else x)


def positions(trial: Trial) -> Built:
    """Takes the length from the trial, for a buffer."""
    places = torch.zeros(trial.seq_len, WIDTH, device="cuda")
    return _trained(lambda x: x + places)


def counted(trial: Trial) -> Built:
    """Takes it as a plain number."""
    length = int(trial.seq_len)
    return _trained(lambda x: x * torch.zeros(length, 1, device="cuda").sum())


def hidden(trial: Trial) -> Built:
    """Knows it from elsewhere."""
    length = int(os.environ["HIDDEN_LENGTH"])
    return _trained(lambda x: x * torch.zeros(length, 1, device="cuda").sum())


def looked(trial: Trial) -> Built:
    """Asks for a value."""
    return _trained(lambda x: x if x.sum() > 0 else -x)
