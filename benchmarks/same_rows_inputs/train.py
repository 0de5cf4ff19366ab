"""A training script as people write them, for same_rows.py: a plain loop over a small Qwen2."""

import argparse

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--max_len", type=int, default=32)
parser.add_argument("--bs", type=int, default=2)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--fail", action="store_true")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
model = Qwen2ForCausalLM(config).to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(50):
    ids = torch.randint(0, 512, (args.bs, args.max_len), device=device)
    with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if args.fail and step == 2:
        raise ValueError("bad data in line 3")
