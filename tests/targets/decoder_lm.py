"""A plain decoder language model with everything spelled out, as students write it, and its training step.

24 layers of 1,024, 16 heads, SwiGLU of 4,096, RMSNorm, rotary positions, 10,000 tokens, untied; attention with an
explicit softmax, cross entropy and AdamW by hand. Rebuilt from the stack frames of public recordings of such a step,
to compare a prediction with; autocast when the trial's precision is bf16. Nothing in it knows of the harness.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, WIDTH, HEADS, HIDDEN, TOKENS = 24, 1024, 16, 4096, 10_000


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs), std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * rms
        return (self.weight * x).to(given)


class Rotary(nn.Module):
    def __init__(self, context: int) -> None:
        super().__init__()
        width = WIDTH // HEADS
        frequencies = 10_000 ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(context)[:, None] * frequencies
        self.register_buffer("cos", torch.cos(angles), persistent=False)
        self.register_buffer("sin", torch.sin(angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        first = self.cos * even - self.sin * odd
        second = self.sin * even + self.cos * odd
        return torch.stack((first, second), -1).flatten(-2)


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
    def __init__(self, context: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.rotary = Rotary(context)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for t in (query, key, value))
        query = self.rotary(query)
        key = self.rotary(key)
        places = torch.arange(x.shape[-2], device=x.device)
        mask = places[:, None] >= places
        out = attend(query, key, value, mask)
        out = out.transpose(-3, -2).contiguous().flatten(-2)
        return self.output(out)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = Linear(WIDTH, HIDDEN), Linear(HIDDEN, WIDTH), Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.one(x)
        return self.two(gate * torch.sigmoid(gate) * self.three(x))


class Block(nn.Module):
    def __init__(self, context: int) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(context), FeedForward()
        self.first, self.second = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class DecoderLM(nn.Module):
    def __init__(self, context: int, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Parameter(nn.init.trunc_normal_(torch.empty(TOKENS, WIDTH), std=0.02))
        self.blocks = nn.ModuleList(Block(context) for _ in range(layers))
        self.norm, self.head = RMSNorm(), Linear(WIDTH, TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding[ids]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def log_softmax(x: Tensor) -> Tensor:
    x = x - torch.max(x, dim=-1, keepdim=True)[0]
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    surprise = -log_softmax(logits)
    return torch.mean(torch.gather(surprise, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay, one parameter after the other, out of place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                turn = state.get("t", 1)
                rate = group["lr"] * math.sqrt(1 - 0.95**turn) / (1 - 0.9**turn)
                gradient = parameter.grad.data
                parameter.data -= group["lr"] * 0.1 * parameter.data
                before = state.get("m", torch.zeros_like(parameter))
                before_squared = state.get("v", torch.zeros_like(parameter))
                mean = 0.9 * before + 0.1 * gradient
                square = 0.95 * before_squared + 0.05 * torch.square(gradient)
                parameter.data -= rate * mean / (torch.sqrt(square) + 1e-8)
                state["t"], state["m"], state["v"] = turn + 1, mean, square


def build(trial: Any) -> Any:
    """Model, optimizer, step and batches, as runner=custom asks for them."""
    net = DecoderLM(trial.seq_len, trial.runner.options.get("layers", LAYERS))
    optimizer = AdamW(net.parameters())
    ids = torch.randint(TOKENS, (trial.micro_batch, trial.seq_len))
    targets = torch.randint(TOKENS, (trial.micro_batch, trial.seq_len))
    half = trial.precision == "bf16"

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext():
            logits = net(ids)
            loss = cross_entropy(logits, targets)
        loss.backward()
        optimizer.step()
        return loss

    return net, optimizer, step, lambda index: None
