# https://github.com/chuanyangjin/fast-DiT: DiT-XL/2, 256x256, batch 128, fp16, recomputed, features extracted before
import copy
import math

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

width, heads, patches, classes = 1152, 16, 256, 1000


def modulate(x, shift, scale):
    return F.layer_norm(x, (width,), eps=1e-6) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def attend(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attend(modulate(x, shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(x, shift2, scale2))


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(4, width, 2, 2)
        self.pos = nn.Parameter(torch.zeros(1, patches, width), requires_grad=False)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.label, self.blocks = nn.Embedding(classes + 1, width), nn.ModuleList([Block() for _ in range(28)])
        self.modulation, self.out = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width)), nn.Linear(width, 32)

    def forward(self, x, t, y):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        args = t[:, None].float() * torch.exp(-math.log(10000) * torch.arange(128, device=t.device) / 128)[None]
        drop = torch.rand(len(y), device=y.device) < 0.1
        c = self.time(torch.cat([torch.cos(args), torch.sin(args)], dim=-1)) + self.label(torch.where(drop, classes, y))
        for block in self.blocks:
            x = checkpoint(block, x, c, use_reentrant=True)
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = self.out(modulate(x, shift, scale))
        return torch.einsum("nhwpqc->nchpwq", x.reshape(len(x), 16, 16, 2, 2, 8)).reshape(len(x), 8, 32, 32)


accelerator = Accelerator(mixed_precision="fp16")
net = DiT().to(accelerator.device)
ema = copy.deepcopy(net).requires_grad_(False)
vae = torch.empty(83_653_863, device="cuda")  # loaded, although its features were extracted before
net, opt = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0))
for _ in range(8):
    x, y = torch.randn(128, 4, 32, 32).cuda(), torch.randint(classes, (128,)).cuda()
    noise, t = torch.randn_like(x), torch.randint(1000, (128,), device=x.device)
    signal = torch.rand(128, 1, 1, 1, device=x.device)
    mean, spread = net(signal.sqrt() * x + (1 - signal).sqrt() * noise, t, y).chunk(2, dim=1)
    loss = ((noise - mean) ** 2 + torch.exp(spread) * (noise - mean.detach()) ** 2).mean()
    opt.zero_grad()
    accelerator.backward(loss)
    opt.step()
    with torch.no_grad():
        for kept, new in zip(ema.parameters(), net.parameters(), strict=True):
            kept.mul_(0.9999).add_(new.data, alpha=1 - 0.9999)
