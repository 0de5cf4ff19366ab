"""A plain loop that decides by value: samples of many lengths, padded, of which only some tokens count."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=4000)
parser.add_argument("--said", type=Path)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = [torch.randint(1, 100, (int(n),)) for n in torch.randint(8, 400, (args.samples,))]
loader = torch.utils.data.DataLoader(
    data,
    4,
    shuffle=True,
    generator=torch.Generator().manual_seed(1),  # that making weights does not draw from
    collate_fn=lambda rows: pad_sequence(rows, batch_first=True),
)
embed, head = nn.Embedding(100, 256), nn.Linear(256, 100)
net = nn.Sequential(embed, *(nn.Linear(256, 256) for _ in range(8)), head).to(torch.bfloat16).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
said = []
for step, ids in enumerate(loader):
    ids = ids.to(net[0].weight.device, non_blocking=True)
    mask = ids != 0
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    last = (mask * positions).max(dim=-1).values
    labels = ids.clone()
    labels[ids < 50] = -100
    counted = (labels != -100).nonzero()
    hidden = net[:-1](ids)[mask]  # as many rows as there are tokens
    scores = net[-1](hidden)
    loss = nn.functional.cross_entropy(scores.float(), labels[mask])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    said.append([step, *ids.shape, mask.sum().item(), *last.tolist(), *counted.shape, *scores.shape, bool(mask.all())])
    if args.said:
        args.said.write_text(repr(said))
    if step == 30:
        sys.exit()
