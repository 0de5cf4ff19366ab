# https://docs.lightly.ai/self-supervised-learning/getting_started/benchmarks.html: SimCLR on CIFAR-10
import sys

import torch
from torch import nn
from torch.nn import functional as F

batch = int(sys.argv[1])


def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride)
        self.conv2, self.bn2 = conv(outputs, outputs, 3)
        self.shortcut = nn.Sequential(*conv(inputs, outputs, 1, stride) if stride > 1 else [])

    def forward(self, x):
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return F.relu(out)


def stage(inputs, outputs, stride):
    return Block(inputs, outputs, stride), Block(outputs, outputs, 1)


stages = *stage(64, 64, 1), *stage(64, 128, 2), *stage(128, 256, 2), *stage(256, 512, 2)
hidden = nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()
head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), *hidden, nn.Linear(512, 128, bias=False), nn.BatchNorm1d(128)
net = nn.Sequential(*conv(3, 64, 3), *stages, *head).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
of_the_knn = torch.empty(512, 50_000, device="cuda")  # the evaluation between epochs keeps its features
mask = ~torch.eye(batch, device="cuda", dtype=torch.bool)
for _ in range(8):
    views = [torch.randn(batch, 3, 32, 32).cuda() for _ in range(2)]
    a, b = (F.normalize(z, dim=1) for z in [net(view) for view in views])
    aa, ab, ba, bb = (torch.einsum("nc,mc->nm", x, y) / 0.5 for x, y in ((a, a), (a, b), (b, a), (b, b)))
    aa, bb = aa[mask].view(batch, -1), bb[mask].view(batch, -1)
    logits = torch.cat([torch.cat([ab, aa], dim=1), torch.cat([ba, bb], dim=1)])
    loss = F.cross_entropy(logits, torch.arange(batch, device="cuda").repeat(2))
    opt.zero_grad()
    loss.backward()
    opt.step()
