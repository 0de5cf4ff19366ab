"""How ranks divide a model, a module for each way (harness/spec/runner_table.py names the module of each sharding).

A module has the functions that its way needs, and no others:

- `sharded(trial, device)`: (the model with this rank's part on the device, what the library was told,
  `model_description.counts` of the whole model), for the plain loop;
- `arguments(trial)`: TrainingArguments with which the Trainer divides the model that it is given; what the user's
  options say is merged in, as these win over them;
- `place(trial, device)`: where the Trainer's user makes the model, if that is not the device;
- `agreed(trial, arguments)`: raises InvalidTrial for TrainingArguments that contradict themselves or would be ignored;
- `fitting(trial, net, arguments)`: raises where the model was not made as the trial says, or model or TrainingArguments
  (None in other loops than the Trainer's) do not allow what is asked;
- `checked(trial, net)`: raises InvalidTrial unless the model that trains is divided as the trial says;
- `told(net)`: columns about the model that trains, after `checked`, beside or in place of those of every run;
- `skipped(net)`: how many updates it has skipped so far for an overflow;
- `on_cpu(trial)`: a context manager in which the library works on a CPU, and on fake tensors, which are there;
- `traced(trial)`: a context manager in which the library believes to run on CUDA, where everything is fake.

Of these two nothing is entered on a card: there the library runs as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.rank.entry_modules import import_entry


def hook(trial: Trial, name: str) -> Any:
    """The function of this name in the module of the trial's sharding; None where it has none."""
    module = runner_table.sharding(trial.sharding).module
    return None if module is None else getattr(import_entry(module), name, None)


def call(trial: Trial, name: str, *given: Any) -> None:
    """Call the function of this name with the trial and these, where there is one."""
    found = hook(trial, name)
    if found is not None:
        found(trial, *given)


def host(trial: Trial) -> torch.device:
    """Where host memory is: in a simulated run device meta, as all fake tensors on the CPU stand for GPU memory."""
    return torch.device("meta" if trial.device.name == "simulated" else "cpu")


@contextlib.contextmanager
def without_card(trial: Trial) -> Iterator[None]:
    """Around the whole run: what the sharding's library needs on a CPU, or on fake tensors; nothing on a card."""
    names = {"cuda": (), "cpu": ("on_cpu",), "simulated": ("on_cpu", "traced")}[trial.device.name]
    with contextlib.ExitStack() as stack:
        for found in filter(None, (hook(trial, name) for name in names)):
            stack.enter_context(found(trial))
        yield
