"""torchtune's Llama-3.2-3B, all weights trained in bf16 on one card (spring 2025), rebuilt for `runner=custom`.

The packed batch's attention is a compiled kernel there (flex attention); here the flash kernel stands for it, which
keeps the same: queries, keys, values, output and a value a row. Logits are those of all tokens, in fp32 from the
model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vramsweep.harness.spec.trial import Trial

VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, SHARED, HEAD, POSITIONS = 128256, 3072, 8192, 28, 24, 8, 128, 131072


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


def turned(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = table.view(-1, pairs.size(1), 1, pairs.size(3), 2)
    one, two, cos, sin = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
    return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sa_norm, self.mlp_norm = Norm(), Norm()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(WIDTH, SHARED * HEAD, bias=False)
        self.v_proj = nn.Linear(WIDTH, SHARED * HEAD, bias=False)
        self.output_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        x = self.attend(self.sa_norm(x), table, positions) + x
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = turned(self.q_proj(x).view(batch, length, HEADS, HEAD), table[positions]).transpose(1, 2)
        k, v = (one(x).view(batch, length, SHARED, HEAD) for one in (self.k_proj, self.v_proj))
        k, v = turned(k, table[positions]).transpose(1, 2), v.transpose(1, 2)
        shape = (batch, SHARED, HEADS // SHARED, -1, HEAD)
        k, v = (one.unsqueeze(2).expand(shape).flatten(1, 2) for one in (k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(seen.transpose(1, 2).contiguous().view(batch, length, -1))

    def mlp(self, x: Tensor) -> Tensor:
        inner = F.silu(self.w1(x))
        inner = inner * self.w3(x)
        return self.w2(inner)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()
        self.register_buffer("table", torch.empty(POSITIONS, HEAD // 2, 2, dtype=torch.float32))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.table, positions)
        return F.linear(self.norm(x), self.tok_embeddings.weight).float()


def build(trial: Trial) -> Any:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Llama()
    finally:
        torch.set_default_dtype(usual)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)

    def loss_of(tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        logits = model(tokens, positions)
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100)

    def step(batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens, labels, positions = batch
        loss = loss_of(tokens, labels, positions) * labels.numel()
        loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / labels.numel())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def batches(index: int) -> tuple[Tensor, Tensor, Tensor]:
        shape = (trial.micro_batch, trial.seq_len)
        tokens, labels = (torch.randint(VOCAB, shape, device=trial.device.name) for _ in range(2))
        positions = torch.arange(trial.seq_len, device=trial.device.name).expand(shape)
        return tokens, labels, positions

    return model, optimizer, step, batches
