"""Trial: one combination of axes plus protocol plus repeat index, its id, and what is valid together with what.

A trial is plain data. It holds everything that can change what is measured and nothing else: how often an attempt
is retried, its deadline and whether it runs cold or warm belong to the sweep (sweep.py), not here. Its id is a hash of
what changes the measurement: names and settings left at their defaults do not enter it.

Not covered here: building a model (runners/build.py), the allocator's options (allocator/config.py), what each runner
and way of sharding can do (registry.py), techniques (techniques.py), on which machine it was measured (row.system).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from vramsweep.harness import differences, gpus, lengths, links, mistakes, plain_json, registry, script, techniques
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.errors import EnvironmentFault, UserError, describe
from vramsweep.harness.gpus import GPUS, Capability, Gpu

ID_VERSION = 2
MOST = 1 << 20  # what counts something may be at most: beyond it, sizes overflow and loops have no end
SIMULATION = 14  # raise it when what a simulated run predicts changes
# What ids of version 2 leave out: each setting at the value that rows had before it was one. Frozen: a default that
# changes in conf/ does not change a line here, and a new axis adds one. Techniques bring theirs along.
LEFT_OUT: dict[tuple[str, ...], Any] = {
    ("model", "model_type"): None,
    ("model", "path"): None,
    ("model", "trust_remote_code"): False,
    ("grad_accum",): 1,
    ("allocator", "conf"): "",
    ("runner", "target"): None,
    ("runner", "command"): None,
    ("runner", "stop"): True,
    ("protocol", "job"): False,
    ("sharding",): "none",
    ("world_size",): 1,
    ("offload_optimizer",): False,
    ("offload_param",): False,
    ("zero_init",): True,
    ("ds_config",): None,
    ("versions",): {},
    ("device", "gpu"): None,
    ("device", "gpus_per_node"): 8,
    ("device", "link"): None,
    ("device", "interconnect"): None,
    ("device", "node_memory_gib"): None,
    ("device", "memory_gib"): None,
    ("device", "capability"): None,
    ("device", "headroom_gib"): 0.0,
    **{(name,): default for name, default in techniques.DEFAULTS.items()},
    ("weights",): "random",
    ("data",): "synthetic",
    ("seed",): 0,
    ("record",): False,
    ("repeat",): 0,
}
# What of a device is only said of one that is simulated.
SIMULATED = ("gpu", "gpus_per_node", "link", "interconnect", "node_memory_gib", "memory_gib", "capability",
             "headroom_gib")  # fmt: skip
# Names and remarks, which change nothing; a custom target may well choose its model by the name.
NAMES = (("allocator", "name"), ("protocol", "name"), ("model", "name"), ("model", "parameters"),
         ("model", "max_positions"), ("fingerprints",))  # fmt: skip
# Where files are named: their contents stand for them.
FILES = (("runner", "target"), ("model", "path"), ("data",), ("ds_config",))
# What others read: there an empty node or a null says something.
VERBATIM = (("runner", "options"), ("model", "config"))


class InvalidTrial(UserError):
    """The combination cannot run; the text says why and what would."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class ModelAxis(_Frozen):
    """Which model: an architecture we ship (`model_type` and `config`), or `path`, a local directory or hub id.

    `trust_remote_code`: what `path` brings as Python files may run; else it does not.
    """

    name: str
    model_type: str | None = None
    config: dict[str, Any] = {}
    parameters: int | None = None
    max_positions: int | None = None
    path: str | None = None
    trust_remote_code: bool = False


class AllocatorAxis(_Frozen):
    """A name for figures and the text of PYTORCH_CUDA_ALLOC_CONF, canonical, "" for torch's defaults."""

    name: str
    conf: str = ""


class RunnerAxis(_Frozen):
    """Who drives the loop (registry.RUNNERS), and what it is told beside the axes.

    `options` overrides TrainingArguments (trainer), the ds config (deepspeed) or arguments of what divides the model
    (torch; Sharding.options); those that an axis says are rejected. `target` is the custom runner's
    path/to/file.py:function. `command` is the script runner's, with placeholders (script.py); `stop` ends it once the
    protocol's steps are over.
    """

    name: str
    target: str | None = None
    command: str | None = None
    stop: bool = True
    options: dict[str, Any] = {}


