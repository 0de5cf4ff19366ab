"""The Trial: one combination of axes plus protocol plus repeat index.

A trial is plain data. It holds everything that can change what is measured, and nothing else. Retries, the deadline,
and whether an attempt runs cold or warm belong to the sweep (run_trials.py); the machine belongs to the row
(schema.system_of). A trial's id is a hash of what changes the measurement: names, and settings left at their defaults,
do not enter it.
"""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.gpu_lookup import GPUS, Capability, Gpu
from vramsweep.harness.messages.errors import UserError

MOST = 1 << 20  # upper limit of counts: beyond it, sizes overflow and loops have no end


class InvalidTrial(UserError):
    """An error: the combination cannot run. The text says why, and what would run."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelAxis(_Frozen):
    """The model: an architecture we ship (`model_type` and `config`), or `path`, a local directory or hub id.

    `trust_remote_code`: Python files that `path` brings may run; otherwise they do not.
    """

    name: str
    model_type: str | None = None
    config: dict[str, Any] = {}
    parameters: int | None = None
    max_positions: int | None = None
    path: str | None = None
    trust_remote_code: bool = False


class AllocatorAxis(_Frozen):
    """The allocator: a name for figures, and the canonical PYTORCH_CUDA_ALLOC_CONF ("" for torch's defaults)."""

    name: str
    conf: str = ""


class RunnerAxis(_Frozen):
    """The runner, which drives the loop (runner_table.RUNNERS), and what it is given next to the axes.

    `options` overrides TrainingArguments (trainer), the ds config (deepspeed) or arguments of what divides the model
    (torch; Sharding.options). Options that an axis sets are rejected. `target` is the custom runner's
    path/to/file.py:function. `command` is the script runner's, with placeholders (command_template.py); `stop` ends it
    once the protocol's steps are over.
    """

    name: str
    target: str | None = None
    command: str | None = None
    stop: bool = True
    options: dict[str, Any] = {}


class DeviceAxis(_Frozen):
    """The device. `gpu` names the GPU whose memory and generation are simulated (harness/hardware/gpu_lookup.py).

    The other fields describe the simulated machine: the GPUs of a node, their links (`link`) and the links of nodes
    (`interconnect`), by name, and a node's memory in GiB. None is what the GPU usually comes with, or unknown. A GPU
    that is not listed is a similar one with `memory_gib` (nominal) and, for another generation, a compute `capability`
    ("8.6"). Of any GPU `headroom_gib` may be left free.
    """

    name: Literal["cuda", "cpu", "simulated"]
    gpu: str | None = None
    gpus_per_node: int = Field(default=8, ge=1, le=MOST)
    link: str | None = None
    interconnect: str | None = None
    node_memory_gib: float | None = Field(default=None, gt=0, lt=1e9, allow_inf_nan=False)
    memory_gib: float | None = Field(default=None, gt=0, lt=1e9, allow_inf_nan=False)
    capability: str | None = None
    headroom_gib: float = Field(default=0.0, ge=0, lt=1e9, allow_inf_nan=False)

    @field_validator("capability", mode="before")
    @classmethod
    def _typed_as_a_number(cls, value: Any) -> str | None:
        if value is None:
            return None
        if (found := re.fullmatch(r"(\d+)(?:\.(\d))?", str(value), re.ASCII)) is None:
            raise PydanticCustomError("capability", "write major.minor, such as 8.6")
        given, highest = (int(found[1]), int(found[2] or 0)), max(gpu.capability for gpu in GPUS)
        if given > highest:
            most = {"highest": _dotted(highest)}
            raise PydanticCustomError("capability", "no listed GPU has more than {highest}; give one such as 8.6", most)
        return _dotted(given)

    @property
    def card(self) -> Gpu:
        """Return the GPU that is simulated. Raises KeyError if `gpu` is not listed."""
        return gpu_lookup.resolve_gpu(self.gpu, self.memory_gib, self.capability, self.headroom_gib)


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


class ProtocolAxis(_Frozen):
    """The numbers of steps: `warmup_steps`, then one untimed probe step, then `measured_steps`.

    `job`: instead of steps, the whole job runs to its end, with the peak of each part (schema.py: PARTS).
    """

    name: str
    warmup_steps: int = Field(ge=1, le=MOST)
    measured_steps: int = Field(ge=1, le=MOST)
    job: bool = False


class Trial(_Frozen):
    """One combination of axes, fully resolved. `fingerprints` maps each local file it names to its SHA-256.

    The techniques among the axes, from `precision` to `use_cache`, are described in techniques.AXES.

    `record` adds one untimed step whose allocator events are kept, for `replay`. `ds_config` is the path of a DeepSpeed
    configuration. `zero_init` makes the model under `zero.Init`, divided from the start (ZeRO 3). `versions` are the
    versions of packages that a simulated run is predicted for, if they differ from the installed ones.
    """

    model: ModelAxis
    seq_len: int = Field(ge=1, le=1 << 31)
    micro_batch: int = Field(ge=1, le=MOST)
    grad_accum: int = Field(default=1, ge=1, le=MOST)
    precision: str
    allocator: AllocatorAxis
    runner: RunnerAxis
    sharding: str = "none"
    world_size: int = Field(default=1, ge=1, le=MOST)
    offload_optimizer: bool = False
    offload_param: bool = False
    zero_init: bool = True
    ds_config: str | None = None
    versions: dict[str, str] = {}
    device: DeviceAxis
    protocol: ProtocolAxis
    quantization: str = "none"
    adapter: str = "none"
    lora_r: int = Field(default=16, ge=1, le=MOST)
    lora_alpha: int = Field(default=16, ge=1, le=MOST)
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    lora_target_modules: str = "all-linear"
    attention: str = "sdpa"
    kernels: str = "none"
    loss: str = "default"
    checkpointing: str = "none"
    checkpointing_every: int = Field(default=1, ge=1, le=MOST)
    checkpointing_reentrant: bool = False
    checkpointing_ops: str = "default"
    activation_offload: bool = False
    compile: str = "none"
    optimizer: str = "default"
    no_sync: bool = True
    padding: float = Field(default=0.0, ge=0, lt=1)
    padding_side: str = "right"
    padding_to: str = "longest"
    packing: str = "none"
    use_cache: str = "default"
    weights: Literal["random", "pretrained"] = "random"
    data: str = "synthetic"
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    record: bool = False
    repeat: int = Field(default=0, ge=0)
    fingerprints: dict[str, str] = {}

    @field_validator("padding_to", mode="before")
    @classmethod
    def _multiple(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    def memory_limit(self) -> int:
        """Return the bytes that the allocator may use of the simulated GPU: the share that its setting allows.

        Raises KeyError if the GPU is not listed.
        """
        share = allocator_config.parse(self.allocator.conf).per_process_memory_fraction
        return int(gpu_lookup.memory_limit(self.device.card) * share)

    def allocator_variable(self) -> str:
        """Return PYTORCH_CUDA_ALLOC_CONF of the trial's worker; "" if simulated, as that allocator is not torch's."""
        return "" if self.device.name == "simulated" else self.allocator.conf

    def tokens_per_step(self) -> int:
        """Return the tokens that one optimizer step sees over all ranks, padding counted."""
        return self.samples_per_step() * self.seq_len

    def samples_per_step(self) -> int:
        """Return the sequences that one optimizer step sees over all ranks."""
        return self.micro_batch * self.grad_accum * self.world_size

    def steps(self) -> int:
        """Return the steps of an attempt: warm-up, probe, measured, one whose FLOPs are counted, the recorded one.

        A simulated run has the first step, which creates the optimizer's state, and two more.
        """
        if self.device.name == "simulated":
            return 3
        return self.protocol.warmup_steps + 1 + self.protocol.measured_steps + 1 + self.record
