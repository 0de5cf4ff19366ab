# https://github.com/linkedin/Liger-Kernel/blob/main/benchmark/scripts/benchmark_fused_linear_cross_entropy.py: the
# rows of provider huggingface, of 2024-11-22
import sys

import torch
from torch import nn

tokens, width, vocabulary = int(sys.argv[1]), 4096, 128256


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        logits = self.lin(x)
        return self.loss(logits, y)


head, of_the_other_kernel = Head().cuda(), Head().cuda()  # the benchmark builds both at once
opt = torch.optim.SGD(head.parameters(), lr=0.0)  # the benchmark has none; without momentum it allocates nothing
x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
target = torch.randint(vocabulary, (tokens,), device="cuda")
for _ in range(10):
    head(x, target).backward()
    opt.step()
