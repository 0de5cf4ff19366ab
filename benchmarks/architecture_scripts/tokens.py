"""A small Qwen2 and its tokenizer, made here, so that nothing is downloaded."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single letters."""
    words = {word: n for n, word in enumerate(["<eos>", "<unk>", "<pad>", "a", "b", "c"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>")


def make_model() -> Qwen2ForCausalLM:
    """Return a model with eager attention, because a CPU's fused kernel keeps other tensors."""
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, attn_implementation="eager",
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_texts(seed: int, words: int) -> list[str]:
    """Return 64 texts of so many words."""
    chosen = random.Random(seed)
    return [" ".join(chosen.choices("abc", k=words)) for _ in range(64)]
