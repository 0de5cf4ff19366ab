# https://github.com/leolui2004/tensorcore: pytorch.org/tutorials/recipes/recipes/amp_recipe.html on a T4
import sys

import torch


def make_model():
    layers = [torch.nn.Linear(4096, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 4096), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(4096, 4096)).cuda()


data = [torch.randn(512, 4096, device="cuda") for _ in range(50)]
targets = [torch.randn(512, 4096, device="cuda") for _ in range(50)]
loss_fn = torch.nn.MSELoss().cuda()
for mixed in (False, True)[: 1 + ("mixed" in sys.argv)]:
    net = make_model()
    opt = torch.optim.SGD(net.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)
    torch.cuda.reset_peak_memory_stats()
    for input, target in list(zip(data, targets, strict=True))[: 50 if mixed or "mixed" not in sys.argv else 1]:
        with torch.autocast("cuda", torch.float16, enabled=mixed):
            output = net(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=False)  # the default of torch 1.11
    print("Max memory used by tensors =", torch.cuda.max_memory_allocated(), "bytes")
