# https://github.com/Jerry-Master/KAN-benchmarking, times-all-BS100-I1000-O1000.txt: fourierkan-gpu
import torch
from torch import nn


class FourierLayer(nn.Module):
    def __init__(self, inputs, outputs, grid=5):
        super().__init__()
        self.inputs, self.grid = inputs, grid
        self.coefficients = nn.Parameter(torch.randn(2, outputs, inputs, grid) / (inputs * grid) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(1, outputs))

    def forward(self, x):
        k = torch.arange(1, self.grid + 1, device=x.device).reshape(1, 1, 1, self.grid)
        x = x.reshape(x.shape[0], 1, self.inputs, 1)
        c, s = torch.cos(k * x), torch.sin(k * x)
        y = torch.sum(c * self.coefficients[0:1], (-2, -1))
        y += torch.sum(s * self.coefficients[1:2], (-2, -1))
        y += self.bias
        return y


net = nn.Sequential(FourierLayer(1000, 1000), FourierLayer(1000, 1)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.0)  # the benchmark has none; without momentum it allocates nothing
inputs = torch.rand(1000, 1000) * 2 - 1
labels = torch.exp(torch.sin(torch.pi * inputs[:, [0]]) + inputs[:, [1]] ** 2)
for _ in range(11):
    chosen = torch.randperm(1000)[:100]
    x, y = inputs[chosen].cuda(), labels[chosen].cuda()
    loss = torch.mean((net(x) - y) ** 2)
    loss.backward()
    opt.step()
