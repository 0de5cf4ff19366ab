"""Trial: one combination of axes plus protocol plus repeat index, its id, and what is valid together with what.

A trial is plain data. It holds everything that can change what is measured and nothing else: how often an attempt
is retried, its deadline and whether it runs cold or warm belong to the sweep (sweep.py), not here. Its id is a hash
of its canonical JSON and of `MEASUREMENT_VERSIONS`, so a changed setting is a new trial.

Not covered here: building a model (runners/build.py), the allocator's options (allocator/config.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.errors import UserError
from vramsweep.harness.gpus import GPUS

# Raise a runner's number when what it measures changes: old rows then no longer count as finished.
MEASUREMENT_VERSIONS = {"torch": 1, "trainer": 1, "deepspeed": 2, "fsdp": 1, "custom": 1}
FSDP_OPTIONS = ("reshard_after_forward",)


class InvalidTrial(UserError):
    """The combination cannot run; the text says why and what would."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelAxis(_Frozen):
    """Which model: an architecture we ship (`model_type` and `config`), or `path`, a local directory or hub id."""

    name: str
    model_type: str | None = None
    config: dict[str, Any] = {}
    parameters: int | None = None
    max_positions: int | None = None
    path: str | None = None


class AllocatorAxis(_Frozen):
    """A name for figures and the text of PYTORCH_CUDA_ALLOC_CONF, canonical, "" for torch's defaults."""

    name: str
    conf: str = ""


class RunnerAxis(_Frozen):
    """How training is driven.

    `options` overrides TrainingArguments (trainer), the ds config (deepspeed) or arguments of fully_shard (fsdp).
    """

    name: Literal["torch", "trainer", "deepspeed", "fsdp", "custom"]
    world_size: int = Field(default=1, ge=1)
    zero_stage: int | None = Field(default=None, ge=0, le=3)
    offload_optimizer: bool | None = None
    offload_param: bool | None = None
    target: str | None = None
    options: dict[str, Any] = {}


