"""Supervised fine-tuning with TRL: texts of many lengths, padded to the longest of each batch."""

import argparse
import random

from datasets import Dataset
from small_qwen import small_qwen
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--batch", type=int, default=2)
args = parser.parse_args()

words = {word: n for n, word in enumerate(["<eos>", "<unk>", "<pad>", "a", "b", "c"])}
plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
plain.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>")
random.seed(0)
texts = [" ".join(random.choices("abc", k=random.randint(8, 60))) for _ in range(64)]
config = SFTConfig(
    output_dir=args.out,
    per_device_train_batch_size=args.batch,
    max_steps=30,
    bf16=False,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    gradient_checkpointing=False,
)
trainer = SFTTrainer(
    model=small_qwen(), args=config, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
)
trainer.train()
