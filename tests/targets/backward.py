"""A small MLP whose gradients come about in several ways, none of them `loss.backward()`; and one with an operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import grad  # by name: whoever replaces torch.autograd.grad later does not reach this one

BATCH, INPUTS, HIDDEN, OUTPUTS = 8, 16, 32, 4


@torch.library.custom_op("vramsweep_tests::twice_product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A matrix product that only says so in its name."""
    return 2 * (a @ b)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = ctx.saved_tensors
    return 2 * gradient @ b.T, 2 * a.T @ gradient


product.register_autograd(_gradients, setup_context=_keep)


def _made(step: Callable[[list[torch.nn.Parameter], torch.Tensor], torch.Tensor]) -> Any:
    torch.manual_seed(0)
    net = torch.nn.ParameterList([torch.randn(INPUTS, HIDDEN) / 4, torch.randn(HIDDEN, OUTPUTS) / 4])
    weights = list(net)
    optimizer = torch.optim.SGD(weights, lr=0.01)
    return net, optimizer, lambda batch: step(weights, batch), lambda index: torch.ones(BATCH, INPUTS)


def _loss(weights: list[torch.nn.Parameter], batch: torch.Tensor, multiply: Any = torch.matmul) -> torch.Tensor:
    return multiply(torch.relu(multiply(batch, weights[0])), weights[1]).square().mean()


def _update(weights: list[torch.nn.Parameter], gradients: Any) -> None:
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.01 * gradient


def backward(trial: Any) -> Any:
    def step(weights: list[torch.nn.Parameter], batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(weights, batch)
        loss.backward()
        _update(weights, [weight.grad for weight in weights])
        for weight in weights:
            weight.grad = None
        return loss

    return _made(step)


def by_grad(trial: Any) -> Any:
    def step(weights: list[torch.nn.Parameter], batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(weights, batch)
        _update(weights, grad(loss, weights))
        return loss

    return _made(step)


def by_hand(trial: Any) -> Any:
    @torch.no_grad()
    def step(weights: list[torch.nn.Parameter], batch: torch.Tensor) -> torch.Tensor:
        first, second = weights
        before = batch @ first
        hidden = torch.relu(before)
        out = hidden @ second
        of_out = 2 * out / out.numel()
        of_hidden = of_out @ second.T * (before > 0)
        _update(weights, [batch.T @ of_hidden, hidden.T @ of_out])
        return out.square().mean()

    return _made(step)


def by_operator(trial: Any) -> Any:
    def step(weights: list[torch.nn.Parameter], batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(weights, batch, product)
        _update(weights, grad(loss, weights))
        return loss

    return _made(step)


def multiplying_update(trial: Any) -> Any:
    """An optimizer that multiplies matrices, as Muon's does: neither forward nor backward."""

    def step(weights: list[torch.nn.Parameter], batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(weights, batch)
        _update(weights, [g @ (g.T @ g) for g in grad(loss, weights)])
        return loss

    return _made(step)


def operator_in_the_update(trial: Any) -> Any:
    def step(weights: list[torch.nn.Parameter], batch: torch.Tensor) -> torch.Tensor:
        loss = _loss(weights, batch)
        _update(weights, [product(g, torch.eye(g.shape[1])) for g in grad(loss, weights)])
        return loss

    return _made(step)
