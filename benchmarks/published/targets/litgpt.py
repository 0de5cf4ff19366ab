"""lit-gpt's GPT (October 2023) as its fine-tuning scripts train it, on one card or divided by FSDP1, rebuilt for
`runner=custom`.

Options (`+runner.options.NAME=VALUE`): `size` (a key of SIZES), `method` (lora, adapter, adapter_v2), `rank` (of
lora), `quantized` (none, nf4, nf4_double: bitsandbytes 0.41's linear layers, the output layer among them), `norm`
(own: RMSNorm in the precision of its input; fp32), `later` (length of the passes after the first; with sharding=fsdp1).

A step is the first forward and backward pass of a run, whose batch is the longest; weights are updated 128 samples
later. Lightning Fabric hands out logits in fp32, whatever the model's precision.

With sharding=fsdp1 a step is three passes, the second and third of length `later`: FSDP's no_sync keeps gradients of
whole blocks, frozen weights' among them, until the third pass has divided them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from vramsweep.harness.spec.trial import Trial

DROPOUT, PIECE, PROMPT, FIRST_ADAPTED = 0.05, 128, 10, 2


@dataclass(frozen=True)
class Size:
    """`rotary` is the share of a head that is turned; `parallel` adds attention and MLP of the same input."""

    vocab: int
    layers: int
    width: int
    heads: int
    hidden: int
    rotary: float = 0.25
    parallel: bool = True
    one_norm: bool = False
    bias: bool = True
    head_bias: bool = False
    gated: bool = False
    gelu: str = "none"


SIZES = {
    "phi-1.5": Size(51200, 24, 2048, 32, 8192, rotary=0.5, one_norm=True, head_bias=True, gelu="tanh"),
    "stablelm-3b": Size(50688, 16, 4096, 32, 16384),
    "llama-2-7b": Size(32000, 32, 4096, 32, 11008, rotary=1.0, parallel=False, bias=False, gated=True),
    "llama-2-13b": Size(32000, 40, 5120, 40, 13824, rotary=1.0, parallel=False, bias=False, gated=True),
}


class RootNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5))


class WideRootNorm(RootNorm):
    """The same in fp32 until it is scaled (lit-gpt #606, eight days later)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type_as(x)


class FourBit(torch.autograd.Function):
    """A product with a packed weight, unpacked for it; the input is kept although no gradient needs it."""

    @staticmethod
    def forward(context: Any, x: Tensor, packed: Tensor, bias: Tensor | None, shape: tuple[int, int]) -> Tensor:
        context.kept, context.packed, context.shape = x, packed, shape
        return F.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return grad @ grad.new_empty(context.shape), None, None, None


class Packed(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool, double: bool) -> None:
        super().__init__()
        blocks = inputs * outputs // 64
        self.shape = (outputs, inputs)
        self.register_buffer("packed", torch.empty(inputs * outputs // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8 if double else torch.float32))
        self.register_buffer("outer", torch.empty(blocks // 256 if double else 0, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return FourBit.apply(x, self.packed, self.bias, self.shape)


class Scaled(nn.Module):
    """adapter_v2's: a trained bias and scale behind every linear layer."""

    def __init__(self, linear: nn.Module, outputs: int) -> None:
        super().__init__()
        self.linear = linear
        self.bias_added = nn.Parameter(torch.zeros(outputs))
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.linear(x) + self.bias_added)


class QueryValueLora(nn.Module):
    """LoRA of the queries and values in the joint product: what is added is spread over a zeroed copy of its size."""

    def __init__(self, linear: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.width = width
        self.a = nn.Parameter(torch.zeros(2 * rank, width))
        self.b = nn.Parameter(torch.zeros(2 * width, rank))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        plain = self.linear(x)
        low = F.linear(self.dropout(x), self.a)
        added = F.conv1d(low.transpose(-2, -1), self.b.unsqueeze(-1), groups=2).transpose(-2, -1)
        return plain + self.spread(added) * 2.0

    def spread(self, added: Tensor) -> Tensor:
        length_first = added.transpose(0, 1)
        zeros = added.new_zeros(*length_first.shape[:-1], 3 * self.width).view(-1, 3 * self.width)
        columns = torch.arange(3 * self.width, device=added.device).view(3, -1)[::2].reshape(-1)
        whole = zeros.index_copy(1, columns, length_first.reshape(-1, 2 * self.width))
        return whole.view(*length_first.shape[:-1], 3 * self.width).transpose(0, 1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (swapped * sin)).type_as(x)


class Attention(nn.Module):
    def __init__(self, size: Size, linear: Callable[..., nn.Module], rank: int, adapted: bool) -> None:
        super().__init__()
        self.heads = size.heads
        self.turned = int(size.width // size.heads * size.rotary)
        joint = linear(size.width, 3 * size.width, size.bias)
        self.attn = QueryValueLora(joint, size.width, rank) if rank else joint
        self.proj = linear(size.width, size.width, size.bias)
        self.prefix = nn.Parameter(torch.zeros(1, PROMPT, size.width)) if adapted else None
        self.gate = nn.Parameter(torch.zeros(1, 1, size.heads, 1)) if adapted else None

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch, length, _ = x.shape
        joint = self.attn(x).view(batch, length, self.heads, 3, -1).permute(0, 2, 3, 1, 4)
        return tuple(one.reshape(batch, self.heads, length, -1) for one in joint.split(1, dim=2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        n = self.turned
        q_turned, k_turned = turned(q[..., :n], cos, sin), turned(k[..., :n], cos, sin)
        q, k = torch.cat((q_turned, q[..., n:]), dim=-1), torch.cat((k_turned, k[..., n:]), dim=-1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        if self.prefix is not None:
            _, prompt_k, prompt_v = self.parts(self.prefix)
            mask = torch.ones(x.shape[1], PROMPT, dtype=torch.bool, device=x.device)
            prompted = F.scaled_dot_product_attention(q, prompt_k, prompt_v, attn_mask=mask).transpose(1, 2)
            seen = seen + self.gate * prompted
        return self.proj(seen.reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self, size: Size, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.gelu = size.gelu
        self.fc = linear(size.width, size.hidden, size.bias)
        self.up = linear(size.width, size.hidden, size.bias) if size.gated else None
        self.proj = linear(size.hidden, size.width, size.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.fc(x)
        if self.up is None:
            return self.proj(F.gelu(inner, approximate=self.gelu))
        return self.proj(F.silu(inner) * self.up(x))


class Block(nn.Module):
    def __init__(
        self, size: Size, linear: Callable[..., nn.Module], rank: int, norm: type[nn.Module], adapted: bool
    ) -> None:
        super().__init__()
        self.parallel = size.parallel
        self.norm_1 = norm(size.width)
        self.attn = Attention(size, linear, rank, adapted)
        self.norm_2 = None if size.one_norm else norm(size.width)
        self.mlp = Mlp(size, linear)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first = self.norm_1(x)
        seen = self.attn(first, cos, sin)
        if self.parallel:
            second = first if self.norm_2 is None else self.norm_2(x)
            return x + seen + self.mlp(second)
        x = x + seen
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    def __init__(
        self, size: Size, length: int, rank: int, norm: type[nn.Module], linear: Callable[..., nn.Module]
    ) -> None:
        super().__init__()
        self.lm_head = linear(size.width, size.vocab, size.head_bias)
        self.wte = nn.Embedding(size.vocab, size.width)
        adapted = [rank == 0 and i >= FIRST_ADAPTED for i in range(size.layers)]
        self.blocks = nn.ModuleList(Block(size, linear, rank, norm, one) for one in adapted)
        self.ln_f = norm(size.width)
        table = torch.empty(length, int(size.width // size.heads * size.rotary), dtype=torch.float32)
        self.register_buffer("cos", table)
        self.register_buffer("sin", table.clone())

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        return [self.lm_head(piece) for piece in self.ln_f(x).split(PIECE, dim=1)]


def build(trial: Trial) -> Any:
    options = {"method": "lora", "quantized": "none", "rank": 8, "norm": "own"} | trial.runner.options
    method, quantized = options["method"], options["quantized"]

    def linear(inputs: int, outputs: int, bias: bool) -> nn.Module:
        if quantized == "none":
            made: nn.Module = nn.Linear(inputs, outputs, bias=bias)
        else:
            made = Packed(inputs, outputs, bias, quantized == "nf4_double")
        return Scaled(made, outputs) if method == "adapter_v2" else made

    size = SIZES[options["size"]]
    root = WideRootNorm if options["norm"] == "fp32" else RootNorm
    norm: type[nn.Module] = root if size.gated else nn.LayerNorm
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rank = int(options["rank"]) if method == "lora" else 0
        model = Gpt(size, trial.seq_len, rank, norm, linear)
    finally:
        torch.set_default_dtype(usual)
    trained = {"lora": ("attn.attn.a", "attn.attn.b"), "adapter": ("prefix", "gate")}
    trained["adapter_v2"] = (*trained["adapter"], "bias_added", "scale", "norm_1", "norm_2", "ln_f")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained[method]))
    divided = trial.sharding == "fsdp1"
    net: nn.Module = divide(model, trial) if divided else model
    trainable = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=3e-4, weight_decay=0.01)

    def passed(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = [piece.float() for piece in net(tokens)]
        logits[-1] = logits[-1][..., :-1, :]
        flat = [piece.reshape(-1, piece.size(-1)) for piece in logits]
        pieces = zip(flat, labels[:, 1:].split(PIECE, dim=1), strict=True)
        losses = [F.cross_entropy(one, answer.reshape(-1), ignore_index=-1, reduction="none") for one, answer in pieces]
        loss = torch.cat(losses).mean()
        del flat, losses
        (loss / (128 // trial.micro_batch)).backward()
        return loss

    def step(batch: list[tuple[Tensor, Tensor]]) -> Tensor:
        *accumulated, last = batch
        with net.no_sync() if divided else contextlib.nullcontext():
            for one in accumulated:
                passed(*one)
        loss = passed(*last)
        if divided:
            optimizer.step()
            optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    def batches(index: int) -> list[tuple[Tensor, Tensor]]:
        later = [int(options["later"])] * 2 if divided else []
        shapes = [(trial.micro_batch, length) for length in (trial.seq_len, *later)]
        return [tuple(torch.randint(size.vocab, shape, device=trial.device.name) for _ in "xy") for shape in shapes]

    return net, optimizer, step, batches


def divide(model: Gpt, trial: Trial) -> nn.Module:
    """The model as Lightning's FSDPStrategy divides it, blocks recomputed inside of FSDP's units."""
    half = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    whole = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=half,
        device_id=torch.device(trial.device.name),
        limit_all_gathers=True,
        use_orig_params=True,
    )
    if trial.checkpointing == "full":
        wrapping.apply_activation_checkpointing(
            whole,
            checkpoint_wrapper_fn=partial(
                wrapping.checkpoint_wrapper, checkpoint_impl=wrapping.CheckpointImpl.NO_REENTRANT
            ),
            check_fn=lambda module: isinstance(module, Block),
        )
    return whole
