"""AdamW and Lion of bitsandbytes: 32-bit or 8-bit state, paged or not, as TrainingArguments has them (optim).

The stand-in has the state that bitsandbytes/optim/optimizer.py makes since 0.44: one value a parameter and moment, in
8 bits beside an fp32 maximum for each block of 256, but in fp32 for tensors of less than 4,096 elements (`init_state`);
the tables that 8 bits stand for are there once (`fill_qmap`). A kernel updates a parameter in place, without temporary
tensors (`optimizer_update_8bit_blockwise`, `optimizer_update_32bit`).

Paged state of tensors from 100,000 elements on (`get_state_buffer`) is CUDA's managed memory: outside the allocator of
torch and counted by none of its statistics, while the driver, and so NVML, sees the pages that are on the card at the
moment. The trace takes it for host memory.

The Trainer alone asks for 32-bit state of every embedding (transformers/trainer.py, `create_optimizer`); where output
weights are tied to them that is their state too.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.techniques import kernel_stubs
from vramsweep.runners.trace import fake_placement

BLOCK = 256
LEAST_8_BIT = 4096  # elements
LEAST_PAGED = 100_000  # elements
TABLE = 256  # entries, one for each of the values that 8 bits can have


class Standin(kernel_stubs.Optimizer):
    """State of `moments` values a parameter; `optim_bits` and `is_paged` as bitsandbytes takes them."""

    moments = 0

    def __init__(self, params: Any, lr: float = 1e-5, optim_bits: int = 32, is_paged: bool = False) -> None:
        super().__init__(params, lr)
        self.bits, self.is_paged = optim_bits, is_paged
        self.stands_for = model_description.label(type(self).__name__, optim_bits, is_paged)
        self.tables: list[torch.Tensor] = []

    def new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        numbers = range(1, self.moments + 1)
        quantized = self.bits == 8 and p.numel() >= LEAST_8_BIT and not getattr(p, "keeps_32_bits", False)
        if quantized and not self.tables:
            self.tables = [torch.empty(TABLE, device=p.device) for _ in numbers]
        paged = self.is_paged and p.numel() >= LEAST_PAGED
        dtype, device = torch.uint8 if quantized else torch.float32, fake_placement.HOST if paged else p.device
        with fake_placement.on_host():
            state = {f"state{n}": torch.zeros_like(p, dtype=dtype, device=device) for n in numbers}
        if quantized:
            blocks = -(-p.numel() // BLOCK)
            state |= {f"absmax{n}": torch.zeros(blocks, device=p.device) for n in numbers}
            state |= {f"qmap{n}": self.tables[n - 1] for n in numbers}
        return state


class AdamW(Standin):
    """Two moments."""

    moments = 2


class Lion(Standin):
    """One moment."""

    moments = 1


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and what TrainingArguments' name tells it."""
    standin_of = Lion if "lion" in trial.optimizer else AdamW
    given = {
        "lr": 1e-5,
        "optim_bits": 8 if "8bit" in trial.optimizer else 32,
        "is_paged": trial.optimizer.startswith("paged"),
    }
    if trial.device.name == "simulated":
        return standin_of, given
    import bitsandbytes  # not in templates: what it asks of CUDA must not be asked before they fork

    return getattr(bitsandbytes.optim, standin_of.__name__), given


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """The model; for a simulated Trainer its embeddings are marked, as the real one asks for 32-bit state of theirs."""
    if trial.runner.name == "trainer" and trial.device.name == "simulated":
        for module in net.modules():
            if isinstance(module, torch.nn.Embedding):
                cast(Any, module.weight).keeps_32_bits = True
    return net
