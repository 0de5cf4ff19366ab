"""Fine-tune with TRL's SFTTrainer."""

from datasets import Dataset
from tokens import make_model, make_texts, make_tokenizer
from trl import SFTConfig, SFTTrainer

config = SFTConfig(
    output_dir="out", per_device_train_batch_size=4, max_steps=5, report_to="none", save_strategy="no",
    disable_tqdm=True, bf16=False, gradient_checkpointing=False,
)  # fmt: skip
SFTTrainer(
    model=make_model(), args=config, processing_class=make_tokenizer(),
    train_dataset=Dataset.from_dict({"text": make_texts(0, 128)}),
).train()  # fmt: skip
