"""DeepSpeed ZeRO stages 0 to 3, with optimizer and parameter offload; the configuration is generated and recorded.

Precision is DeepSpeed's own: bf16 and fp16 hold the model in half precision next to fp32 master weights, without
autocast. `runner.options` is merged over the generated configuration, key by key.
"""

import functools
from pathlib import Path

import deepspeed
import torch
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.step_meter import StepMeter
from vramsweep.runners.model import build
from vramsweep.runners.rank import process_group
from vramsweep.runners.shardings import interface, zero_config


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` optimizer steps under `meter`."""
    with interface.without_card(trial):
        _run(trial, device, meter)


def _run(trial: Trial, device: torch.device, meter: StepMeter) -> None:
    deepspeed.init_distributed(dist_backend=process_group.backend(trial, device), verbose=False)
    config = zero_config.ds_config(trial)
    zero_config.heeded(config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(trial.precision, torch.float32)
    # While this is alive, transformers makes models under zero.Init, and gathers each layer's weights to initialise
    # them. Under a zero.Init of our own it would initialise empty partitions: weights stay as torch's layers make them.
    divided = HfDeepSpeedConfig(config) if zero_config.divided(trial) else None
    net = build.model(trial, zero_config.place(trial, device), dtype)
    zero_config.fitting(trial, net)
    client = None if "optimizer" in config else build.optimizer(trial, net.parameters(), device)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), optimizer=client, config=config
    )
    data = build.data(trial)
    zero_config.checked(trial, engine)
    about = {**data.columns, "runner_config": config}
    skipped = functools.partial(zero_config.skipped, engine)
    meter.built(lambda: model_description.describe(net, optimizer) | zero_config.told(engine) | about, skipped)
    micro = 0
    for _ in range(trial.steps()):
        meter.step_begin()
        for _ in range(trial.grad_accum):
            index = micro * trial.world_size + meter.rank
            batch = {k: v.to(device, non_blocking=True) for k, v in data.batch(index, trial.micro_batch).items()}
            meter.fed(batch)
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            micro += 1
        meter.step_end(loss)
    del divided
