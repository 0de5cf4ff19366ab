"""AdamW and Lion of bitsandbytes: 32-bit or 8-bit state, paged or not, as TrainingArguments has them (optim).

The stand-in has the state that bitsandbytes/optim/optimizer.py makes since 0.44: one value per parameter and moment. In
8 bits there is also an fp32 maximum for each block of 256; tensors of less than 4,096 elements stay in fp32
(`init_state`). The tables of the 8-bit values exist once (`fill_qmap`). A kernel updates a parameter in place, without
temporary tensors (`optimizer_update_8bit_blockwise`, `optimizer_update_32bit`).

Paged state of tensors from 100,000 elements on (`get_state_buffer`) is CUDA's managed memory, outside torch's allocator
and its statistics. The driver, and so NVML, sees the pages that are on the GPU at the moment. The trace counts it as
host memory.

Only the Trainer asks for 32-bit state of every embedding (transformers/trainer.py, `create_optimizer`). Output weights
that are tied to an embedding share that state.
"""

from typing import Any, cast

import torch

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.techniques import kernel_stubs
from vramsweep.runners.trace import fake_placement

BLOCK = 256
LEAST_8_BIT = 4096  # elements
LEAST_PAGED = 100_000  # elements
TABLE = 256  # entries, one for each 8-bit value


class Standin(kernel_stubs.Optimizer):
    """State of `moments` values per parameter; `optim_bits` and `is_paged` as bitsandbytes takes them."""

    moments = 0

    def __init__(self, params: Any, lr: float = 1e-5, optim_bits: int = 32, is_paged: bool = False) -> None:
        super().__init__(params, lr)
        self.bits, self.is_paged = optim_bits, is_paged
        self.stands_for = model_description.label(type(self).__name__, optim_bits, is_paged)
        self.tables: list[torch.Tensor] = []

    def new_state(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the moments, paged or not; large parameters with 8 bits also get scales, and share the tables."""
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
    """Stand-in for AdamW, with two moments."""

    moments = 2


class Lion(Standin):
    """Stand-in for Lion, with one moment."""

    moments = 1


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class and the arguments that TrainingArguments' name of the optimizer implies."""
    standin_of = Lion if "lion" in trial.optimizer else AdamW
    bits = 8 if "8bit" in trial.optimizer else 32
    given = {"lr": 1e-5, "optim_bits": bits, "is_paged": trial.optimizer.startswith("paged")}
    if trial.device.name == "simulated":
        return standin_of, given
    import bitsandbytes  # not in fork servers, because it queries CUDA, which they must not do before they fork

    return getattr(bitsandbytes.optim, standin_of.__name__), given


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model; mark a simulated Trainer's embeddings, because the real one asks for their state in 32 bits."""
    if trial.runner.name == "trainer" and trial.device.name == "simulated":
        for module in net.modules():
            if isinstance(module, torch.nn.Embedding):
                cast(Any, module.weight).keeps_32_bits = True
    return net
