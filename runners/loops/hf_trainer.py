"""Hugging Face Trainer with its real defaults: its optimizer, gradient clipping, scheduler and data loader.

We set the batch (the trial's, whose default is the Trainer's own 8), max_steps, precision, no checkpoints, no reporting
and no progress bar. `runner_config` records these and all else; `runner.options` overrides any argument.

With several ranks the Trainer wraps the model itself, as its arguments say (shardings/), and gives each rank its part
of the samples. The model is made after the arguments, as most users do; zero_init=false makes it before.
"""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import SequentialSampler, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments

from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.shardings import ZERO
from vramsweep.harness.spec.techniques.catalog import technique
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.counters import scaler_skips
from vramsweep.runners.measure.step_meter import Meter, StepMeter
from vramsweep.runners.model import apply_techniques, build
from vramsweep.runners.rank import process_group
from vramsweep.runners.shardings import interface


class _Boundaries(TrainerCallback):
    """Callback that tells the meter where steps begin and end."""

    def __init__(self, meter: StepMeter, describe: Callable[[], dict[str, Any]], prepared: Callable[[], None]) -> None:
        self.meter, self.describe, self.prepared = meter, describe, prepared
        self.skipped: Callable[[], int | None] = lambda: 0  # without a scaler
        self.loss: torch.Tensor | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.prepared()
        self.meter.built(self.describe, self.skipped)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.step_begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.step_end(self.loss)


