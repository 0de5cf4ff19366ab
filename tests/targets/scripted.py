"""The trainings of tests/scripts as custom targets, to be measured by our own runner."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen2Config, Qwen2ForCausalLM

from vramsweep.harness.spec.trial import Trial


def _net() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).train()


def plain(trial: Trial) -> tuple[Any, Any, Callable[[Any], None], Callable[[int], Any]]:
    """plain.py; ddp.py where there are several ranks."""
    net = _net()
    if trial.world_size > 1:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    ids = loss = None  # a script's live on until the next ones

    def step(batch: Any) -> None:
        nonlocal ids, loss
        for _ in range(trial.grad_accum):
            ids = torch.randint(0, 512, (trial.micro_batch, trial.seq_len))
            loss = net(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return net, optimizer, step, lambda index: None
