"""DistributedDataParallel with two passes a step, under torchrun; rank 1 may go wrong in its third step."""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from small_qwen import small_qwen
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--max_len", type=int, default=32)
parser.add_argument("--fault", default="none")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(small_qwen())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(50):
    for _ in range(2):
        ids = torch.randint(0, 512, (2, args.max_len))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and rank == 1:
        if args.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if args.fault == "raise":
            raise ValueError("rank one has bad data")
        if args.fault == "exit":
            os._exit(0)
dist.destroy_process_group()