class _Job(TrainerCallback):
    """Callback that tells the meter a job's part after the last step, or before the first of a resumed training."""

    def __init__(self, meter: StepMeter) -> None:
        assert isinstance(meter, Meter)
        self.meter = meter
        self.resumes = False

    def enter(self, part: str | None) -> None:
        self.resumes = part == "resume"
        self.meter.gauges.enter(part)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.resumes:
            self.enter(None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.meter.index == len(self.meter.plan) and self.meter.gauges.part == "steps":
            self.enter("evaluation")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.enter("save")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.enter(None)


class _Trainer(Trainer):
    """Trainer that hands each pass's batch and loss to the callback. If `ordered`, samples come in the order drawn."""

    boundaries: _Boundaries | None = None  # of a training that is measured step by step
    ordered = False  # true if the data names lengths

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        ordered: Any = self.train_dataset
        return SequentialSampler(ordered) if self.ordered else super()._get_train_sampler(*args, **kwargs)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.boundaries is None:
            return super().training_step(model, inputs, *args, **kwargs)
        self.boundaries.meter.fed(inputs)
        step = functools.partial(super().training_step, model, inputs, *args, **kwargs)
        loss = self.boundaries.loss = self.boundaries.meter.run_pass(step)
        return loss


def run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Train `trial.steps()` steps under `meter`."""
    if trial.sharding != "none":
        process_group.backend(trial, device)
    with interface.without_card(trial):
        _run(trial, device, meter, folder)
        if trial.protocol.job:
            _resume(trial, device, meter, folder)


def _run(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    place = interface.hook(trial, "place")
    where = device if place is None else place(trial, device)
    first = None if trial.zero_init else build.model(trial, where)
    arguments = training_arguments(trial, folder)
    interface.call(trial, "agreed", arguments)
    net = build.model(trial, where) if first is None else first
    interface.call(trial, "fitting", net, arguments)
    counts = model_description.counts(net)  # the wrapped model may not have them
    data = build.data(trial)

    def describe() -> dict[str, Any]:
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        config = {k: v for k, v in arguments.to_sanitized_dict().items() if k not in ("output_dir", "logging_dir")}
        built = model_description.describe(net, optimizer) | counts
        told = interface.hook(trial, "told")
        more = told(trainer.model_wrapped) if told else {}
        config |= more.get("runner_config", {})
        return built | more | {**data.columns, "runner_config": config}

    def prepared() -> None:
        interface.call(trial, "checked", trainer.model_wrapped)
        if (skipped := interface.hook(trial, "skipped")) is not None:
            boundaries.skipped = functools.partial(skipped, trainer.model_wrapped)

    boundaries = _Boundaries(meter, describe, prepared)
    callbacks: list[TrainerCallback] = [boundaries, _Job(meter)] if trial.protocol.job else [boundaries]
    trainer = _trainer(trial, device, net, arguments, data, callbacks)
    trainer.boundaries = boundaries
    if trial.device.name == "simulated" and trial.precision == "fp16" and trial.sharding not in ZERO:
        # Accelerate leaves fp16 off on a CPU, where the fake tensors are
        trainer.accelerator.native_amp, trainer.accelerator.scaler = True, torch.amp.GradScaler()
    if trainer.accelerator.scaler is not None:
        boundaries.skipped = scaler_skips(trainer.accelerator.scaler, trial.steps())
    trainer.train()


def _trainer(
    trial: Trial,
    device: torch.device,
    net: Any,
    arguments: TrainingArguments,
    data: build.Data,
    callbacks: list[TrainerCallback],
) -> _Trainer:
    of_lengths = length_distribution.names_lengths(trial.data)
    trainer = _Trainer(
        model=net,
        args=arguments,
        train_dataset=_repeat(data, arguments.max_steps * trial.samples_per_step()),
        eval_dataset=_repeat(data, arguments.per_device_eval_batch_size) if trial.protocol.job else None,
        callbacks=callbacks,
        data_collator=data.collate if of_lengths else None,
        optimizer_cls_and_kwargs=None if _named(trial) else _optimizer(trial, arguments, device),
    )
    trainer.ordered = of_lengths
    return trainer


def _repeat(data: build.Data, length: int) -> Subset[dict[str, torch.Tensor]]:
    """Return the pool of samples, repeated often enough for all steps."""
    pool: Any = data.samples
    return Subset(pool, [number % len(pool) for number in range(length)])


def _resume(trial: Trial, device: torch.device, meter: StepMeter, folder: Path) -> None:
    """Make everything again and load the checkpoint, as the next process would, with nothing left of the training."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    job = _Job(meter)
    job.enter("resume")
    arguments = training_arguments(trial, folder)
    arguments.max_steps += 1
    arguments.save_strategy = arguments.eval_strategy = "no"
    trainer = _trainer(trial, device, build.model(trial, device), arguments, build.data(trial), [job])
    trainer.train(resume_from_checkpoint=str(folder / "trainer" / f"checkpoint-{trial.steps()}"))


def _named(trial: Trial) -> bool:
    """Check that the arguments name the optimizer: TrainingArguments has it, and no stand-in replaces it."""
    entry = technique("optimizer", trial.optimizer)
    replaced = entry.packages and trial.device.name == "simulated"
    return trial.optimizer == "default" or (entry.optim is not None and not replaced)


def _optimizer(
    trial: Trial, arguments: TrainingArguments, device: torch.device
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the trial's optimizer and its options, with those that TrainingArguments would set if they named it."""
    kind, given = apply_techniques.optimizer(trial, device)
    told: dict[str, Any] = {"lr": arguments.learning_rate}
    if issubclass(kind, torch.optim.AdamW):
        told |= {"betas": (arguments.adam_beta1, arguments.adam_beta2), "eps": arguments.adam_epsilon}
    return kind, given | told


def training_arguments(trial: Trial, folder: Path) -> TrainingArguments:
    """Return the arguments of one trial. Raises InvalidTrial for an override that this transformers does not know."""
    chosen: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "per_device_train_batch_size": trial.micro_batch,
        "gradient_accumulation_steps": trial.grad_accum,
        "max_steps": trial.steps(),
        "bf16": build.AUTOCAST.get(trial.precision) is torch.bfloat16,
        "fp16": trial.precision == "fp16",
        "tf32": (trial.precision == "tf32" and trial.device.name == "cuda") or None,
        "use_cpu": trial.device.name != "cuda",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": trial.device.name == "cuda",
        "seed": trial.seed,
    }
    if trial.protocol.job:
        last = trial.steps()
        chosen |= {"save_strategy": "steps", "save_steps": last, "eval_strategy": "steps", "eval_steps": last}
    if trial.use_cache != "default" and "use_cache" in TrainingArguments.__dataclass_fields__:  # since transformers 5
        chosen["use_cache"] = trial.use_cache == "on"
    if trial.device.name == "simulated":
        chosen["logging_nan_inf_filter"] = False  # it reads the loss's value in every step
    optim = technique("optimizer", trial.optimizer).optim
    if optim is not None and _named(trial):
        chosen["optim"] = optim
    divided = interface.hook(trial, "arguments")
    try:
        return TrainingArguments(**(chosen | trial.runner.options | (divided(trial) if divided else {})))
    except (TypeError, ValueError) as error:
        raise InvalidTrial(f"runner.options: {error}") from None