class DeviceAxis(_Frozen):
    """Where it runs. `gpu` names the card whose memory and generation are simulated (harness/gpus.py).

    The others say what else of a machine is simulated: how many cards a node has, what links them (`link`) and what
    links nodes (`interconnect`), by name, and a node's memory in GiB; None is what the card usually comes with, or
    unknown. A card that is not listed is one like it with `memory_gib` (nominal) and, where that is another generation,
    of a compute `capability` ("8.6"); of any card `headroom_gib` may be left free.
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
        found = re.fullmatch(r"(\d+)(?:\.(\d))?", str(value), re.ASCII)
        if found is None:
            raise PydanticCustomError("capability", "write major.minor, such as 8.6")
        given, highest = (int(found[1]), int(found[2] or 0)), max(gpu.capability for gpu in GPUS)
        if given > highest:
            most = {"highest": _dotted(highest)}
            raise PydanticCustomError(
                "capability", "no listed card has more than {highest}; give one such as 8.6", most
            )
        return _dotted(given)

    @property
    def card(self) -> Gpu:
        """The card that is simulated. Raises KeyError where `gpu` is not listed."""
        return gpus.card(self.gpu, self.memory_gib, self.capability, self.headroom_gib)


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


class ProtocolAxis(_Frozen):
    """How many steps: `warmup_steps`, then one untimed probe step, then `measured_steps`.

    `job`: the whole of it instead, to its end, with the peak of each part (row.py: PARTS).
    """

    name: str
    warmup_steps: int = Field(ge=1, le=MOST)
    measured_steps: int = Field(ge=1, le=MOST)
    job: bool = False


class Trial(_Frozen):
    """One combination of axes, fully resolved. `fingerprints` maps each local file it names to its SHA-256.

    What the techniques among the axes mean, from `precision` to `use_cache`, is in techniques.AXES.

    `record` adds one untimed step whose allocator events are kept, for `replay`. `ds_config` is the path of a DeepSpeed
    configuration; `zero_init` makes the model under `zero.Init`, divided from the start (ZeRO 3). `versions` are those
    of packages that a simulated run is to be like, where they differ from what is installed.
    """

    model: ModelAxis
    seq_len: int = Field(ge=1, le=1 << 31)
    micro_batch: int = Field(ge=1, le=MOST)
    grad_accum: int = Field(default=1, ge=1, le=MOST)
    precision: str
    allocator: AllocatorAxis
    runner: RunnerAxis
    sharding: Literal["none", "ddp", "fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3"] = "none"
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
        """What the allocator may have of the simulated card, in bytes: as much of it as its setting allows a process.

        Raises KeyError where the card is not listed.
        """
        share = allocator_config.parse(self.allocator.conf).per_process_memory_fraction
        return int(gpus.memory_limit(self.device.card) * share)

    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees over all ranks, padding counted."""
        return self.samples_per_step() * self.seq_len

    def samples_per_step(self) -> int:
        """Sequences that one optimizer step sees over all ranks."""
        return self.micro_batch * self.grad_accum * self.world_size

    def steps(self) -> int:
        """All steps of an attempt: warm-up, probe, measured, the one whose FLOPs are counted, the recorded one.

        A simulated run has the first step, which creates the optimizer's state, and two more.
        """
        if self.device.name == "simulated":
            return 3
        return self.protocol.warmup_steps + 1 + self.protocol.measured_steps + 1 + self.record

    def label(self) -> str:
        """Short text for progress lines."""
        if self.runner.command is not None:
            return self._command_label()
        parts = [self.model.name, self.runner.name, f"seq {self.seq_len}", f"batch {self.micro_batch}", self.precision]
        if self.sharding != "none":
            parts.insert(2, f"{self.sharding} x {self.world_size}")
        if self.ds_config is not None:
            parts.append(f"ds_config={Path(self.ds_config).name}")
        for name in ("offload_optimizer", "offload_param", "zero_init"):
            if getattr(self, name) != LEFT_OUT[(name,)]:
                parts.append(f"{name}={str(getattr(self, name)).lower()}")
        parts += [f"like {package} {version}" for package, version in self.versions.items()]
        if self.model.trust_remote_code:
            parts.append("its own code")
        for name in SIMULATED[1:]:
            if getattr(self.device, name) != LEFT_OUT["device", name]:
                parts.append(f"device.{name}={getattr(self.device, name)}")
        if self.data != LEFT_OUT[("data",)]:
            drawn_from = lengths.file(self.data)
            parts.append(f"data={self.data if drawn_from is None else lengths.PREFIX + drawn_from.name}")
        parts += techniques.changed(self)
        if self.allocator.conf:
            parts.append(self.allocator.name)
        return " · ".join(parts)

    def _command_label(self) -> str:
        """What a script is called and told."""
        told = script.names(str(self.runner.command))
        parts = [self.model.name]
        for name, words in (("seq_len", "seq"), ("micro_batch", "batch")):
            parts += [f"{words} {getattr(self, name)}"] * (name in told)
        others = [name for name in script.UNSAID if name in told - {"seq_len", "micro_batch"}]
        parts += [f"{name}={techniques.text(getattr(self, name))}" for name in others]
        parts += [f"{name}={techniques.text(value)}" for name, value in self.runner.options.items()]
        parts += [f"x {self.world_size}"] * (self.world_size > 1)
        return " · ".join([*parts, *([self.allocator.name] if self.allocator.conf else [])])


