"""Model, optimizer, data and precision, from the trial's axes.

Random weights and synthetic token ids are the default: neither changes memory or speed. Pretrained weights and a text
data set (padded and truncated to the sequence length, as users do) come from local folders or a hub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import techniques

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
POOL = 64  # distinct samples; steps cycle through them
Samples = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Data:
    """Samples of `seq_len` token ids each, on the host, and the share of their tokens that is padding.

    With `pinned`, batches are in page-locked memory: a copy from pageable memory would wait for the device.
    """

    samples: Samples
    padding_fraction: float
    pinned: bool = False

    def batch(self, index: int, size: int) -> dict[str, torch.Tensor]:
        """Micro-batch number `index`: tensors of shape (size, seq_len)."""
        chosen = [self.samples[(index * size + i) % len(self.samples)] for i in range(size)]
        batch = {key: torch.stack([sample[key] for sample in chosen]) for key in chosen[0]}
        return {key: value.pin_memory() for key, value in batch.items()} if self.pinned else batch


def prepare(trial: Trial) -> None:
    """Seed, and set the precision of fp32 matrix products; the settings are global to the worker."""
    torch.manual_seed(trial.seed)
    tf32 = trial.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def model(trial: Trial, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """The model in training mode on `device`. `dtype` defaults to the precision's: bf16_pure's weights are bf16.

    Raises InvalidTrial if the architecture is unknown or the sequence is longer than the model's positions.
    """
    dtype = dtype or (torch.bfloat16 if trial.precision == "bf16_pure" else torch.float32)
    config = _config(trial)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and trial.seq_len > limit:
        raise InvalidTrial(f"seq_len {trial.seq_len} is longer than {trial.model.name}'s {limit} positions")

    def make(dtype: torch.dtype) -> Any:
        with device:
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=trial.attention, trust_remote_code=False
            )

    if trial.weights == "pretrained":
        special = techniques.pretrained(trial, device)
        net: Any = AutoModelForCausalLM.from_pretrained(
            str(trial.model.path),
            **{
                "config": config,
                "dtype": dtype,
                "attn_implementation": trial.attention,
                "trust_remote_code": False,
                **special,
            },
        )
        if not special:
            net.to(device)
    else:
        net = techniques.construct(trial, make, device, dtype)
    if trial.runner.name != "trainer":  # which has its own say, and left the cache on before transformers 5
        net.config.use_cache = False
    net = techniques.applied(trial, net, device)
    net.train()
    return net


def _config(trial: Trial) -> Any:
    axis = trial.model
    if axis.path is not None:
        try:
            return AutoConfig.from_pretrained(axis.path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            if "connect" in str(error):  # no verdict about the trial: a crash, which retry_failed=true runs again
                raise
            first = str(error).strip().splitlines()[0]
            if Path(axis.path).is_absolute() and not Path(axis.path).is_dir():
                first = "there is no such folder; give a local model directory or a hub id"
            raise InvalidTrial(f"model.path {axis.path}: {first}") from None
    try:
        return AutoConfig.for_model(str(axis.model_type), **axis.config)
    except (ValueError, KeyError) as error:
        raise InvalidTrial(f"model {axis.name}: transformers does not accept it: {error}") from None


def optimizer(trial: Trial, parameters: Iterable[torch.nn.Parameter], device: torch.device) -> torch.optim.Optimizer:
    """The trial's optimizer over those of the parameters that are trained."""
    kind, arguments = techniques.optimizer(trial, device)
    return kind([parameter for parameter in parameters if parameter.requires_grad], **arguments)


def autocast(trial: Trial, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The autocast context of the precision; one that does nothing for the others."""
    dtype = AUTOCAST.get(trial.precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def vocabulary(trial: Trial) -> int:
    """Number of token ids that synthetic data may draw from."""
    if trial.model.path is None and "vocab_size" in trial.model.config:
        return int(trial.model.config["vocab_size"])
    return int(_config(trial).vocab_size)


def data(trial: Trial) -> Data:
    """Synthetic or text samples, on the host: real ones also where everything else is traced on fake tensors."""
    with _disable_current_modes():
        return _samples(trial)


def _samples(trial: Trial) -> Data:
    if trial.data == "synthetic":
        generator = torch.Generator().manual_seed(trial.seed)
        ids = torch.randint(vocabulary(trial), (POOL, trial.seq_len), generator=generator)
        return Data([{"input_ids": row, "labels": row} for row in ids], 0.0, trial.device.name == "cuda")
    return _text(trial)


def _text(trial: Trial) -> Data:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(trial.model.path), trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = _lines(trial.data)
    if not texts:
        raise InvalidTrial(f"data {trial.data} holds no text")
    tokenizer.padding_side = "right"
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=trial.seq_len, return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    samples = [{"input_ids": i, "attention_mask": m, "labels": t} for i, m, t in zip(ids, mask, labels, strict=True)]
    return Data(samples, 1 - float(mask.float().mean()), trial.device.name == "cuda")


def _lines(name: str) -> list[str]:
    """The first texts of a data set: lines of a local file, or the `text` column of a hub data set's train split."""
    path = Path(name)
    if path.is_file():
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:POOL]
    try:
        import datasets
    except ModuleNotFoundError:
        text = f"data {name}: there is no such file, and hub data sets need `pip install vramsweep[data]`"
        raise InvalidTrial(text) from None
    stream = datasets.load_dataset(name, split="train", streaming=True)
    texts: list[str] = []
    for record in stream:
        if str(record["text"]).strip():
            texts.append(str(record["text"]))
        if len(texts) == POOL:
            break
    return texts


def parameters(net: torch.nn.Module, trained: bool = False) -> int:
    """Number of parameters, or of those that are trained; shared ones once; under ZeRO-3 the whole ones, not shards.

    Packed weights count as those that they stand for.
    """
    modules: list[Any] = list(net.modules())
    packed = {id(m.weight): m.in_features * m.out_features for m in modules if hasattr(m, "quant_state")}
    found = [p for p in net.parameters() if p.requires_grad or not trained]
    total: int = sum(packed.get(id(p), getattr(p, "ds_numel", p.numel())) for p in found)
    buffers: int = sum(m.in_features * m.out_features for m in modules if "qweight" in m._buffers)  # GPTQ's
    return total if trained else total + buffers


def describe(net: Any, optim: Any) -> dict[str, Any]:
    """Columns about what was really built."""
    return {
        "parameters": parameters(net),
        "trainable_parameters": parameters(net, trained=True),
        "attention_effective": getattr(getattr(net, "config", None), "_attn_implementation", None),
        "optimizer_effective": type(optim).__name__,
    }
