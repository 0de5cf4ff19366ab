"""llm-foundry's MPT of 2023 and the training step that Composer makes of it, rebuilt for `runner=custom`.

A GPT with learned positions, biases and a tied output layer. All that counts for speed is in it: norms in half
precision; queries, keys and values copied into an unpadded layout and the attention's result copied back, although
nothing is padded; a loss on half-precision logits; two metrics (cross entropy, perplexity) of every micro-batch, each
of fp32 logits; AdamW parameter by parameter. Not in it: waiting for the host, which unpadding does in every layer.

Options (`+runner.options.NAME=VALUE`):

- `size`: 125m to 70b.
- `reduce`: bf16 or fp32, in which gradients are scattered (FSDP's mixed precision PURE; from Composer 0.17 on,
  DEFAULT).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from vramsweep.harness.spec.trial import Trial

VOCAB = 50368


@dataclass(frozen=True)
class Sizes:
    dim: int
    heads: int
    layers: int


SIZES = {
    "125m": Sizes(768, 12, 12),
    "350m": Sizes(1024, 16, 24),
    "760m": Sizes(1536, 12, 24),
    "1b": Sizes(2048, 16, 24),
    "3b": Sizes(2560, 20, 32),
    "7b": Sizes(4096, 32, 32),
    "13b": Sizes(5120, 40, 40),
    "30b": Sizes(7168, 56, 48),
    "70b": Sizes(8192, 64, 80),
}
REDUCE = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Unpad(torch.autograd.Function):
    """The rows of all tokens that are no padding (here: all), copied."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        ctx.count = rows.shape[0]
        return rows.index_select(0, kept)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (kept,) = ctx.saved_tensors
        return grad.new_zeros(ctx.count, grad.shape[1]).index_copy_(0, kept, grad), None


class Pad(torch.autograd.Function):
    """The inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, kept: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(kept)
        return rows.new_zeros(count, rows.shape[1]).index_copy_(0, kept, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return grad.index_select(0, kept), None, None


class HalfLoss(torch.autograd.Function):
    """Cross entropy that keeps the logits as they are, and makes their gradient of them alone."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        total = logits.logsumexp(-1)
        chosen = logits.gather(1, labels[:, None])[:, 0]
        ctx.save_for_backward(logits, labels)
        return (total.float() - chosen.float()).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        share = grad / logits.shape[0]
        change = logits.softmax(-1).mul_(share)
        less = (-share).to(change.dtype).expand(labels.shape[0], 1)
        return change.scatter_add_(1, labels[:, None], less), None


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.Wqkv = nn.Linear(sizes.dim, 3 * sizes.dim)
        self.out_proj = nn.Linear(sizes.dim, sizes.dim)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            Unpad.apply(one.flatten(0, 1), kept).view(batch, length, self.heads, -1).transpose(1, 2)
            for one in self.Wqkv(x).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        rows = seen.transpose(1, 2).reshape(batch * length, dim)
        out: Tensor = self.out_proj(Pad.apply(rows, kept, batch * length).view(x.shape))
        return out


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(sizes.dim)
        self.attn = Attention(sizes)
        self.norm_2 = nn.LayerNorm(sizes.dim)
        self.up_proj = nn.Linear(sizes.dim, 4 * sizes.dim)
        self.down_proj = nn.Linear(4 * sizes.dim, sizes.dim)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x), kept)
        out: Tensor = x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))
        return out


class Mpt(nn.Module):
    def __init__(self, sizes: Sizes, positions: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, sizes.dim)
        self.wpe = nn.Embedding(positions, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm_f = nn.LayerNorm(sizes.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.wte(tokens) + self.wpe(torch.arange(length, device=tokens.device)[None])
        kept = torch.arange(batch * length, device=tokens.device)
        for block in self.blocks:
            x = block(x, kept)
        return F.linear(self.norm_f(x), self.wte.weight)


def build(trial: Trial) -> Any:
    options = {"size": "125m", "reduce": "bf16"} | dict(trial.runner.options)
    with torch.device("meta"):
        model = Mpt(SIZES[str(options["size"])], trial.seq_len)
    if trial.checkpointing == "full":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=REDUCE[str(options["reduce"])])
    whole = partial(fully_shard, mp_policy=policy)
    for block in model.blocks:
        whole(block)
    whole(model, reshard_after_forward=False)
    model.to_empty(device=trial.device.name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    outputs: list[Tensor] = []  # of the last micro-batch, which the trainer keeps

    def micro_step(tokens: Tensor) -> None:
        logits = model(tokens).flatten(0, 1)
        outputs[:] = [logits]
        labels = tokens.roll(-1).flatten()
        (HalfLoss.apply(logits, labels) / trial.grad_accum).backward()
        with torch.no_grad():
            for _ in range(2):
                F.cross_entropy(logits.detach().float(), labels, reduction="sum")

    def step(micro_batches: list[Tensor]) -> None:
        optimizer.zero_grad(set_to_none=True)
        for tokens in micro_batches:
            micro_step(tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def batches(index: int) -> list[Tensor]:
        def tokens() -> Iterator[Tensor]:
            for _ in range(trial.grad_accum):
                yield torch.randint(VOCAB, (trial.micro_batch, trial.seq_len), device=trial.device.name)

        return list(tokens())

    return model, optimizer, step, batches
