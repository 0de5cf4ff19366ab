"""The decoder of Stanford's CS336, assignment 2, and training steps as students' scripts run it.

Attention with an explicit softmax, SwiGLU, RMSNorm in fp32, rotary positions, untied output layer, cross entropy and
AdamW by hand. Options: layers, width, hidden, heads, tokens; segment (layers in each checkpoint, 0: none); only
(train, or forward: no backward pass); rotary (shared: one table, sliced; gathered: rows picked by position, as in 2025;
own: tables in every layer, halves interleaved); decay_last (weight decay after the update, as in 2025); divide
(optimizer state of rank 0 among so many, parameters dealt out in turn); late (the optimizer steps in the third step
only, after the graph is gone: a recording of the first update); clear (gradients last in a step, as for a forward peak
that is taken without old ones, or first). bf16 is autocast, the loss in its own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.normal_(torch.empty(outputs, inputs), std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    def __init__(self, context: int, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        angles = torch.arange(context)[:, None] * 10_000.0 ** -(torch.arange(0, width, 2) / width)
        if kind == "own":
            self.register_buffer("cos", torch.cos(angles), persistent=False)
            self.register_buffer("sin", torch.sin(angles), persistent=False)
        else:
            self.register_buffer("table", torch.stack((torch.cos(angles), torch.sin(angles))), persistent=False)

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        if self.kind == "own":
            return self.cos, self.sin
        if self.kind == "gathered":
            cos, sin = self.table[:, torch.arange(length, device=self.table.device)]
        else:
            cos, sin = self.table[:, :length].unbind(0)
        return cos, sin

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.rows(x.shape[-2])
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        first = cos * even - sin * odd
        second = sin * even + cos * odd
        return torch.stack((first, second), -1).flatten(-2) if self.kind == "own" else torch.cat((first, second), -1)


def softmax(x: Tensor) -> Tensor:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponent = torch.exp(shifted)
    return exponent / torch.sum(exponent, dim=-1, keepdim=True)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("...qd,...kd->...qk", query, key) / math.sqrt(key.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, value)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (Linear(width, width) for _ in range(4))
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        places = torch.arange(x.shape[-2], device=x.device)
        out = attend(query, key, value, places[:, None] >= places)
        out = out.transpose(-3, -2).contiguous().flatten(-2)
        return self.output(out)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.one, self.two, self.three = Linear(width, hidden), Linear(hidden, width), Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(silu(self.one(x)) * self.three(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads, rotary), FeedForward(width, hidden)
        self.first, self.second = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.first(x))
        middle = x + attended
        fed = self.feed_forward(self.second(middle))
        return middle + fed


class Decoder(nn.Module):
    def __init__(
        self, context: int, layers: int, width: int, hidden: int, heads: int, tokens: int, rotary: str, segment: int
    ) -> None:
        super().__init__()
        self.segment = segment
        self.embedding = nn.Parameter(nn.init.normal_(torch.empty(tokens, width), std=0.02))
        shared = Rotary(context, width // heads, rotary)
        each = (Rotary(context, width // heads, rotary) if rotary == "own" else shared for _ in range(layers))
        self.blocks = nn.ModuleList(Block(width, hidden, heads, one) for one in each)
        self.norm, self.head = RMSNorm(width), Linear(width, tokens)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids, :]
        if self.segment:
            for start in range(0, len(self.blocks), self.segment):
                x = checkpoint(_through(self.blocks[start : start + self.segment]), x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = block(x)
        x = self.norm(x)
        return self.head(x)


def _through(blocks: nn.ModuleList) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    return run


def log_softmax(x: Tensor) -> Tensor:
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    surprise = -log_softmax(logits)
    return torch.mean(torch.gather(surprise, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay, one parameter after the other, out of place."""

    def __init__(self, parameters: Any, decay_last: bool = False) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.decay_last = decay_last

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient, state = parameter.grad.data, self.state[parameter]
                if not self.decay_last:
                    parameter.data -= rate * 0.01 * parameter.data
                before = state.get("m", torch.zeros_like(gradient))
                before_squared = state.get("v", torch.zeros_like(gradient))
                mean = 0.9 * before + 0.1 * gradient
                square = 0.999 * before_squared + 0.001 * torch.square(gradient)
                parameter.data -= rate * mean / (torch.sqrt(square) + 1e-8)
                if self.decay_last:
                    parameter.data -= rate * 0.01 * parameter.data
                state["m"], state["v"] = mean, square


def build(trial: Any) -> Any:
    """Model, optimizer, step and batches, as runner=custom asks for them."""
    said = dict(trial.runner.options)
    tokens = said.get("tokens", 10_000)
    net = Decoder(
        trial.seq_len,
        said.get("layers", 24),
        said.get("width", 1024),
        said.get("hidden", 4096),
        said.get("heads", 16),
        tokens,
        said.get("rotary", "shared"),
        said.get("segment", 0),
    )
    ranks = said.get("divide", 1)
    optimizer = AdamW(list(net.parameters())[::ranks], said.get("decay_last", False))
    ids = torch.randint(tokens, (trial.micro_batch, trial.seq_len))
    targets = torch.randint(tokens, (trial.micro_batch, trial.seq_len))
    half, first = trial.precision == "bf16", said.get("clear", "last") == "first"
    train, late, turn = said.get("only", "train") == "train", said.get("late", False), 0

    def context() -> Any:
        return torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()

    def backward() -> tuple[Tensor, Tensor]:
        with context():
            logits = net(ids)
        with context():
            loss = cross_entropy(logits, targets)
        loss.backward()
        return logits, loss

    def step(batch: Any) -> Any:
        nonlocal turn
        turn += 1
        if first:
            optimizer.zero_grad()
        if not train:
            with context():
                net(ids)
            return None
        kept = backward()
        if late:
            kept = ()
        if not late or turn == 3:
            optimizer.step()
        if not first:
            net.zero_grad()
        return kept[1] if kept else None

    return net, optimizer, step, lambda index: None
