# https://github.com/rasbt/LLMs-from-scratch/tree/main/ch05/10_llm-training-speed (argument: the last step taken)
import sys

import torch
from torch import nn
from torch.nn import functional as F

taken, tokens, width = int(sys.argv[1]), 1024, 768


class Norm(nn.LayerNorm):
    def forward(self, x):
        mean, var = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return self.weight * ((x - mean) / torch.sqrt(var + self.eps)) + self.bias


class Gelu(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        parts = (1, 1, 1) if taken < 7 else (3,)
        self.qkv = nn.ModuleList([nn.Linear(width, part * width, bias=False) for part in parts])
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", None if taken else torch.triu(torch.ones(tokens, tokens), diagonal=1))

    def forward(self, x):
        if taken >= 7:
            q, k, v = self.qkv[0](x).view(*x.shape[:2], 3, 12, 64).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return self.out(y.transpose(1, 2).contiguous().view(x.shape))
        q, k, v = (layer(x).view(*x.shape[:2], 12, 64).transpose(1, 2) for layer in self.qkv)
        mask = torch.triu(torch.ones(tokens, tokens, device=x.device), diagonal=1) if taken else self.mask
        scores = (q @ k.transpose(2, 3)).masked_fill_(mask.bool(), -torch.inf)
        weights = F.dropout(torch.softmax(scores / 64**0.5, dim=-1), 0.1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        norm, gelu = (nn.LayerNorm, nn.GELU("tanh")) if taken >= 6 else (Norm, Gelu())
        self.att, self.norm1, self.norm2 = Attention(), norm(width), norm(width)
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + F.dropout(self.att(self.norm1(x)), 0.1)
        return x + F.dropout(self.ff(self.norm2(x)), 0.1)


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(50257, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(12)])
        self.norm = nn.LayerNorm(width) if taken >= 6 else Norm(width)
        self.head = nn.Linear(width, 50257, bias=False)

    def forward(self, ids):
        x = F.dropout(self.tok(ids) + self.pos(torch.arange(tokens, device=ids.device)), 0.1)
        return self.head(self.norm(self.blocks(x)))


model = Gpt().cuda().to(torch.bfloat16 if taken >= 5 else torch.float32)
opt = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.1, fused=taken >= 3)
for _ in range(8):
    opt.zero_grad()
    ids, labels = (torch.randint(50257, (8, tokens)).cuda() for _ in range(2))
    loss = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    loss.backward()
    opt.step()
    print(f"Reserved memory: {torch.cuda.memory_reserved() / 1024**3:.4f} GB")
