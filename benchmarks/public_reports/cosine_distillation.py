# https://github.com/linkedin/Liger-Kernel/blob/08906d3d/benchmark/scripts/benchmark_distill_cosine_loss.py (torch)
import sys

import torch
from torch import nn
from torch.nn import functional as F

tokens, width, vocabulary = int(sys.argv[1]), 4096, 128256


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Linear(width // 2, vocabulary, bias=False, dtype=torch.bfloat16)
        self.teacher = nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)

    def logits(self, student, teacher, target):
        of_student = self.student(student)
        with torch.no_grad():
            of_teacher = self.teacher(teacher)
        float_student, float_teacher = of_student.float(), of_teacher.float()
        return float_student, float_teacher, F.cross_entropy(float_student, target)

    def forward(self, student, teacher, target):
        a, b, hard = self.logits(student, teacher, target)
        a /= 1.0
        b /= 1.0
        unit_a, unit_b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        return 0.5 * hard + 0.5 * (1 - F.cosine_similarity(unit_a, unit_b, dim=-1)).mean()


heads, of_the_other_kernel = Heads().cuda(), Heads().cuda()  # the benchmark builds both at once
opt = torch.optim.SGD(heads.parameters(), lr=0.0)  # the benchmark has none; without momentum it allocates nothing
kept = torch.rand(tokens, width // 2, device="cuda", dtype=torch.bfloat16)
student, unused = (kept.clone().requires_grad_() for _ in range(2))
teacher = torch.rand(tokens, width, device="cuda", dtype=torch.bfloat16)
target = torch.randint(vocabulary, (tokens,), device="cuda")
for _ in range(10):
    heads(student, teacher, target).backward()
    opt.step()
