"""A whole job on one layer of a MiB of weights: load, resume, steps, evaluation, checkpoint; its argument is a folder.

Written so that the bytes of each part can be counted by hand.
"""

import sys
from pathlib import Path

import torch

folder = Path(sys.argv[1])
checkpoint = folder / "checkpoint.pt"
layer = torch.nn.Linear(512, 512, bias=False)  # 1 MiB
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
if checkpoint.exists():
    found = torch.load(checkpoint)
    layer.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    del found
for step in range(12):
    batch = torch.randn(8, 512)
    loss = layer(batch).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 7:
        layer.eval()
        with torch.no_grad():
            scores = layer(torch.randn(2048, 512))  # 4 MiB each
        del scores
        layer.train()
state = {name: value.repeat(8, 1) for name, value in layer.state_dict().items()}  # 8 MiB, as gathered from ranks
torch.save({"model": layer.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
