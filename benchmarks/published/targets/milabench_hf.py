"""Models of transformers in a bare loop that never clears its gradients, as milabench's Hugging Face benches run them.

Options: bench (bert: BertForMaskedLM of a default BertConfig, 512 tokens, labels everywhere; whisper: the encoder of
whisper-tiny under a classifier, 30 s of sound). Adam of torch; fp16 is autocast with GradScaler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForAudioClassification, AutoModelForMaskedLM, BertConfig, WhisperConfig

BERT = BertConfig()
WHISPER = WhisperConfig(
    d_model=384, encoder_layers=4, encoder_attention_heads=6, encoder_ffn_dim=1536, num_mel_bins=80, vocab_size=51_865
)


def model(bench: str) -> nn.Module:
    if bench == "bert":
        return AutoModelForMaskedLM.from_config(BERT)
    return AutoModelForAudioClassification.from_config(WHISPER)


def inputs(bench: str, samples: int, length: int) -> dict[str, torch.Tensor]:
    if bench == "bert":
        ids, labels = (torch.randint(BERT.vocab_size, (samples, length)) for _ in range(2))
        return {"input_ids": ids, "labels": labels}
    features = torch.rand(samples, WHISPER.num_mel_bins, 2 * WHISPER.max_source_positions)
    return {"input_features": features, "labels": torch.randint(WHISPER.num_labels, (samples,))}


def build(trial: Any) -> Any:
    """Model, optimizer, step and batches, as runner=custom asks for them."""
    bench = trial.runner.options["bench"]
    net = model(bench)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    half = trial.precision == "fp16"
    scaler = torch.amp.GradScaler("cuda", enabled=half)

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled=half):
            outputs = net(**batch)
        loss = outputs.loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def batches(index: int) -> dict[str, torch.Tensor]:
        return inputs(bench, trial.micro_batch, trial.seq_len)

    return net, optimizer, step, batches
