"""A loop with accelerate."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Qwen2Config, Qwen2ForCausalLM

accelerator = Accelerator(cpu=True)
config = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
model = Qwen2ForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
samples = [{"input_ids": torch.randint(0, 512, (48,))} for _ in range(400)]
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=2))
for batch in loader:
    loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
