"""Train with TRL's GRPO. No text ends early, because a prediction takes each as long as allowed."""

from datasets import Dataset
from tokens import make_model, make_texts, make_tokenizer
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **others: object) -> list[float]:
    """Return the rewards of texts: the shorter, the better."""
    return [-float(len(text)) for text in completions]


config = GRPOConfig(
    output_dir="out", per_device_train_batch_size=8, num_generations=4, max_completion_length=64, max_steps=5,
    report_to="none", save_strategy="no", disable_tqdm=True, bf16=False, gradient_checkpointing=False,
    generation_kwargs={"min_new_tokens": 64},
)  # fmt: skip
GRPOTrainer(
    model=make_model(), reward_funcs=reward, args=config, processing_class=make_tokenizer(),
    train_dataset=Dataset.from_dict({"prompt": make_texts(0, 128)}),
).train()  # fmt: skip
