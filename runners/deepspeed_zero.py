"""DeepSpeed ZeRO stages 0 to 3, with optimizer and parameter offload; the configuration is generated and recorded.

Precision is DeepSpeed's own: bf16 and fp16 hold the model in half precision beside fp32 master weights; there is no
autocast. `runner.options` is merged over the generated configuration, key by key.
"""

from __future__ import annotations

import functools
from pathlib import Path

import deepspeed
import torch

from vramsweep.harness.trial import Trial
from vramsweep.runners import build, ranks, shardings, trace
from vramsweep.runners.measure import StepMeter
from vramsweep.runners.shardings import zero, zero_traced


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` optimizer steps under `meter`."""
    with shardings.traced(trial):
        _run(trial, device, meter)


def _run(trial: Trial, device: torch.device, meter: StepMeter) -> None:
    if trial.device.name != "cuda":
        # The shared-memory communication kernel would be compiled on first use, for 20 s; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=ranks.backend(trial, device), verbose=False)
    config = zero.ds_config(trial)
    zero.heeded(config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trial.precision, torch.float32)
    # given a dtype, ZeRO-3 overrides it where fp16 is not supported, as on many CPUs; the configuration is heeded
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=trial.sharding == "zero3" and trial.zero_init):
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
            "optimizer_effective": zero.wrapped(optimizer),
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