class DeviceAxis(_Frozen):
    """Where it runs. `gpu` names the card whose memory and generation are simulated (harness/gpus.py)."""

    name: Literal["cuda", "cpu", "simulated"]
    gpu: str | None = None

    @model_serializer(mode="wrap")
    def _without_null(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Measured trials keep the ids that they had before there were simulated ones."""
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if value is not None}


class ProtocolAxis(_Frozen):
    """How many steps: `warmup_steps`, then one untimed probe step, then `measured_steps`."""

    name: str
    warmup_steps: int = Field(ge=1)
    measured_steps: int = Field(ge=1)


class Trial(_Frozen):
    """One combination of axes, fully resolved. `fingerprints` maps each local file it names to its SHA-256.

    `record` adds one untimed step whose allocator events are kept, for `replay`.
    """

    model: ModelAxis
    seq_len: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    grad_accum: int = Field(default=1, ge=1)
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16_pure"]
    allocator: AllocatorAxis
    runner: RunnerAxis
    device: DeviceAxis
    protocol: ProtocolAxis
    optimizer: Literal["default", "adamw", "adamw_fused", "sgd"] = "default"
    gradient_checkpointing: bool = False
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    weights: Literal["random", "pretrained"] = "random"
    data: str = "synthetic"
    seed: int = 0
    record: bool = False
    repeat: int = Field(default=0, ge=0)
    fingerprints: dict[str, str] = {}

    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees over all ranks, padding counted."""
        return self.samples_per_step() * self.seq_len

    def samples_per_step(self) -> int:
        """Sequences that one optimizer step sees over all ranks."""
        return self.micro_batch * self.grad_accum * self.runner.world_size

    def steps(self) -> int:
        """All steps of an attempt: warm-up, probe, measured, the one whose FLOPs are counted, the recorded one.

        A simulated run has the first step, which creates the optimizer's state, and two more.
        """
        if self.device.name == "simulated":
            return 3
        return self.protocol.warmup_steps + 1 + self.protocol.measured_steps + 1 + self.record

    def label(self) -> str:
        """Short text for progress lines."""
        parts = [self.model.name, self.runner.name, f"seq {self.seq_len}", f"batch {self.micro_batch}", self.precision]
        if self.allocator.conf:
            parts.append(self.allocator.name)
        return " · ".join(parts)


def trial_id(resolved: Mapping[str, Any]) -> str:
    """16 hex digits over the canonical JSON of a resolved trial and its runner's measurement version."""
    runner = resolved.get("runner")
    name = runner.get("name") if isinstance(runner, Mapping) else None
    payload = {"trial": resolved, "measurement": MEASUREMENT_VERSIONS.get(str(name))}
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(values: Mapping[str, Any]) -> Trial:
    """A Trial from plain values, with the allocator text made canonical and named local files fingerprinted.

    Raises InvalidTrial if a value has the wrong type or range, or if the combination breaks a rule.
    """
    try:
        trial = Trial.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidTrial(f"{where} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    try:
        conf = allocator_config.parse(trial.allocator.conf)
    except allocator_config.AllocatorConfigError as error:
        raise InvalidTrial(f"allocator {trial.allocator.name}: {error}") from None
    trial = trial.model_copy(
        update={
            "allocator": trial.allocator.model_copy(update={"conf": conf.render()}),
            "fingerprints": _fingerprints(trial),
        }
    )
    for rule in RULES:
        reason = rule(trial)
        if reason:
            raise InvalidTrial(reason)
    return trial


def _fingerprints(trial: Trial) -> dict[str, str]:
    named = []
    if trial.runner.target:
        named.append(Path(trial.runner.target.rpartition(":")[0]))
    if trial.model.path:
        named.append(Path(trial.model.path) / "config.json")
    if trial.data != "synthetic":
        named.append(Path(trial.data))
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in named if path.is_file()}


def _model(trial: Trial) -> str | None:
    if trial.runner.name == "custom":
        return None
    if (trial.model.model_type is None) == (trial.model.path is None):
        return "model: give either a shipped architecture or model.path (a local directory or hub id)"
    if trial.weights == "pretrained" and trial.model.path is None:
        return "weights=pretrained needs model.path (a local directory or hub id): model=hub model.path=..."
    if trial.data != "synthetic" and trial.model.path is None:
        return (
            "a text data set needs a tokenizer, so model.path (a local directory or hub id): model=hub model.path=..."
        )
    return None


def _positions(trial: Trial) -> str | None:
    limit = trial.model.max_positions
    if limit is not None and trial.seq_len > limit:
        return f"seq_len {trial.seq_len} is longer than {trial.model.name}'s {limit} positions"
    return None


def _device(trial: Trial) -> str | None:
    if trial.device.name == "simulated":
        return _simulated(trial)
    if trial.device.gpu is not None:
        return f"device.gpu belongs to device=simulated, not {trial.device.name}"
    if trial.device.name == "cuda":
        return None
    if trial.allocator.conf:
        return (
            f"allocator {trial.allocator.name}: the CUDA allocator is not in use on device=cpu; use allocator=default"
        )
    if trial.precision == "tf32":
        return "precision tf32 is a mode of CUDA tensor cores; on device=cpu use fp32"
    if trial.precision == "fp16" and trial.runner.name != "deepspeed":
        return "precision fp16 (autocast with GradScaler) is not supported on device=cpu; use bf16"
    if trial.attention == "flash_attention_2":
        return "attention flash_attention_2 needs CUDA; on device=cpu use sdpa"
    if trial.optimizer == "adamw_fused" and trial.runner.name == "deepspeed":
        return "optimizer adamw_fused with deepspeed needs CUDA; on device=cpu use adamw"
    return None


def _simulated(trial: Trial) -> str | None:
    if trial.device.gpu not in {gpu.name for gpu in GPUS}:
        names = ", ".join(sorted(gpu.name for gpu in GPUS))
        return f"device=simulated: device.gpu is {trial.device.gpu}, which is not listed; choose one of {names}"
    if allocator_config.parse(trial.allocator.conf).backend != "native":
        return (
            f"allocator {trial.allocator.name}: cudaMallocAsync follows the driver's own policy and cannot be "
            "simulated; measure it on device=cuda"
        )
    if trial.runner.name == "deepspeed" and "optimizer" in trial.runner.options:
        return (
            "runner.options.optimizer: DeepSpeed's own optimizers are compiled kernels and cannot be simulated; leave "
            "it out for torch's, or measure on device=cuda"
        )
    if trial.runner.offload_param:
        return "runner.offload_param cannot be simulated; offload_optimizer can, or measure on device=cuda"
    if trial.attention == "flash_attention_2":
        return "attention flash_attention_2 cannot be simulated; sdpa runs the same flash kernel in half precision"
    if trial.weights == "pretrained":
        return "weights=pretrained cannot be simulated, and would not change memory; use weights=random"
    return None


def _allocator(trial: Trial) -> str | None:
    conf = allocator_config.parse(trial.allocator.conf)
    if trial.record and (trial.device.name != "cuda" or conf.backend != "native"):
        return "record=true needs device=cuda and PyTorch's native allocator: no other keeps a history of its events"
    found = allocator_config.problems(conf, _version("torch"))
    return f"allocator {trial.allocator.name}: {found[0]}" if found else None


def _deepspeed(trial: Trial) -> str | None:
    runner = trial.runner
    if runner.name != "deepspeed":
        given = [k for k in ("zero_stage", "offload_optimizer", "offload_param") if getattr(runner, k) is not None]
        return f"runner.{given[0]} belongs to runner=deepspeed, not {runner.name}" if given else None
    stage = runner.zero_stage
    if stage is None:
        return "runner=deepspeed needs runner.zero_stage (0, 1, 2 or 3)"
    if runner.offload_optimizer and stage == 0:
        return "runner.offload_optimizer needs zero_stage 1 to 3 (stage 0 silently ignores it)"
    if runner.offload_param and stage != 3:
        return f"runner.offload_param needs zero_stage 3, not {stage}"
    if trial.precision == "bf16_pure":
        return "deepspeed keeps fp32 master weights, so bf16_pure does not exist there; use bf16"
    if trial.device.name == "cpu" and stage == 0 and trial.precision in ("bf16", "fp16"):
        return f"deepspeed ZeRO-0 in {trial.precision} does not run on device=cpu; use fp32, or zero_stage 1 to 3"
    return None


def _fsdp(trial: Trial) -> str | None:
    if trial.runner.name != "fsdp":
        return None
    unknown = sorted(set(trial.runner.options) - set(FSDP_OPTIONS))
    if unknown:
        return f"runner.options.{unknown[0]}: runner=fsdp takes {', '.join(FSDP_OPTIONS)}"
    if trial.precision == "fp16":
        return "runner=fsdp in fp16 is not supported; use precision=bf16"
    if trial.weights == "pretrained":
        return "runner=fsdp starts from random weights; use weights=random, which changes neither memory nor speed"
    return None


def _ranks(trial: Trial) -> str | None:
    if trial.runner.world_size > 1 and trial.runner.name not in ("deepspeed", "fsdp"):
        return (
            f"runner.world_size {trial.runner.world_size} needs runner=deepspeed or fsdp; "
            f"{trial.runner.name} runs one rank"
        )
    return None


def _custom(trial: Trial) -> str | None:
    target = trial.runner.target
    if trial.runner.name != "custom":
        return f"runner.target belongs to runner=custom, not {trial.runner.name}" if target else None
    path, colon, function = (target or "").rpartition(":")
    if not colon or not function.isidentifier():
        return "runner=custom needs runner.target=path/to/file.py:function"
    if not Path(path).is_file():
        return f"runner.target: there is no file {path}"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


RULES: tuple[Callable[[Trial], str | None], ...] = (
    _model,
    _positions,
    _device,
    _allocator,
    _deepspeed,
    _fsdp,
    _ranks,
    _custom,
)
