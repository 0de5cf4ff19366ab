"""A script in the manner of transformers' run_clm.py: HfArgumentParser, a tokenised data set, Trainer."""

from dataclasses import dataclass, field

import torch
from small_qwen import small_qwen
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DataArguments:
    block_size: int = field(default=32, metadata={"help": "tokens of a sample"})
    samples: int = field(default=64)


class Blocks(torch.utils.data.Dataset):
    """Token ids, as a tokenised corpus cut into blocks has them."""

    def __init__(self, count: int, size: int) -> None:
        self.blocks = [torch.randint(0, 512, (size,)) for _ in range(count)]

    def __len__(self) -> int:
        return 100 * len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        block = self.blocks[index % len(self.blocks)]
        return {"input_ids": block, "labels": block}


data, training = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
set_seed(training.seed)
model = small_qwen()
trainer = Trainer(
    model=model,
    args=training,
    train_dataset=Blocks(data.samples, data.block_size),
    eval_dataset=None if training.eval_strategy == "no" else Blocks(1, data.block_size),
)
trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
trainer.save_model()
