"""Interface of the shardings: one module per library that divides a model (harness/spec/runner_table.py names them).

A module has only those of these functions that its library needs:

- `sharded(trial, device)`: for the plain loop, (the model with this rank's part on the device, the library's arguments,
  `model_description.counts` of the whole model);
- `arguments(trial)`: TrainingArguments with which the Trainer divides the model that it is given. They override the
  user's options, so the module merges those in;
- `place(trial, device)`: the device on which the Trainer's user makes the model, if it is another;
- `agreed(trial, arguments)`: raises InvalidTrial for TrainingArguments that contradict themselves or would be ignored;
- `fitting(trial, net, arguments)`: raises if the model was not made as the trial says, or if model or TrainingArguments
  (None in loops other than the Trainer's) do not allow what the trial needs;
- `checked(trial, net)`: raises InvalidTrial unless the model that trains is divided as the trial says;
- `told(net)`: after `checked`, columns about the model that trains, which add to or replace those of every run;
- `skipped(net)`: the number of updates skipped so far because of an overflow;
- `on_cpu(trial)`: a context manager in which the library works on a CPU, and on fake tensors, which are on the CPU;
- `traced(trial)`: a context manager in which the library takes fake tensors for CUDA's.

Neither context manager is entered on a GPU: there the library runs as it is.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.rank.entry_modules import import_entry


def hook(trial: Trial, name: str) -> Any:
    """Return the function of this name in the module of the trial's sharding, or None if it has none."""
    module = runner_table.sharding(trial.sharding).module
    return None if module is None else getattr(import_entry(module), name, None)


def call(trial: Trial, name: str, *given: Any) -> None:
    """Call the function of this name, if there is one, with the trial and the given arguments."""
    found = hook(trial, name)
    if found is not None:
        found(trial, *given)


def host(trial: Trial) -> torch.device:
    """Return the device of host memory: meta in a simulated run, because its fake CPU tensors stand for GPU memory."""
    return torch.device("meta" if trial.device.name == "simulated" else "cpu")


@contextlib.contextmanager
def without_card(trial: Trial) -> Iterator[None]:
    """Enter, around the whole run, what the sharding's library needs on a CPU or fake tensors; nothing on a GPU."""
    names = {"cuda": (), "cpu": ("on_cpu",), "simulated": ("on_cpu", "traced")}[trial.device.name]
    with contextlib.ExitStack() as stack:
        for found in filter(None, (hook(trial, name) for name in names)):
            stack.enter_context(found(trial))
        yield
