"""Targets whose traces go wrong, each in one way; and one that behaves."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch


def fine(trial: Any) -> Any:
    net = torch.nn.Linear(trial.seq_len, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(batch: Any) -> torch.Tensor:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, optimizer, step, lambda index: torch.ones(trial.micro_batch, trial.seq_len)


def killed_at_48(trial: Any) -> Any:
    if trial.seq_len == 48:
        os.kill(os.getpid(), signal.SIGKILL)
    return fine(trial)


def raises_beyond_4(trial: Any) -> Any:
    if trial.seq_len > 4:
        raise ValueError("too long for me")
    return fine(trial)


def hangs(trial: Any) -> Any:
    time.sleep(3600)
    return fine(trial)


def waits_once(trial: Any) -> Any:
    """The first one to come here leaves its parent's process id in $PIDFILE, and stays."""
    with contextlib.suppress(FileExistsError), Path(os.environ["PIDFILE"]).open("x") as file:
        file.write(str(os.getppid()))
        file.flush()
        time.sleep(3600)
    return fine(trial)


def asks_for_a_value(trial: Any) -> Any:
    net, optimizer, step, batches = fine(trial)
    return net, optimizer, lambda batch: step(batch).item(), batches
