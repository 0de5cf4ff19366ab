"""litgpt's GPT (May 2024) as extensions/thunder/pretrain.py trains it without a compiler, rebuilt for `runner=custom`.

TinyLlama of 1.1 billion parameters on one card, with DistributedDataParallel or FSDP1: weights, gradients and AdamW's
state in bf16, queries, keys and values of one product, logits made fp32 by Lightning Fabric. `grad_accum` passes a
step, all but the last under no_sync.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from vramsweep.harness.spec.trial import Trial

VOCAB, LAYERS, WIDTH, HIDDEN, HEADS, GROUPS, LENGTH = 32000, 22, 2048, 5632, 32, 4, 2048
HEAD = WIDTH // HEADS


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * self.weight


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = torch.cat((-x[..., HEAD // 2 :], x[..., : HEAD // 2]), dim=-1)
    return ((x * cos) + (swapped * sin)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        each = HEADS // GROUPS
        joint = self.attn(x).view(batch, length, GROUPS, each + 2, HEAD).permute(0, 2, 3, 1, 4)
        q, k, v = joint.split((each, 1, 1), dim=2)
        shape = (batch, GROUPS, each, length, HEAD)
        q, k, v = (one.reshape(batch, -1, length, HEAD) for one in (q, k.expand(shape), v.expand(shape)))
        q_turned, k_turned = turned(q[..., :HEAD], cos, sin), turned(k[..., :HEAD], cos, sin)
        q, k = torch.cat((q_turned, q[..., HEAD:]), dim=-1), torch.cat((k_turned, k[..., HEAD:]), dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(seen.reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc_1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.fc_2 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fc_1(x), self.fc_2(x)
        both = F.silu(first) * second
        return self.proj(both)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2, self.mlp = Norm(), Attention(), Norm(), Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.attn(self.norm_1(x), cos, sin) + x
        return self.mlp(self.norm_2(x)) + x


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = Norm()
        self.register_buffer("cos", torch.empty(LENGTH, HEAD))
        self.register_buffer("sin", torch.empty(LENGTH, HEAD))

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.ln_f(x))


def build(trial: Trial) -> Any:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Gpt()
    finally:
        torch.set_default_dtype(usual)
    net: Any = model
    if trial.sharding == "ddp":
        net = DistributedDataParallel(model)
    elif trial.sharding == "fsdp1":
        net = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
            device_id=torch.device(trial.device.name),
            use_orig_params=True,
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def passed(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = net(tokens).float()
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
        del logits
        (loss / trial.grad_accum).backward()
        return loss.detach()

    def step(batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        *accumulated, last = batch
        with contextlib.nullcontext() if net is model else net.no_sync():
            for one in accumulated:
                passed(*one)
        loss = passed(*last)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batches(index: int) -> list[tuple[Tensor, ...]]:
        shape = (trial.micro_batch, trial.seq_len)
        return [
            tuple(torch.randint(VOCAB, shape, device=trial.device.name) for _ in "xy") for _ in range(trial.grad_accum)
        ]

    return net, optimizer, step, batches
