# https://github.com/linkedin/Liger-Kernel/blob/1faa0131/benchmark/scripts/benchmark_fused_moe.py (huggingface, full)
import sys

import torch
from torch import nn
from torch.nn import functional as F

tokens, experts, width, inner, taken = int(sys.argv[1]), int(sys.argv[2]), 2048, 768, 8


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, width, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.randn(experts, width, inner, dtype=torch.bfloat16))

    def forward(self, x, gate_up, down, index, weights):
        final = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(index.long(), num_classes=experts).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for (expert,) in hit:
            position, token = torch.where(mask[expert])
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, down[expert]) * weights[token, position, None]
            final.index_add_(0, token, out.to(final.dtype))
        return final


net = Experts().cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.0)  # the benchmark has none; without momentum it allocates nothing
x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
logits = torch.randn(tokens, experts, device="cuda")
index = torch.topk(logits, taken, dim=-1).indices.to(torch.int32)
weights = torch.softmax(torch.gather(logits, 1, index.long()), dim=-1).to(torch.bfloat16).requires_grad_()
gate_up, down = net.gate_up * 0.02, net.down * 0.02  # once, as there: each backward pass retains the graph
for _ in range(10):
    y = net(x, gate_up, down, index, weights)
    y.backward(torch.randn_like(y), retain_graph=True)
    del y
    opt.step()
