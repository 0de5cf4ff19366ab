"""A loop with accelerate."""

import torch
from accelerate import Accelerator
from small_qwen import small_qwen
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = small_qwen()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
samples = [{"input_ids": torch.randint(0, 512, (48,))} for _ in range(400)]
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=2))
for batch in loader:
    loss = model(**batch, labels=batch["input_ids"], use_cache=False).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
