"""torchtitan's Llama and its training step of 2024 and early 2025, one data-parallel dimension, rebuilt for
`runner=custom`.

Options (`+runner.options.NAME=VALUE`) say what changed between commits:

- `flavor`: 8B (Llama 3), 7B (Llama 2), gpt2 (768 wide, 12 layers, Llama 3's vocabulary).
- `logits`: kept (fp32 from the model, and the last step's stay until the next forward pass is done), dropped (fp32
  from the model, let go of before the backward pass), late (half precision from the model, fp32 within the loss).
- `folded`: batch and sequence are one dimension between layers.
- `positions`: rows of the rotary table, as a number or as a multiple of the length (x2).
- `norm`: own (five kernels) or torch (nn.RMSNorm).
- `units`: stock (each layer, the rest), apart (also the embedding, and norm and output), never (stock, gathered
  weights stay after the forward pass); of FSDP2. With sharding=fsdp1 each layer is a unit, and the rest.

`checkpointing` is none, full or selective; selective keeps attention and every other matrix product,
`checkpointing_every` leaves all but each so-manieth layer alone. `optimizer` is adamw_torch_foreach or
adamw_torch_fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.trace import fake_placement


@dataclass(frozen=True)
class Sizes:
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int


FLAVORS = {
    "8B": Sizes(4096, 32, 32, 8, 14336, 128256),
    "7B": Sizes(4096, 32, 32, 32, 11008, 32000),
    "gpt2": Sizes(768, 12, 12, 12, 2048, 128256),
}


class Norm(nn.Module):
    """RMSNorm whose statistics and product are fp32, scaled in the input's own precision."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        del wide
        return scaled.type_as(x) * self.weight


def turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[None, :, None]).flatten(3).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    batch, length, _, size = x.shape
    return x if times == 1 else x[:, :, :, None].expand(-1, -1, -1, times, -1).reshape(batch, length, -1, size)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.dim // sizes.heads
        self.times = sizes.heads // sizes.kv_heads
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, sizes.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(sizes.dim, sizes.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        length = angles.shape[0]
        q, k, v = (
            one(x).view(-1, length, one.out_features // self.size, self.size) for one in (self.wq, self.wk, self.wv)
        )
        q, k = turned(q, angles), turned(k, angles)
        k, v = repeated(k, self.times), repeated(v, self.times)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = seen.transpose(1, 2).contiguous()
        return self.wo(seen.view(x.shape))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm = norm(sizes.dim)
        self.ffn_norm = norm(sizes.dim)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(
        self, sizes: Sizes, norm: Callable[[int], nn.Module], positions: int, folded: bool, wide: bool
    ) -> None:
        super().__init__()
        self.folded, self.wide = folded, wide
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.dim)
        self.register_buffer("angles", torch.empty(positions, sizes.dim // sizes.heads // 2, dtype=torch.complex64))
        self.layers = nn.ModuleDict({str(i): Layer(sizes, norm) for i in range(sizes.layers)})
        self.norm = norm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        angles = self.angles[: tokens.shape[1]]
        if self.folded:
            h = h.flatten(0, 1)
        for layer in self.layers.values():
            h = layer(h, angles)
        h = self.norm(h).view(*tokens.shape, -1)
        return self.output(h).float() if self.wide else self.output(h)


def build(trial: Trial) -> Any:
    options = {"flavor": "8B", "logits": "dropped", "folded": False, "positions": "x2", "norm": "own", "units": "stock"}
    options |= trial.runner.options
    sizes = FLAVORS[options["flavor"]]
    rows = str(options["positions"])
    positions = int(rows[1:]) * trial.seq_len if rows.startswith("x") else int(rows)
    norm = Norm if options["norm"] == "own" else partial(nn.RMSNorm, eps=1e-5)
    flat = trial.sharding == "fsdp1"
    with fake_placement.on_host() if flat else torch.device("meta"), torch.device("meta"):
        model = Llama(sizes, norm, positions, bool(options["folded"]), options["logits"] != "late")
    recompute(model, trial)
    if flat:
        net: Any = flatten(model, torch.device(trial.device.name))
    else:
        shard(model, options["units"])
        net = model.to_empty(device=trial.device.name)
    fused = trial.optimizer == "adamw_torch_fused"
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused, foreach=not fused
    )
    kept: list[Tensor] = []

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, labels = batch
        optimizer.zero_grad()
        logits = net(tokens)
        if options["logits"] == "kept":
            kept[:] = [logits]
        loss = loss_of(logits, labels)
        del logits
        loss.backward()
        if flat:
            net.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=True)
        optimizer.step()
        return loss

    def batches(index: int) -> tuple[Tensor, Tensor]:
        shape = (trial.micro_batch, trial.seq_len)
        tokens, labels = (torch.randint(sizes.vocab, shape, device=trial.device.name) for _ in range(2))
        return tokens, labels

    return net, optimizer, step, batches


def recompute(model: Llama, trial: Trial) -> None:
    if trial.checkpointing == "none":
        return
    keep = {"context_fn": every_other_product} if trial.checkpointing == "selective" else {}
    for number, (name, layer) in enumerate(model.layers.items(), start=1):
        if number % trial.checkpointing_every == 0:
            model.layers[name] = checkpoint_wrapper(layer, preserve_rng_state=False, **keep)


def every_other_product() -> Any:
    aten = torch.ops.aten
    attention = (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    )
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in attention
        if operator == aten.mm.default:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def shard(model: Llama, units: str) -> None:
    """Divide the model. The last layer's weights stay, as the backward pass starts with them; so do the root's, which
    torch did of itself then, whatever it was asked."""
    whole = partial(fully_shard, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    *rest, last = model.layers.values()
    for layer in rest:
        whole(layer, reshard_after_forward=units != "never")
    whole(last, reshard_after_forward=False)
    if units == "apart":
        whole(model.tok_embeddings, reshard_after_forward=True)
        whole([model.norm, model.output], reshard_after_forward=False)
    whole(model, reshard_after_forward=False)


def flatten(model: Llama, device: torch.device) -> FullyShardedDataParallel:
    """The model divided as torchtitan did before #165."""

    def empty(module: nn.Module) -> nn.Module:
        return module.to_empty(device=device, recurse=False)

    whole = partial(
        FullyShardedDataParallel,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        use_orig_params=True,
        device_id=device,
        param_init_fn=empty,
    )
    for name, layer in model.layers.items():
        model.layers[name] = whole(layer)
    return whole(model)
