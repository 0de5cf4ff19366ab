"""A small training beside other models, and with what else people do between two steps; argument 1 says what."""

import contextlib
import sys
import time

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def model(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Embedding(50, width), nn.Linear(width, width), nn.Linear(width, 50))


what = sys.argv[1]
ids = torch.randint(0, 50, (4, 16))
big = model(512) if what == "big" else None
if big is not None:
    big(ids)
    big = None
teacher = model(128).requires_grad_(False) if what == "teacher" else None
scale = nn.Flatten()
net = model().train()
kind = torch.optim.LBFGS if what == "closure" else torch.optim.AdamW
optimizer = kind(net.parameters(), lr=1e-3)
for step in range(40):
    if what == "transform":
        scale(ids)
    if teacher is not None:
        teacher(ids)
    if what == "retry":
        with contextlib.suppress(IndexError):
            net(torch.full((8, 16), 50))  # of which there are none

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(ids).sum()
        if what == "siamese":
            loss = loss + net(ids).sum()
        loss.backward()
        return loss

    if what == "modes":
        optimizer.zero_grad()
        with Nothing(), FlopCounterMode(display=False) as counter:
            loss = net(ids).sum()
        assert counter.get_total_flops() == 2 * 64 * (32 * 32 + 32 * 50)
        loss.backward()
        optimizer.step()
    elif what == "closure":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    if what == "evaluation" and step % 4 == 3:
        net.eval()
        with torch.no_grad():
            net(torch.randint(0, 50, (512, 16)))
        time.sleep(0.3)
        net.train()
    if what == "with_gradients":
        net.eval()
        net(torch.randint(0, 50, (64, 16)))
        net.train()
