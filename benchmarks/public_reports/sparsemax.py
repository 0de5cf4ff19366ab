# https://github.com/linkedin/Liger-Kernel/blob/e71b1e43/benchmark/scripts/benchmark_sparsemax.py (torch)
import sys

import torch
from torch import nn


class Sparsemax(nn.Module):
    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(4 * 512, int(sys.argv[1])))

    def forward(self):
        ordered, _ = torch.sort(self.scores, dim=-1, descending=True)
        total = torch.cumsum(ordered, dim=-1)
        rank = torch.arange(1, ordered.size(-1) + 1, device=ordered.device, dtype=ordered.dtype).view(1, -1)
        bound = 1 + rank * ordered
        support = bound > total
        k = support.sum(dim=-1, keepdim=True).clamp(min=1)
        tau = ((ordered * support).sum(dim=-1, keepdim=True) - 1) / k
        return torch.clamp(self.scores - tau, min=0)


net = Sparsemax().cuda()
gradient = torch.randn_like(net.scores)
opt = torch.optim.SGD(net.parameters(), lr=0.0)  # the benchmark has none; without momentum it allocates nothing
for _ in range(10):
    y = net()
    y.backward(gradient)
    del y
    opt.step()
