"""Targets of the custom runner for same_rows.py: one trains, the others fail, each in one way.

They import nothing of the project: a trial's id has a target's contents, so these must not change with a rearrangement.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch

Built = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[torch.Tensor], torch.Tensor], Callable[[int], Any]]


def trains(trial: Any) -> Built:
    """Build a linear layer of `seq_len` inputs, with batches of ones of shape (micro_batch, seq_len)."""
    torch.manual_seed(0)
    device = torch.device("cuda" if trial.device.name == "simulated" else trial.device.name)
    net = torch.nn.Linear(trial.seq_len, 8).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, optimizer, step, lambda index: torch.ones(trial.micro_batch, trial.seq_len, device=device)


def takes_its_time(trial: Any) -> Built:
    """Build the same with steps of 0.3 s, so that a sweep of these can be killed in its middle."""
    net, optimizer, step, batches = trains(trial)

    def slow(batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return step(batch)

    return net, optimizer, slow, batches


def raises(trial: Any) -> Built:
    """Raise an exception: crash."""
    raise ValueError("this target is broken")


def runs_out(trial: Any) -> Built:
    """Raise what torch raises where a GPU has no room: oom."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def runs_out_of_host_memory(trial: Any) -> Built:
    """Ask the host for a petabyte: host_oom."""
    torch.empty(1 << 50, dtype=torch.uint8)
    return trains(trial)


def is_killed(trial: Any) -> Built:
    """Kill the worker: crash, with the signal's name."""
    os.kill(os.getpid(), signal.SIGKILL)
    return trains(trial)


def aborts(trial: Any) -> Built:
    """End the worker as C++ does: crash."""
    os.abort()


def exits(trial: Any) -> Built:
    """End without a result: bad_result."""
    os._exit(0)


def hangs(trial: Any) -> Built:
    """Sleep for longer than any deadline: timeout."""
    time.sleep(3600)
    return trains(trial)


def returns_nothing(trial: Any) -> None:
    """Return no model: the contract of targets is broken."""
