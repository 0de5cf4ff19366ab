"""DeepSpeed ZeRO stages 0 to 3, with optimizer and parameter offload; the configuration is generated and recorded.

Precision is DeepSpeed's own: bf16 and fp16 hold the model in half precision beside fp32 master weights; there is no
autocast. `runner.options` is merged over the generated configuration, key by key.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterable, Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError

from vramsweep.harness import registry
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build, ranks, trace, zero_traced
from vramsweep.runners.measure import StepMeter

PASSED_ON = ("optimizer.params.", "scheduler.params.")  # to classes that raise for what they do not know


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` optimizer steps under `meter`."""
    with zero_traced.behave() if trial.device.name == "simulated" else contextlib.nullcontext():
        _run(trial, device, meter)


def _run(trial: Trial, device: torch.device, meter: StepMeter) -> None:
    if trial.device.name != "cuda":
        # The shared-memory communication kernel would be compiled on first use, for 20 s; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=ranks.backend(trial, device), verbose=False)
    config = ds_config(trial)
    heeded(config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trial.precision, torch.float32)
    # given a dtype, ZeRO-3 overrides it where fp16 is not supported, as on many CPUs; the configuration is heeded
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=trial.sharding == "zero3"):
        net = build.model(trial, device, dtype)
    client = None if "optimizer" in config else build.optimizer(trial, net.parameters(), device)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), optimizer=client, config=config
    )
    data = build.data(trial)
    tracer = trace.active()
    if tracer is not None:
        tracer.held = functools.partial(zero_traced.held, optimizer)
    meter.built(
        lambda: {
            **build.describe(net, optimizer),
            "optimizer_effective": _wrapped(optimizer),
            "padding_fraction": data.padding_fraction,
            "runner_config": config,
        },
        lambda: int(engine.skipped_steps),
    )
    micro = 0
    for _ in range(trial.steps()):
        meter.step_begin()
        for _ in range(trial.grad_accum):
            index = micro * trial.world_size + meter.rank
            batch = {k: v.to(device, non_blocking=True) for k, v in data.batch(index, trial.micro_batch).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            micro += 1
        meter.step_end(loss)


def ds_config(trial: Trial) -> dict[str, Any]:
    """The DeepSpeed configuration of one trial, overrides merged in."""
    stage = registry.sharding(trial.sharding).stage
    zero: dict[str, Any] = {"stage": stage}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": trial.micro_batch,
        "gradient_accumulation_steps": trial.grad_accum,
        "steps_per_print": 1 << 30,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }
    if trial.precision in ("bf16", "fp16"):
        config[trial.precision] = {"enabled": True}
    if trial.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False  # the trial's optimizer, not DeepSpeed's own
    if trial.offload_param:
        zero["offload_param"] = {"device": "cpu"}
    return _merged(config, trial.runner.options)


def _wrapped(optimizer: Any) -> str:
    """DeepSpeed's optimizer and the one in it, which at stage 0 in fp32 are the same."""
    name, inner = build.optimizer_name(optimizer), getattr(optimizer, "optimizer", None)
    return name if inner is not None else f"{name}({name})"


class _Asked(dict[str, Any]):
    """A node of a configuration that remembers which keys were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: _Asked(v) if isinstance(v, Mapping) else v for k, v in values.items()})
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return _Keys(self)

    def __iter__(self) -> Iterator[str]:  # so that ** asks key by key
        return super().__iter__()


class _Keys(KeysView[str]):
    """Keys of a node: `in` asks for one."""


def heeded(config: Mapping[str, Any]) -> None:
    """Raise InvalidTrial for a key of the configuration that DeepSpeed does not look at, with the closest one it does.

    DeepSpeed reads its whole configuration when it makes a DeepSpeedConfig: models of pydantic forbid what they do not
    know, while of everything else unknown keys have no effect. Nodes that it asks for nothing it passes on.
    """
    asked = _Asked(config)
    try:
        deepspeed.DeepSpeedConfig(asked)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = _closest(str(first["loc"][-1]), _fields()) if first["type"] == "extra_forbidden" else ""
        raise InvalidTrial(
            f"runner.options: DeepSpeed's {error.title} does not take {key}: {first['msg']}{hint}"
        ) from None
    except deepspeed.DeepSpeedConfigError as error:
        raise InvalidTrial(f"runner.options: {error}") from None
    ignored = next(_ignored(asked), None)
    if ignored is not None:
        path, known = ignored
        raise InvalidTrial(
            f"runner.options.{path}: DeepSpeed {deepspeed.__version__} does not look at it, so it would have no effect"
            f"{_closest(path.rpartition('.')[2], known)}"
        )


def _ignored(node: _Asked, before: str = "") -> Iterator[tuple[str, set[str]]]:
    """Dotted names of the keys that nobody asked for, each with what was asked for beside it."""
    if not node.asked or before in PASSED_ON:
        return
    for key, value in dict.items(node):
        if key not in node.asked:
            yield f"{before}{key}", node.asked
        elif isinstance(value, _Asked):
            yield from _ignored(value, f"{before}{key}.")


def _fields(model: Any = DeepSpeedConfigModel) -> set[str]:
    """The fields of all of DeepSpeed's models."""
    return set(model.model_fields).union(*(_fields(kind) for kind in model.__subclasses__()))


def _closest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), 1)
    return f"; the closest is {found[0]}" if found else ""


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        held = merged.get(key)
        merged[key] = _merged(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return merged
