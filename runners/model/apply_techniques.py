"""Application of a trial's techniques, alike for all runners; harness/spec/techniques names the module of each.

A module has only the functions that its technique needs:

- `around(trial, device)`: a context manager in which everything happens, from building to the last step;
- `construct(trial, make, device, dtype)`: the bare model, instead of `make(dtype)`, which builds it on the device
  in effect;
- `pretrained(trial, device)`: arguments of `from_pretrained`, instead of the dtype and of moving it to the device;
- `model(trial, net, device)`: the built model, changed or wrapped, before ranks share it;
- `optimizer(trial, device)`: (class, keyword arguments), as TrainingArguments' users know it;
- `stepping(trial, make, parameters)`: the object that steps in the plain loop, instead of the optimizer
  `make(parameters)`.

On a simulated device a module needs no optional package: a stand-in allocates what the library's kernels do
(kernel_stubs.py).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from vramsweep.harness.spec.runner_table import USER_CODE
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.rank.entry_modules import import_entry

Make = Callable[[torch.dtype], Any]


def hooks(trial: Trial, name: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions of this name in the modules of the trial's techniques, once a module, in the axes' order."""
    for module in _modules(trial):
        found = getattr(import_entry(module), name, None)
        if found is not None:
            yield found


def _modules(trial: Trial) -> list[str]:
    return list(dict.fromkeys(entry.module for entry in catalog.chosen_techniques(trial) if entry.module))


def imported(trial: Trial) -> None:
    """Import what the techniques need before anything is traced or made on a device. Modules keep tensors of their own
    (bitsandbytes' tables, 64 bytes each), which would count as the trial's if they were imported later.

    A module that lacks its package is skipped; the trial itself reports it.
    """
    for module in () if trial.runner.name in USER_CODE else _modules(trial):
        with contextlib.suppress(ImportError):
            import_entry(module)


@contextlib.contextmanager
def around(trial: Trial, device: torch.device) -> Iterator[None]:
    """Enter every technique's `around`. Raises InvalidTrial if the GPU lacks the compute capability one needs."""
    if trial.runner.name in USER_CODE:
        yield
        return
    for entry in catalog.chosen_techniques(trial) if device.type == "cuda" else ():
        if entry.capability is not None and (has := torch.cuda.get_device_capability(device)) < entry.capability:
            needed, found = (".".join(map(str, c)) for c in (entry.capability, has))
            raise InvalidTrial(f"{entry} needs compute capability {needed}, and this GPU has {found}")
    with contextlib.ExitStack() as stack:
        for hook in hooks(trial, "around"):
            stack.enter_context(hook(trial, device))
        yield


def construct(trial: Trial, make: Make, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the bare model: `make`'s, or that of the technique that builds it another way."""
    for hook in hooks(trial, "construct"):
        return hook(trial, make, device, dtype)
    return make(dtype)


def pretrained(trial: Trial, device: torch.device) -> dict[str, Any]:
    """Return the techniques' arguments of `from_pretrained`; empty if none loads in a way of its own."""
    return {key: value for hook in hooks(trial, "pretrained") for key, value in hook(trial, device).items()}


def applied(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model with every technique's `model` applied."""
    for hook in hooks(trial, "model"):
        net = hook(trial, net, device)
    return net


def optimizer(trial: Trial, device: torch.device) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of the trial's optimizer, and its keyword arguments other than the parameters."""
    module = import_entry(str(catalog.technique("optimizer", trial.optimizer).module))
    return cast(tuple[type[torch.optim.Optimizer], dict[str, Any]], module.optimizer(trial, device))


def stepping(trial: Trial, make: Callable[[list[Any]], Any], parameters: list[Any]) -> Any:
    """Return the optimizer over these parameters: `make`'s, or a technique's wrapper of it."""
    for hook in hooks(trial, "stepping"):
        return hook(trial, make, parameters)
    return make(parameters)
