"""A Lightning module and its Trainer, as their tutorial has them, with validation."""

import argparse

import lightning
import torch
from small_qwen import small_qwen

parser = argparse.ArgumentParser()
parser.add_argument("--len", type=int, default=32)
parser.add_argument("--batch", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--out", default=".")
args = parser.parse_args()


class Causal(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = small_qwen()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch, use_cache=False).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


ids = torch.randint(0, 512, (400, args.len))
loader = torch.utils.data.DataLoader(ids, batch_size=args.batch)
trainer = lightning.Trainer(
    max_steps=100,
    accelerator="auto",
    devices=1,
    accumulate_grad_batches=args.accumulate,
    default_root_dir=args.out,
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Causal(), loader, torch.utils.data.DataLoader(ids[:8], batch_size=2))
