"""The small Qwen2 that these scripts train."""

from transformers import Qwen2Config, Qwen2ForCausalLM


def small_qwen() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)
