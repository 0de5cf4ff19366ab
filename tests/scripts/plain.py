"""A training script as people write them: a plain loop over a small Qwen2."""

import argparse

import torch
from small_qwen import small_qwen

parser = argparse.ArgumentParser()
parser.add_argument("--max_len", type=int, default=32)
parser.add_argument("--bs", type=int, default=2)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--zero-grad-first", action="store_true")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = small_qwen().to(device)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(args.steps):
    ids = torch.randint(0, 512, (args.bs, args.max_len), device=device)
    if args.zero_grad_first:
        optimizer.zero_grad()
    with torch.autocast(device, torch.bfloat16, enabled=args.bf16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    if not args.zero_grad_first:
        optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.3f}")
