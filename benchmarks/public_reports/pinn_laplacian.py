# https://github.com/f-dangel/torch-jet, jet/exp/exp01_benchmark_laplacian (hessian_trace): its row has only the forward
import itertools
import sys

import torch
from torch import nn
from torch.func import hessian, vmap

torch.set_default_dtype(torch.float64)
sizes, batch = (50, 768, 768, 512, 512, 1), int(sys.argv[1])
layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]


class Laplacian(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*layers[:-1])

    def forward(self, x):
        return vmap(lambda point: torch.einsum("...ii->...", hessian(self.net)(point)))(x)


net = Laplacian().cuda()
x = torch.rand(batch, 50, device="cuda")
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(8):
    loss = (net(x) + 1).pow(2).mean()
    print(f"{torch.cuda.max_memory_allocated() / 2**30} GiB")
    loss.backward()
    opt.step()
    opt.zero_grad()
