"""Models, batches and losses that `vramsweep.estimate` and `runner=custom runner.options.name=NAME` both run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    T5ForConditionalGeneration,
)

IDS = dict.fromkeys(("input_ids", "labels"), ((2, 96), torch.long))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3)
        )
        self.head = nn.Linear(64 * 30 * 30, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(2000, 256), nn.LSTM(256, 384, 2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(384, 2000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(ids))[0]).flatten(0, 1)


class Tied(nn.Module):
    """A causal transformer whose output layer has the embedding's weight, with a mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(3000, 256), nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(2))
        self.out = nn.Linear(256, 3000, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(96))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.out(x).flatten(0, 1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = (512, 1024, 2048)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(w, 2 * w), nn.BatchNorm1d(2 * w)) for w in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1].flatten())


def squared(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.float().square().mean()


def causal(kind: str, **sizes: Any) -> Callable[[], nn.Module]:
    return lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def classifier() -> nn.Module:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", vocab_size=1000, **sizes))


def translator() -> nn.Module:
    sizes = {"d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_heads": 4, "vocab_size": 1000,
             "decoder_start_token_id": 0}  # fmt: skip
    return T5ForConditionalGeneration(AutoConfig.for_model("t5", **sizes))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Any  # shapes and dtypes
    optimizer: Any = torch.optim.AdamW
    loss: Any = None
    precision: str | None = None


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


_LLAMA = {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
_TOKENS = (((4, 96), torch.long), ((4, 96), torch.long))
OWN = {
    "conv": Case(Conv, (((8, 3, 64, 64), torch.float32), ((8,), torch.long)), momentum, cross_entropy),
    "lstm": Case(Recurrent, _TOKENS, loss=cross_entropy),
    "tied": Case(Tied, _TOKENS, loss=cross_entropy),
    "batch_norm": Case(Normed, ((64, 512), torch.float32), torch.optim.RMSprop, squared),
    "amp": Case(Normed, ((64, 512), torch.float32), loss=squared, precision="bf16"),
}
LIBRARY = {
    "llama": Case(causal("llama", **_LLAMA), IDS, precision="bf16"),
    "qwen2": Case(causal("qwen2", **_LLAMA), IDS, torch.optim.Adagrad),
    "gpt2": Case(causal("gpt2", n_embd=128, n_layer=2, n_head=4, vocab_size=1000), IDS),
    "bert": Case(classifier, {"input_ids": ((2, 96), torch.long), "labels": ((2,), torch.long)}, precision="fp16"),
    "t5": Case(translator, IDS),
}
CASES = OWN | LIBRARY


def build(trial: Any) -> Any:
    """Build the case as a target of runner=custom, as docs/own_script.md has it."""
    case = CASES[trial.runner.options["name"]]
    model = case.make()
    if trial.sharding == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = case.optimizer(model.parameters())
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.precision or "")
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16")

    def loss_of(batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", half, enabled=half is not None):
            if isinstance(batch, dict):
                return model(**batch).loss
            output = model(batch[0] if isinstance(batch, tuple) else batch)
            return case.loss(output, batch)

    def step(batch: Any) -> torch.Tensor:
        loss = loss_of(batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def tensor(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    def batches(index: int) -> Any:
        if isinstance(case.batch, dict):
            return {name: tensor(*one) for name, one in case.batch.items()}
        return (
            tensor(*case.batch) if isinstance(case.batch[1], torch.dtype) else tuple(tensor(*one) for one in case.batch)
        )

    return model, optimizer, step, batches
