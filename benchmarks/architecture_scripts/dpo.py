"""Train with TRL's DPO."""

from datasets import Dataset
from tokens import make_model, make_texts, make_tokenizer
from trl import DPOConfig, DPOTrainer

config = DPOConfig(
    output_dir="out", per_device_train_batch_size=4, max_steps=5, report_to="none", save_strategy="no",
    disable_tqdm=True, bf16=False, gradient_checkpointing=False,
)  # fmt: skip
DPOTrainer(
    model=make_model(), ref_model=make_model(), args=config, processing_class=make_tokenizer(),
    train_dataset=Dataset.from_dict({
        "prompt": make_texts(0, 64), "chosen": make_texts(1, 64), "rejected": make_texts(2, 64),
    }),
).train()  # fmt: skip
