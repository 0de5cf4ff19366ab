"""torchtune's Llama 2 and its recipes of May 2024 (0217d44), everything in bf16, on one card or divided by FSDP1,
rebuilt for `runner=custom`.

Options (`+runner.options.NAME=VALUE`): `size` (7B, 70B), `method` (full; lora: of queries and values, and of keys in
70B, as the recipes' files have it). With FSDP1 layers are units and, with lora, each adapter is one of its own.
`checkpointing` is full: the layer inside of FSDP's unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.nn import functional as F

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.trace import fake_placement

VOCAB, POSITIONS, HEAD = 32000, 4096, 128


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    hidden: int
    heads: int
    shared: int
    rank: int
    adapted: str


SIZES = {
    "7B": Size(32, 4096, 11008, 32, 32, 8, "qv"),
    "70B": Size(80, 8192, 28672, 64, 8, 16, "qkv"),
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return scaled * self.scale


class Lora(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.lora_a = nn.Linear(inputs, rank, bias=False)
        self.lora_b = nn.Linear(rank, outputs, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        plain = F.linear(x, self.weight)
        low = self.lora_a(self.dropout(x))
        return plain + 2.0 * self.lora_b(low)


def turned(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = table.view(1, pairs.size(1), 1, pairs.size(3), 2)
    one, two, cos, sin = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
    return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(3).type_as(x)


class Layer(nn.Module):
    def __init__(self, size: Size, lora: bool) -> None:
        super().__init__()

        def linear(name: str, inputs: int, outputs: int) -> nn.Module:
            if lora and name in size.adapted:
                return Lora(inputs, outputs, size.rank)
            return nn.Linear(inputs, outputs, bias=False)

        self.heads, self.shared = size.heads, size.shared
        self.sa_norm, self.mlp_norm = Norm(size.width), Norm(size.width)
        self.q_proj = linear("q", size.width, size.heads * HEAD)
        self.k_proj = linear("k", size.width, size.shared * HEAD)
        self.v_proj = linear("v", size.width, size.shared * HEAD)
        self.output_proj = nn.Linear(size.width, size.width, bias=False)
        self.w1 = nn.Linear(size.width, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.width, bias=False)
        self.w3 = nn.Linear(size.width, size.hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = self.attend(self.sa_norm(x), table) + x
        return h + self.mlp(self.mlp_norm(h))

    def attend(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = q.view(batch, length, self.heads, HEAD)
        shape = (batch, length, self.shared, self.heads // self.shared, HEAD)
        k, v = (one.view(batch, length, self.shared, 1, HEAD).expand(shape) for one in (k, v))
        k, v = (one.reshape(batch, length, self.heads, HEAD) for one in (k, v))
        q, k = turned(q, table), turned(k, table)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(seen.transpose(1, 2).contiguous().view(batch, length, -1))

    def mlp(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama(nn.Module):
    def __init__(self, size: Size, lora: bool) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, size.width)
        self.layers = nn.ModuleList(Layer(size, lora) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.output = nn.Linear(size.width, VOCAB, bias=False)
        self.register_buffer("table", torch.empty(POSITIONS, HEAD // 2, 2, dtype=torch.float32))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.table[: tokens.shape[1]])
        return self.output(self.norm(h)).float()


def build(trial: Trial) -> Any:
    options = {"size": "7B", "method": "full"} | trial.runner.options
    size, lora = SIZES[options["size"]], options["method"] == "lora"
    flat = trial.sharding == "fsdp1"
    device = torch.device(trial.device.name)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with fake_placement.on_host(), torch.device("meta" if flat else device):
            model = Llama(size, lora)
    finally:
        torch.set_default_dtype(usual)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not lora or "lora_" in name)
    net: Any = divide(model, device, lora) if flat else model
    if trial.checkpointing == "full":
        wrapping.apply_activation_checkpointing(
            net,
            checkpoint_wrapper_fn=partial(
                wrapping.checkpoint_wrapper, checkpoint_impl=wrapping.CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: isinstance(module, Layer),
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.01)
    loss_of = nn.CrossEntropyLoss()

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = batch
        logits = net(tokens)
        logits = logits[..., :-1, :].contiguous()
        labels = labels[..., 1:].contiguous()
        logits = logits.transpose(1, 2)
        loss = loss_of(logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def batches(index: int) -> tuple[Tensor, Tensor]:
        shape = (trial.micro_batch, trial.seq_len)
        tokens, labels = (torch.randint(VOCAB, shape, device=trial.device.name) for _ in range(2))
        return tokens, labels

    return net, optimizer, step, batches


def divide(model: Llama, device: torch.device, lora: bool) -> FullyShardedDataParallel:
    def unit(module: nn.Module) -> bool:
        adapter = lora and isinstance(module, nn.Linear) and module.weight.requires_grad
        return adapter or isinstance(module, Layer)

    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=unit),
        device_id=device,
        param_init_fn=lambda module: module.to_empty(device=device, recurse=False),
    )
