# https://github.com/linkedin/Liger-Kernel/blob/78125679/benchmark/scripts/benchmark_grpo_loss.py (torch, token)
import sys

import torch
from torch import nn
from torch.nn import functional as F

batch, tokens, width, vocabulary = int(sys.argv[1]), 1024, 4096, 128256


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy, self.ref = (nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x, ref_x, chosen, mask, advantages):
        logits = self.policy(x)
        log_probs = F.log_softmax(logits.float(), dim=-1)
        logps = log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            ref_logits = self.ref(ref_x)
            ref_log_probs = F.log_softmax(ref_logits.float(), dim=-1)
            ref_logps = ref_log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(logps - logps.detach())
        gains = advantages.unsqueeze(1)
        loss = -torch.min(ratio * gains, torch.clamp(ratio, 0.8, 1.2) * gains)
        loss = loss + 0.1 * (torch.exp(ref_logps - logps) - (ref_logps - logps) - 1.0)
        return (loss * mask).sum() / mask.sum()


heads, of_the_other_kernel = Heads().cuda(), Heads().cuda()  # the benchmark builds both at once
opt = torch.optim.SGD(heads.parameters(), lr=0.0)  # the benchmark has none; without momentum it allocates nothing
x, ref_x = (torch.randn(batch, tokens, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
x.requires_grad_()
chosen, mask = torch.randint(vocabulary, (batch, tokens), device="cuda"), torch.ones(batch, tokens, device="cuda")
advantages = torch.randn(batch, device="cuda", dtype=torch.bfloat16)
for _ in range(10):
    heads(x, ref_x, chosen, mask, advantages).backward()
    opt.step()
