"""bert-large as a sequence classifier, trained as the Trainer of transformers 4.15 did on torch 1.10.

Written out because both were different then: attention is the formula with a mask in fp32, and softmax keeps its input
beside its result; gradients are set to zero and kept (not freed); the Trainer's AdamW was transformers' own, parameter
by parameter in place with one temporary; checkpoints are the reentrant ones. fp16 is autocast with GradScaler.
Gradients are clipped at a norm of 1, as by default. Options: optim (adamw, adafactor, adam8bit: bitsandbytes'
block-wise 8-bit Adam); softmax (kept: as torch before 1.11; freed: as later).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForSequenceClassification, BertConfig
from transformers.optimization import Adafactor

CONFIG = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


class KeepingSoftmax(torch.autograd.Function):
    """Softmax of torch before 1.11, whose derivative asked for the input, though only for its dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        out = torch.softmax(x, -1)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        x, out = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, out, -1, x.dtype)


def _attention(keep: bool) -> Any:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        scores = query @ key.transpose(-1, -2)
        scores = scores / math.sqrt(query.shape[-1])
        scores = scores + torch.zeros(scores.shape[0], 1, 1, scores.shape[-1], device=scores.device)
        weights = KeepingSoftmax.apply(scores) if keep else torch.softmax(scores, -1)
        weights = nn.functional.dropout(weights, dropout, module.training)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attend


class AdamW(torch.optim.Optimizer):
    """transformers' own, gone in version 5; weight decay is 0 by default."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["mean"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["square"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                scale = state["square"].sqrt().add_(1e-8)
                parameter.addcdiv_(state["mean"], scale, value=-group["lr"])


class Adam8bit(torch.optim.Optimizer):
    """What bitsandbytes 0.26 keeps: a byte for each value, a scale for 2,048 of them, and two tables of 256 for all.

    Tensors of less than 4,096 elements stay in fp32. The update is one kernel without temporaries.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5})
        self.tables: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is None or state:
                    continue
                if parameter.numel() < 4096:
                    state["state1"], state["state2"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                    continue
                if not self.tables:
                    self.tables = [parameter.new_empty(256) for _ in range(2)]
                blocks = -(-parameter.numel() // 2048)
                for one in ("1", "2"):
                    state["state" + one] = torch.zeros_like(parameter, dtype=torch.uint8)
                    state["absmax" + one] = parameter.new_zeros(blocks)


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "adafactor":
        return Adafactor(parameters, lr=5e-5, scale_parameter=False, relative_step=False)
    return Adam8bit(parameters) if name == "adam8bit" else AdamW(parameters)


def build(trial: Any) -> Any:
    """Model, optimizer, step and batches, as runner=custom asks for them."""
    AttentionInterface.register("formula", _attention(trial.runner.options.get("softmax", "kept") == "kept"))
    net = AutoModelForSequenceClassification.from_config(CONFIG, attn_implementation="formula").train()
    if trial.checkpointing == "full":
        net.gradient_checkpointing_enable({"use_reentrant": True})
    optimizer = optimizer_of(trial.runner.options.get("optim", "adamw"), net.parameters())
    half = trial.precision == "fp16"
    scaler = torch.amp.GradScaler("cuda", enabled=half)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cuda", torch.float16, enabled=half):
            return net(**batch).loss

    def step(batches: list[dict[str, Tensor]]) -> Tensor:
        for batch in batches:
            loss = loss_of(batch) / trial.grad_accum
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        net.zero_grad(set_to_none=False)
        return loss

    def one() -> dict[str, Tensor]:
        ids = torch.randint(100, 30_000, (trial.micro_batch, trial.seq_len))
        return {"input_ids": ids, "labels": torch.zeros(trial.micro_batch, dtype=torch.long)}

    return net, optimizer, step, lambda index: [one() for _ in range(trial.grad_accum)]