def trial_id(resolved: Mapping[str, Any]) -> str:
    """16 hex digits over the canonical JSON of `identity`."""
    text = json.dumps(identity(resolved), sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """What of a resolved trial changes the measurement, and by which version of the program it is measured."""
    prints = resolved.get("fingerprints")
    content = prints if isinstance(prints, Mapping) else {}

    def pruned(value: Any, at: tuple[str, ...]) -> Any:
        """The value without names and defaults; None where nothing is left."""
        if at in VERBATIM:
            return value or None
        if isinstance(value, Mapping):
            kept = {str(k): p for k, v in value.items() if (p := pruned(v, (*at, str(k)))) is not None}
            return kept or None
        custom_name = at == ("model", "name") and _name(resolved, "runner") == "custom"
        if at in NAMES and not custom_name:
            return None
        if at in LEFT_OUT and type(value) is type(LEFT_OUT[at]) and value == LEFT_OUT[at]:
            return None
        if at in FILES and isinstance(value, str):
            return _by_content(value, content)
        if at == ("runner", "command") and content:
            return {"words": value, "files": sorted(content.values())}
        return {"null": None} if value is None else value

    kept = {key: p for key, v in resolved.items() if key != "fingerprints" and (p := pruned(v, (key,))) is not None}
    return {"id": ID_VERSION, "measurement": _measurement(resolved), "trial": kept}


def _by_content(name: str, content: Mapping[str, Any]) -> Any:
    """A file's digest, or those of the files in a folder, in place of its name; the name where it has none."""
    if (lengths_file := lengths.file(name)) is not None:
        return [lengths.PREFIX, content.get(str(lengths_file), str(lengths_file))]
    path, colon, function = name.rpartition(":")
    if colon and str(Path(path)) in content:
        return [content[str(Path(path))], function]
    place = Path(name)
    return sorted(digest for file, digest in content.items() if place in (Path(file), Path(file).parent)) or name


def _measurement(resolved: Mapping[str, Any]) -> dict[str, Any]:
    runners = {entry.name: entry.measurement for entry in registry.RUNNERS}
    shardings = {entry.name: entry.measurement for entry in registry.SHARDINGS}
    versions = {
        "runner": runners.get(str(_name(resolved, "runner"))),
        "sharding": shardings.get(str(resolved.get("sharding", "none"))),
        "simulation": SIMULATION if _name(resolved, "device") == "simulated" else None,
    }
    return {key: value for key, value in versions.items() if value not in (None, 1)}


def _name(resolved: Mapping[str, Any], axis: str) -> Any:
    value = resolved.get(axis)
    return value.get("name") if isinstance(value, Mapping) else None


def parse(values: Mapping[str, Any]) -> Trial:
    """A Trial from plain values, with the allocator text made canonical and named local files fingerprinted.

    Raises InvalidTrial if a value has the wrong type or range, or if the combination breaks a rule.
    """
    if (why := plain_json.problem(dict(values), 1 << 63)) is not None:
        raise InvalidTrial(why)
    try:
        trial = Trial.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        where, given = ".".join(str(part) for part in first["loc"]), describe(first["input"])
        if where.startswith("versions.") and first["type"] == "string_type":
            raise InvalidTrial(f"{where} = {given} is a number; write a whole version, as 0.14.2") from None
        near = ""
        if first["type"] == "literal_error" and isinstance(first["input"], str):
            near = mistakes.meant(first["input"], re.findall(r"'([^']*)'", first["ctx"]["expected"]))
        raise InvalidTrial(f"{where} = {given}: {first['msg'][0].lower()}{first['msg'][1:]}{near}") from None
    try:
        conf = allocator_config.parse(trial.allocator.conf)
    except allocator_config.AllocatorConfigError as error:
        raise InvalidTrial(f"allocator {trial.allocator.name}: {error}") from None
    allocator = trial.allocator.model_copy(update={"conf": conf.render()})
    trial = trial.model_copy(update={"allocator": allocator, "fingerprints": _fingerprints(trial)})
    for reason in (*registry.rules(trial), *techniques.rules(trial), *(rule(trial) for rule in RULES)):
        if reason:
            raise InvalidTrial(reason)
    return trial


def _fingerprints(trial: Trial) -> dict[str, str]:
    named = script.files(trial) if trial.runner.command else _named(trial)  # a command reads its models and data itself
    try:
        return {str(path): _fingerprint(path) for path in named if lengths.is_file(path)}
    except OSError as error:
        raise InvalidTrial(f"{error.filename} cannot be read: {error.strerror}; make it readable") from None


def _fingerprint(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def unchanged(trial: Trial) -> None:
    """Nothing, as long as the files that the trial names are those whose contents it is known by.

    Raises EnvironmentFault otherwise: a row would tell of other contents than its id does. No InvalidTrial, which is
    for good: with the file put back, the trial can run.
    """
    for path, fingerprint in trial.fingerprints.items():
        if not lengths.is_file(Path(path)) or _fingerprint(path) != fingerprint:
            raise EnvironmentFault(lengths.CHANGED.format(path))


def _named(trial: Trial) -> list[Path]:
    """The files that a trial's settings name."""
    named = []
    if trial.runner.target:
        named.append(Path(trial.runner.target.rpartition(":")[0]))
    if trial.model.path:
        named.append(Path(trial.model.path) / "config.json")
        if trial.model.trust_remote_code:
            named += sorted(Path(trial.model.path).glob("*.py"))
        if trial.data != "synthetic" and not lengths.named(trial.data):
            named.append(Path(trial.model.path) / "tokenizer.json")
    if trial.data != "synthetic":
        named.append(lengths.file(trial.data) or Path(trial.data))
    if trial.ds_config is not None:
        named.append(Path(trial.ds_config))
    return named


def _model(trial: Trial) -> str | None:
    if trial.runner.name in techniques.OWN:
        return None
    if (trial.model.model_type is None) == (trial.model.path is None):
        return "model: give either a shipped architecture or model.path (a local directory or hub id)"
    if trial.weights == "pretrained" and trial.model.path is None:
        return "weights=pretrained needs model.path (a local directory or hub id): model=hub model.path=..."
    if trial.data != "synthetic" and not lengths.named(trial.data) and trial.model.path is None:
        return (
            "a text data set needs a tokenizer, so model.path (a local directory or hub id): model=hub model.path=..."
        )
    return None


def _remote_code(trial: Trial) -> str | None:
    if not trial.model.trust_remote_code:
        return None
    if trial.runner.name in techniques.OWN:
        return f"model.trust_remote_code: runner={trial.runner.name} loads its model itself, as it wants; leave it out"
    if trial.model.path is None:
        return "model.trust_remote_code needs a model that brings code: model=hub model.path=...; leave it out"
    return None


def _positions(trial: Trial) -> str | None:
    limit = trial.model.max_positions
    if limit is not None and trial.runner.name not in techniques.OWN and trial.seq_len > limit:
        return f"seq_len {trial.seq_len} is longer than {trial.model.name}'s {limit} positions"
    return None


def _device(trial: Trial) -> str | None:
    if trial.device.name == "simulated":
        return _simulated(trial)
    given = [name for name in SIMULATED if getattr(trial.device, name) not in (None, LEFT_OUT["device", name])]
    if given:
        return f"device.{given[0]} belongs to device=simulated, not {trial.device.name}; leave it out"
    if trial.device.name == "cuda":
        return None
    if trial.allocator.conf:
        return (
            f"allocator {trial.allocator.name}: the CUDA allocator is not in use on device=cpu; use allocator=default"
        )
    own = trial.runner.name == "script"
    if trial.precision == "fp16" and trial.sharding not in registry.ZERO and not own:
        return "precision fp16 (autocast with GradScaler) is not supported on device=cpu; use bf16"
    return None


def _simulated(trial: Trial) -> str | None:
    if trial.device.gpu not in {gpu.name for gpu in GPUS}:
        names = sorted(gpu.name for gpu in GPUS)
        near = mistakes.meant(str(trial.device.gpu), names)
        return (
            f"device=simulated: device.gpu is {trial.device.gpu}, which is not listed; choose one of "
            f"{', '.join(names)}, or say what it has: device.memory_gib=8 device.capability=7.5{near}"
        )
    if trial.device.capability is not None and trial.device.memory_gib is None:
        return f"device.capability={trial.device.capability} needs device.memory_gib: how much memory the card has"
    card = trial.device.card
    if gpus.memory_limit(card) <= 0:
        return f"{card.name} has no memory left beside its CUDA context and device.headroom_gib; give it more, or less"
    for name, between_nodes in (("link", False), ("interconnect", True)):
        chosen, listed = getattr(trial.device, name), links.names(between_nodes)
        if chosen is not None and chosen not in listed:
            near = mistakes.meant(chosen, listed)
            return f"device.{name} is {chosen}, which is not listed; choose one of {', '.join(listed)}{near}"
    conf = allocator_config.parse(trial.allocator.conf)
    if conf.throw_on_cudamalloc_oom:
        return (
            f"allocator {trial.allocator.name}: throw_on_cudamalloc_oom cannot be simulated; leave it out, it only "
            "changes how a failure is met"
        )
    if conf.backend != "native":
        return (
            f"allocator {trial.allocator.name}: cudaMallocAsync follows the driver's own policy and cannot be "
            "simulated; measure it on device=cuda"
        )
    if trial.weights == "pretrained" and trial.quantization != "none":
        return (
            f"weights=pretrained with quantization={trial.quantization} cannot be simulated; use weights=random, which "
            "takes the same memory on the card"
        )
    return None


def _allocator(trial: Trial) -> str | None:
    conf = allocator_config.parse(trial.allocator.conf)
    if trial.record and (trial.device.name != "cuda" or conf.backend != "native"):
        return "record=true needs device=cuda and PyTorch's native allocator: no other keeps a history of its events"
    torch = techniques.version("torch")
    found = allocator_config.unknown_options(conf, torch) if torch is not None else []
    return f"allocator {trial.allocator.name}: {found[0]}" if found else None


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


def _job(trial: Trial) -> str | None:
    if not trial.protocol.job:
        return None
    if trial.device.name == "simulated":
        return (
            "protocol=job cannot be simulated: loading, evaluation and checkpoints are measured on device=cuda or cpu"
        )
    if trial.runner.name not in ("script", "trainer"):
        return f"protocol=job is for runner=trainer and scripts (vramsweep run), not runner={trial.runner.name}"
    if trial.runner.name == "trainer" and trial.sharding != "none":
        return f"protocol=job with sharding={trial.sharding} is for scripts: vramsweep run protocol=job ..."
    return None


def _script(trial: Trial) -> str | None:
    if trial.runner.name == "script":
        return next(script.wrong(trial), None)
    if not trial.runner.stop:
        return (
            f"runner.stop belongs to runner=script, not {trial.runner.name}: the others end with the protocol's steps"
        )
    return f"runner.command belongs to runner=script, not {trial.runner.name}" if trial.runner.command else None


RULES: tuple[Callable[[Trial], str | None], ...] = (
    _model,
    _remote_code,
    _positions,
    _device,
    _allocator,
    _custom,
    _script,
    _job,
    lengths.wrong,
    differences.rule,
)
