"""The user's own model and step, unmodified: `runner=custom runner.target=path/to/file.py:build`.

The contract: `build(trial)` takes the `harness.spec.trial.Trial` and returns `(model, optimizer, step)` or
`(model, optimizer, step, batches)`.

- `step(batch)` runs one whole optimizer step (forward, backward, update) and may return the loss.
- With sharding=ddp, fsdp1 or fsdp2 the process group exists when `build` is called. `build` divides the model itself
  (`DistributedDataParallel(model)`, `FullyShardedDataParallel(model)`, `fully_shard`). Batches are each rank's own.
- `batches(index)` returns the argument of `step`. Without it a batch is {"input_ids", "labels"}, long tensors of shape
  (micro_batch, seq_len) on the trial's device. It is None if the trial has no model with a vocabulary. With
  data=lengths:... batches are as wide as their samples need, and have an "attention_mask".

The target decides on precision, checkpointing and accumulation; the trial's axes tell it what is requested.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.shardings import FSDP
from vramsweep.harness.spec.trial import DeviceAxis, InvalidTrial, Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.step_meter import StepMeter
from vramsweep.runners.model import build
from vramsweep.runners.rank import process_group
from vramsweep.runners.shardings import interface

UNKNOWN = {"padding_fraction": None}


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` steps of the target under `meter`."""
    train(trial, device, meter, lambda asked: load(str(trial.runner.target))(asked))


def train(trial: Trial, device: torch.device, meter: StepMeter, build: Callable[[Trial], Any]) -> None:
    """Train `trial.steps()` steps of what `build` makes, in the trial's process group if it has a sharding."""
    if trial.sharding != "none":
        process_group.join(trial, device)
    with interface.without_card(trial):
        _train(trial, device, meter, build)


def _train(trial: Trial, device: torch.device, meter: StepMeter, build: Callable[[Trial], Any]) -> None:
    asked = trial
    if trial.device.name == "simulated":  # the target must do what it does on a GPU
        asked = trial.model_copy(update={"device": DeviceAxis(name="cuda")})
    with device:
        made = _made(build, asked)
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        raise InvalidTrial(f"{trial.runner.target} must return (model, optimizer, step[, batches])")
    net, optimizer, step = made[:3]
    if not isinstance(net, torch.nn.Module) or not callable(step):
        got = f"{type(net).__name__} and {type(step).__name__}"
        raise InvalidTrial(f"{trial.runner.target}: model must be a torch.nn.Module and step a function, not {got}")
    interface.call(trial, "checked", net)
    if trial.sharding in FSDP and isinstance(optimizer, torch.optim.Optimizer):  # FSDP replaces parameters
        own = {id(parameter) for parameter in net.parameters()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise InvalidTrial(
                f"{trial.runner.target}: the optimizer has none of the model's parameters; create it after "
                f"{'fully_shard' if trial.sharding == 'fsdp2' else 'FullyShardedDataParallel'}"
            )
    if len(made) == 4 and length_distribution.names_lengths(trial.data):
        raise InvalidTrial(f"{trial.runner.target} returns its own batches, so data={trial.data} has no effect; "
                           "return (model, optimizer, step), or leave data= out")  # fmt: skip
    batches, fed = (made[3], UNKNOWN) if len(made) == 4 else _token_batches(trial, device, meter.rank)
    whole = net.module if isinstance(net, DistributedDataParallel) else net
    # FSDP1 leaves each rank a part of flattened weights, so the number of parameters is unknown
    counts = dict.fromkeys(("parameters", "trainable_parameters")) if trial.sharding == "fsdp1" else {}
    meter.built(lambda: {**model_description.describe(whole, optimizer), **counts, **fed})
    for index in range(trial.steps()):
        meter.step_begin()
        batch = batches(index)
        meter.fed(batch if isinstance(batch, Mapping) else {})
        loss = step(batch)
        meter.step_end(loss if isinstance(loss, torch.Tensor) else None)


def _made(build: Callable[[Trial], Any], asked: Trial) -> Any:
    try:
        return build(asked)
    except ValueError as error:
        if "process group twice" not in str(error):
            raise
        raise InvalidTrial(
            f"{asked.runner.target}: the process group exists already; call init_process_group only "
            "`if not dist.is_initialized()`"
        ) from None


def load(target: str) -> Callable[[Trial], Any]:
    """Load the function that `path/to/file.py:name` names. Raises InvalidTrial if the file has no such function."""
    path, _, name = target.rpartition(":")
    spec = importlib.util.spec_from_file_location("vramsweep_custom_target", path)
    if spec is None or spec.loader is None:
        raise InvalidTrial(f"runner.target: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))  # its neighbours are importable, as if it had been run
    spec.loader.exec_module(module)
    function: Callable[[Trial], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise InvalidTrial(f"runner.target: {path} has no function {name}")
    return function


def _token_batches(trial: Trial, device: torch.device, rank: int) -> tuple[Callable[[int], Any], Mapping[str, Any]]:
    """Return batches by number and the row's columns about them: known for `data=lengths:`, which no target changes."""
    if trial.model.path is None and "vocab_size" not in trial.model.config:
        return lambda index: None, UNKNOWN
    data = build.data(trial)

    def batch(index: int) -> dict[str, torch.Tensor]:
        found = data.batch(index * trial.world_size + rank, trial.micro_batch)
        return {key: tensor.to(device) for key, tensor in found.items()}

    return batch, data.columns if length_distribution.names_lengths(trial.data) else UNKNOWN
