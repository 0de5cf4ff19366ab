"""A small training that goes wrong in its third step, in the way that its argument names."""

import os
import signal
import sys
import time

import torch

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is free."
    " Of the allocated memory 70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)

fault, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 50
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if fault == "own_hook":
    sys.excepthook = lambda *told: sys.stderr.write("my own hook\n")
if fault == "never":
    for _ in range(steps):
        model(torch.randn(8, 64)).sum().backward()
    sys.exit()
for step in range(steps):
    loss = model(torch.randn(8, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step != 2:
        continue
    match fault:
        case "raise" | "own_hook":
            raise ValueError("bad data in line 3")
        case "oom":
            raise torch.OutOfMemoryError(FULL)
        case "exit3":
            os._exit(3)
        case "exit0":
            os._exit(0)
        case "decide":
            if not loss.item() < float("inf"):
                sys.exit(1)
        case "text":
            sys.exit("no such file: data.txt")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            time.sleep(1000)
        case "allocator":
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        case "fork":
            if os.fork() == 0:
                time.sleep(1000)
if fault == "late":
    raise ValueError("saving failed")
