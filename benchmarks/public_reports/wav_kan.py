# https://github.com/Jerry-Master/KAN-benchmarking, times-all-BS100-I1000-O1000.txt: wav-kan-gpu
import math

import torch
from torch import nn
from torch.nn import functional as F


class WaveletLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(outputs, inputs))
        self.translation = nn.Parameter(torch.zeros(outputs, inputs))
        self.weight1 = nn.Parameter(torch.randn(outputs, inputs))
        self.wavelet_weights = nn.Parameter(torch.randn(outputs, inputs))
        self.bn = nn.BatchNorm1d(outputs)

    def forward(self, x):
        expanded = [p.unsqueeze(0).expand(x.size(0), -1, -1) for p in (self.translation, self.scale)]
        x_scaled = (x.unsqueeze(1) - expanded[0]) / expanded[1]
        term1 = (x_scaled**2) - 1
        term2 = torch.exp(-0.5 * x_scaled**2)
        wavelet = (2 / (math.sqrt(3) * math.pi**0.25)) * term1 * term2
        wavelet_weighted = wavelet * self.wavelet_weights.unsqueeze(0).expand_as(wavelet)
        wavelet_output = wavelet_weighted.sum(dim=2)
        base_output = F.linear(x, self.weight1)  # not used, there as here
        assert base_output.shape == wavelet_output.shape
        return self.bn(wavelet_output)


net = nn.Sequential(WaveletLayer(1000, 2000), WaveletLayer(2000, 1)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.0)  # the benchmark has none; without momentum it allocates nothing
for _ in range(11):
    x, y = torch.rand(100, 1000).cuda(), torch.rand(100, 1).cuda()
    loss = torch.mean((net(x) - y) ** 2)
    loss.backward()
    opt.step()
