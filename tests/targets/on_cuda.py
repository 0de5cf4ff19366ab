"""Custom targets that name the device "cuda": one as docs/own_script.md writes it, others that cannot be predicted."""

from typing import Any

import torch


def documented(trial: Any, change: Any = lambda loss: loss) -> Any:
    device = torch.device(trial.device.name)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=trial.precision == "fp16")

    def step(batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=trial.precision == "bf16"):
            loss = change(net(batch).square().mean())
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return loss

    return net, optimizer, step, lambda index: torch.randn(4, 64, device=device)


def loads_and_adapts(trial: Any) -> Any:
    """A shuffling loader, and an optimizer that looks at norms."""
    net, _, _, _ = documented(trial)
    optimizer = torch.optim.Adafactor(net.parameters())
    samples = torch.utils.data.TensorDataset(torch.randn(64, 64))
    loader = iter(torch.utils.data.DataLoader(samples, batch_size=4, shuffle=True))

    def step(batch: Any) -> None:
        net(next(loader)[0].to("cuda", non_blocking=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return net, optimizer, step


def asks_for_a_value(trial: Any) -> Any:
    return documented(trial, lambda loss: loss * 2 if loss.item() > 1 else loss)


def selects_by_value(trial: Any) -> Any:
    return documented(trial, lambda loss: torch.stack([loss, loss])[torch.stack([loss, loss]) > 0].sum())


def captures_a_graph(trial: Any) -> Any:
    return documented(trial, lambda loss: torch.cuda.CUDAGraph() and loss)


def unknown_operator(trial: Any) -> Any:
    @torch.library.custom_op("vramsweep_tests::same", mutates_args=())
    def same(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    same.register_autograd(lambda context, grad: grad)
    return documented(trial, same)


def leaks(trial: Any) -> Any:
    """Keeps each step's output, with all that its graph holds, as logging code does that forgets `.item()`."""
    net, optimizer, _, batches = documented(trial)
    kept = []

    def step(batch: Any) -> torch.Tensor:
        hidden = net[0](batch)
        loss = net[2](net[1](hidden)).square().mean()
        kept.append(hidden.detach().repeat(1000, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return net, optimizer, step, batches
