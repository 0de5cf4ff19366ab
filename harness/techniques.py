"""Settings that trade memory, time or exactness: an axis each, and an entry for every value that an axis can take.

A new technique is an entry in `TECHNIQUES`, a module under runners/techniques/ that applies it, and a test. A new axis
is an entry in `AXES`, a field of harness.trial.Trial and a line in conf/config.yaml; its column, its place in figures
and its default in ids follow. Trials are checked here, workers import what the entries name.

Not covered: who drives the loop and how ranks divide the work (registry.py), the allocator (allocator/config.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from vramsweep.harness import gpus

if TYPE_CHECKING:
    from vramsweep.harness.trial import Trial

Rule = Callable[["Trial"], str | None]


@dataclass(frozen=True)
class Axis:
    """A setting of a trial, a column of its row. `default` is what ids leave out, so it never changes.

    `of` names the axis, and its values, to which this one belongs: elsewhere only the default is allowed.
    """

    name: str
    kind: type
    default: Any
    meaning: str
    of: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Package:
    """An optional package that a measured run imports; a prediction does without."""

    name: str
    least: str

    def missing(self) -> str | None:
        """What is wrong with what is installed; None if it will do."""
        found = version(self.name)
        if found is not None and _numbers(found) >= _numbers(self.least):
            return None
        have = "which is not installed" if found is None else f"at least {self.least}, and {found} is installed"
        return f"{self.name}, {have}: pip install '{self.name}>={self.least}'"


@dataclass(frozen=True)
class Technique:
    """One value of an axis.

    `module` applies it (runners/techniques/__init__.py says how). `packages` are what measuring needs, `preload`
    the modules that a template imports for it, `capability` the least CUDA compute capability, measured or simulated. `runners` and `shardings` are those that it works with (None:
    all); custom targets apply what they want themselves. `excludes` are values of other settings that do not go with
    it, each with the reason and the way out: (setting, values, text). `optim` is its name in TrainingArguments.

    `checked` says how the tests check it: "cpu" (trains real steps there), "simulated" (the size of the predicted
    effect), "gpu" (a test that needs a card). `proven` is on what card it was seen to behave as predicted, and where
    that is recorded; None is shown as unproven. `source` is where its behaviour is documented.
    """

    axis: str
    name: Any
    meaning: str
    module: str | None = None
    packages: tuple[Package, ...] = ()
    preload: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    runners: tuple[str, ...] = ("torch", "trainer", "deepspeed")
    shardings: tuple[str, ...] | None = None
    excludes: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    rules: tuple[Rule, ...] = ()
    optim: str | None = None
    checked: tuple[str, ...] = ()
    proven: str | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.axis}={text(self.name)}"


AXES = (
    Axis("precision", str, None, "of weights and arithmetic"),
    Axis("quantization", str, "none", "of frozen base weights"),
    Axis("adapter", str, "none", "small trainable weights beside frozen ones"),
    Axis("lora_r", int, 16, "rank of the adapters", of=("adapter", ("lora",))),
    Axis("lora_alpha", int, 16, "scale of the adapters", of=("adapter", ("lora",))),
    Axis("lora_dropout", float, 0.0, "dropout before the adapters", of=("adapter", ("lora",))),
    Axis(
        "lora_target_modules",
        str,
        "all-linear",
        "which layers get adapters: names joined by +, or all-linear (all but the output layer)",
        of=("adapter", ("lora",)),
    ),
    Axis("attention", str, "sdpa", "attention implementation as asked for"),
    Axis("kernels", str, "none", "fused kernels in the place of the model's own layers"),
    Axis("loss", str, "default", "how logits and cross entropy are computed"),
    Axis("checkpointing", str, "none", "which activations are recomputed in the backward pass"),
    Axis(
        "checkpointing_every",
        int,
        1,
        "only every so many-th layer, the first of them included",
        of=("checkpointing", ("full", "selective")),
    ),
    Axis(
        "checkpointing_reentrant",
        bool,
        False,
        "torch.utils.checkpoint's older implementation (use_reentrant)",
        of=("checkpointing", ("full",)),
    ),
    Axis(
        "checkpointing_ops",
        str,
        "default",
        "operators whose results are kept, names joined by +; default: matrix products and attention",
        of=("checkpointing", ("selective",)),
    ),
    Axis("activation_offload", bool, False, "what autograd saves for the backward pass waits in host memory"),
    Axis("compile", str, "none", "torch.compile, and in which mode"),
    Axis("optimizer", str, "default", "optimizer as asked for, mostly by its name in TrainingArguments (optim)"),
    Axis("no_sync", bool, True, "gradients are averaged with the last of the accumulated passes only (ddp)"),
    Axis("padding", float, 0.0, "share of the tokens of synthetic samples that is padding"),
    Axis("padding_side", str, "right", "where padding stands"),
    Axis("packing", str, "none", "several documents in one sample"),
    Axis("use_cache", str, "default", "the model's key-value cache, which training has no use for"),
)

BITSANDBYTES = (Package("bitsandbytes", "0.44"),)  # blocks of 2,048 elements before
TORCHAO = (Package("torchao", "0.11"),)  # torchao.optim; prototypes before
NO_DTENSOR = (("sharding", ("fsdp2",), "it does not take FSDP2's sharded tensors (DTensor); use optimizer=adamw_torch, or "
               "sharding=zero2"),)  # fmt: skip
NOT_PAGED = (("device", ("cpu",), "bitsandbytes pages nothing there; use the optimizer of that name without paged"),
             ("offload_optimizer", (True,), "what is offloaded steps in host memory, where nothing is paged; leave one "
              "of them out"))  # fmt: skip


def _fused_under_deepspeed(trial: Trial) -> str | None:
    if trial.runner.name == "deepspeed" and trial.device.name == "cpu":
        return "optimizer adamw_torch_fused with deepspeed needs CUDA; on device=cpu use adamw_torch"
    return None


# fmt: off
TECHNIQUES: tuple[Technique, ...] = (
    # precision
    Technique("precision", "fp32", "fp32 everywhere; TF32 off", checked=("cpu", "simulated")),
    Technique("precision", "tf32", "fp32 weights, matrix products in TF32", checked=("simulated",), excludes=(
        ("device", ("cpu",), "it is a mode of CUDA tensor cores; on device=cpu use fp32"),)),
    Technique("precision", "bf16", "fp32 weights, autocast to bf16 (DeepSpeed: bf16 weights with fp32 master copies)",
              checked=("cpu", "simulated")),
    Technique("precision", "fp16", "fp32 weights, autocast to fp16 with GradScaler (DeepSpeed: fp16 weights with fp32 "
              "master copies)", checked=("simulated",)),
    Technique("precision", "bf16_pure", "weights, gradients and optimizer state in bf16; no autocast",
              checked=("cpu", "simulated")),
    Technique("precision", "bf16_master", "bf16 weights, fp32 master copies of them for the optimizer; no autocast",
              module="vramsweep.runners.techniques.master", runners=("torch",), checked=("cpu", "simulated"), excludes=(
        ("runner", ("deepspeed",), "DeepSpeed's bf16 is just that: use precision=bf16"),
        ("runner", ("trainer",), "the Trainer keeps no master copies; use runner=torch, or precision=bf16, which keeps "
         "the weights themselves in fp32"),
        ("sharding", ("ddp", "fsdp2"), "the copies are not divided; use sharding=none, or runner=deepspeed with "
         "precision=bf16, whose copies are")),
              source="https://arxiv.org/abs/1710.03740"),
    # quantization
    Technique("quantization", "none", "weights as the precision says"),
    # adapter
    Technique("adapter", "none", "all weights are trained"),
    # attention
    Technique("attention", "sdpa", "torch's scaled_dot_product_attention, which picks a kernel", checked=("cpu",)),
    Technique("attention", "eager", "the formula, whose scores are stored", checked=("cpu", "simulated")),
    Technique("attention", "flash_attention_2", "the flash-attn package", excludes=(
        ("device", ("cpu",), "it needs CUDA; on device=cpu use sdpa"),
        ("device", ("simulated",), "it cannot be simulated; sdpa runs the same flash kernel in half precision"))),
    # kernels
    Technique("kernels", "none", "the model's own"),
    # loss
    Technique("loss", "default", "what the model and the kernels choose"),
    # checkpointing
    Technique("checkpointing", "none", "nothing is recomputed"),
    Technique("checkpointing", "full", "each layer keeps its input and recomputes the rest",
              module="vramsweep.runners.techniques.checkpointing", checked=("cpu", "simulated"),
              source="https://docs.pytorch.org/docs/stable/checkpoint.html"),
    # activation_offload
    Technique("activation_offload", False, "it stays on the device"),
    # compile
    Technique("compile", "none", "eager"),
    # optimizer
    Technique("optimizer", "default", "AdamW as torch chooses to run it (the Trainer's own default: fused)",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated")),
    Technique("optimizer", "adamw_torch", "AdamW as torch chooses to run it: foreach on CUDA", optim="adamw_torch",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated")),
    Technique("optimizer", "adamw_torch_fused", "AdamW in one kernel, no temporaries", optim="adamw_torch_fused",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated"),
              rules=(_fused_under_deepspeed,)),
    Technique("optimizer", "adamw_torch_foreach", "AdamW on all parameters at once, with temporaries of their size",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated")),
    Technique("optimizer", "adamw_torch_loop", "AdamW parameter by parameter (foreach=False), small temporaries",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated")),
    Technique("optimizer", "sgd", "SGD without momentum: no state", optim="sgd",
              module="vramsweep.runners.techniques.sgd", checked=("cpu", "simulated")),
    Technique("optimizer", "sgd_momentum", "SGD with a momentum of 0.9: one value a parameter",
              module="vramsweep.runners.techniques.sgd", checked=("cpu", "simulated")),
    Technique("optimizer", "adafactor", "transformers' Adafactor: a value a row and a column", optim="adafactor",
              module="vramsweep.runners.techniques.adafactor", checked=("cpu", "simulated"), excludes=NO_DTENSOR,
              source="https://arxiv.org/abs/1804.04235"),
    Technique("optimizer", "adamw_bnb_8bit", "bitsandbytes' AdamW, state in 8 bits", optim="adamw_bnb_8bit",
              module="vramsweep.runners.techniques.bnb", packages=BITSANDBYTES, checked=("cpu", "simulated"),
              excludes=NO_DTENSOR, source="https://huggingface.co/docs/bitsandbytes/main/en/optimizers"),
    Technique("optimizer", "paged_adamw_8bit", "the same in managed memory: not torch's, NVML sees what is on the card",
              optim="paged_adamw_8bit", module="vramsweep.runners.techniques.bnb", packages=BITSANDBYTES,
              checked=("simulated", "gpu"), excludes=NO_DTENSOR + NOT_PAGED,
              source="https://huggingface.co/docs/bitsandbytes/main/en/optimizers"),
    Technique("optimizer", "paged_adamw_32bit", "bitsandbytes' AdamW, state in fp32, in managed memory",
              optim="paged_adamw_32bit", module="vramsweep.runners.techniques.bnb", packages=BITSANDBYTES,
              checked=("simulated", "gpu"), excludes=NO_DTENSOR + NOT_PAGED,
              source="https://huggingface.co/docs/bitsandbytes/main/en/optimizers"),
    Technique("optimizer", "lion_32bit", "bitsandbytes' Lion: one fp32 value a parameter", optim="lion_32bit",
              module="vramsweep.runners.techniques.bnb", packages=BITSANDBYTES, checked=("cpu", "simulated"),
              excludes=NO_DTENSOR, source="https://arxiv.org/abs/2302.06675"),
    Technique("optimizer", "lion_8bit", "the same in 8 bits", optim="lion_8bit",
              module="vramsweep.runners.techniques.bnb", packages=BITSANDBYTES, checked=("cpu", "simulated"),
              excludes=NO_DTENSOR, source="https://huggingface.co/docs/bitsandbytes/main/en/optimizers"),
    Technique("optimizer", "paged_lion_8bit", "the same in managed memory", optim="paged_lion_8bit",
              module="vramsweep.runners.techniques.bnb", packages=BITSANDBYTES, checked=("simulated", "gpu"),
              excludes=NO_DTENSOR + NOT_PAGED, source="https://huggingface.co/docs/bitsandbytes/main/en/optimizers"),
    Technique("optimizer", "adamw_torch_8bit", "torchao's AdamW, state in 8 bits, compiled", optim="adamw_torch_8bit",
              module="vramsweep.runners.techniques.ao", packages=TORCHAO, capability=(7, 0),
              checked=("cpu", "simulated"), excludes=NO_DTENSOR,
              source="https://github.com/pytorch/ao/tree/main/torchao/optim"),
    Technique("optimizer", "adamw_torch_4bit", "torchao's AdamW, state in 4 bits, compiled", optim="adamw_torch_4bit",
              module="vramsweep.runners.techniques.ao", packages=TORCHAO, capability=(7, 0),
              checked=("cpu", "simulated"), excludes=NO_DTENSOR,
              source="https://github.com/pytorch/ao/tree/main/torchao/optim"),
    Technique("optimizer", "deepspeed_fused_adam", "DeepSpeed's FusedAdam (ds_config's AdamW): no temporaries",
              module="vramsweep.runners.techniques.ds_adam", runners=("deepspeed",), checked=("simulated", "gpu"),
              excludes=(("device", ("cpu",), "its kernel needs CUDA; on device=cpu use adamw_torch"),
                        ("offload_optimizer", (True,), "it steps on the card; use deepspeed_cpu_adam")),
              source="https://deepspeed.readthedocs.io/en/latest/optimizers.html"),
    Technique("optimizer", "deepspeed_cpu_adam", "DeepSpeedCPUAdam (ds_config's AdamW with offload)",
              module="vramsweep.runners.techniques.ds_adam", runners=("deepspeed",), checked=("cpu", "simulated"),
              excludes=(("offload_optimizer", (False,), "it steps in host memory; add offload_optimizer=true, or use "
                         "deepspeed_fused_adam"),),
              source="https://deepspeed.readthedocs.io/en/latest/optimizers.html"),
    # no_sync
    Technique("no_sync", True, "DistributedDataParallel.no_sync"),
    Technique("no_sync", False, "gradients are averaged after every accumulated pass", runners=("torch",),
              shardings=("ddp",)),
    # data
    Technique("padding_side", "right", "after the text"),
    Technique("packing", "none", "one document a sample"),
    Technique("use_cache", "default", "the runner's own way: off, but for the Trainer before transformers 5"),
)
# fmt: on
_BY_AXIS: dict[str, dict[Any, Technique]] = {}
for _entry in TECHNIQUES:
    _BY_AXIS.setdefault(_entry.axis, {})[_entry.name] = _entry
DEFAULTS = {axis.name: axis.default for axis in AXES if axis.default is not None}


@cache
def version(package: str) -> str | None:
    """The installed version of a package, None if it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def values(axis: str) -> tuple[Any, ...]:
    """The names of an axis's techniques; empty for one that takes a number or a text."""
    return tuple(_BY_AXIS.get(axis, ()))


def entries(axis: str) -> tuple[Technique, ...]:
    """The entries of an axis; empty for one that takes a number or a text."""
    return tuple(_BY_AXIS.get(axis, {}).values())


def text(value: Any) -> str:
    """A value as it is typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def technique(axis: str, name: Any) -> Technique:
    """The entry of one value of an axis. Raises KeyError for one that is not there."""
    return _BY_AXIS[axis][name]


def chosen(trial: Trial) -> tuple[Technique, ...]:
    """The entries of the trial's values, in the order of the axes; those of a custom target are its own to apply."""
    found = (_BY_AXIS[axis.name].get(getattr(trial, axis.name)) for axis in AXES if axis.name in _BY_AXIS)
    return tuple(entry for entry in found if entry is not None)


def unproven(trial: Trial) -> list[str]:
    """The techniques of a trial, beyond the defaults, that no card has been seen to run as predicted."""
    return [str(t) for t in chosen(trial) if t.proven is None and t.name != DEFAULTS.get(t.axis)]


def rules(trial: Trial) -> Iterator[str | None]:
    """What the tables say against a trial, reason by reason; None where they say nothing."""
    for axis in AXES:
        yield _known(trial, axis)
    if trial.runner.name == "custom":
        return
    for entry in chosen(trial):
        yield _fits(trial, entry)
        for rule in entry.rules:
            yield rule(trial)


def _known(trial: Trial, axis: Axis) -> str | None:
    value = getattr(trial, axis.name)
    allowed = values(axis.name)
    if allowed and value not in allowed:
        return f"{axis.name}={value}: there is no such {axis.name}; choose one of {', '.join(map(str, allowed))}"
    if axis.of is not None and value != axis.default and trial.runner.name != "custom":
        other, needed = axis.of
        if getattr(trial, other) not in needed:
            return f"{axis.name} belongs to {other}={' or '.join(needed)}, not {other}={getattr(trial, other)}"
    return None


def _fits(trial: Trial, entry: Technique) -> str | None:
    elsewhere = trial.runner.name not in entry.runners
    for setting, excluded, why in entry.excludes:
        value = getattr(trial, setting)
        value = getattr(value, "name", value)  # a node: runner, device
        if value in excluded and (setting == "runner" or not elsewhere):
            return f"{entry} with {setting}={text(value)}: {why}"
    if elsewhere:
        return f"{entry} needs runner={' or '.join(entry.runners)}, not {trial.runner.name}"
    if entry.shardings is not None and trial.sharding not in entry.shardings:
        return f"{entry} needs sharding={' or '.join(entry.shardings)}, not {trial.sharding}"
    if trial.device.name == "simulated" and entry.capability is not None:
        card = next((gpu for gpu in gpus.GPUS if gpu.name == trial.device.gpu), None)
        if card is not None and card.capability < entry.capability:
            needed, has = (".".join(map(str, c)) for c in (entry.capability, card.capability))
            return f"{entry} needs compute capability {needed}, and {card.name} has {has}"
    if trial.device.name != "simulated":
        lacking = next((said for package in entry.packages if (said := package.missing())), None)
        if lacking:
            return f"{entry} needs {lacking} (device=simulated predicts without)"
    return None


def preloads(trial: Trial) -> tuple[Technique, ...]:
    """The techniques for which a template had better import something before it forks the trial's worker."""
    if trial.runner.name == "custom" or trial.device.name == "simulated":
        return ()
    return tuple(entry for entry in chosen(trial) if entry.preload)


def markdown_table() -> str:
    """The techniques as a table for the documentation."""
    lines = ["**techniques**", "", "| setting | what it does | needs | runners | checked | on a card |"]
    lines += ["|---|---|---|---|---|---|"]
    for entry in TECHNIQUES:
        star = " (default)" if DEFAULTS.get(entry.axis) == entry.name else ""
        known = entry.proven or "unproven"
        lines.append(
            f"| `{entry}`{star} | {entry.meaning} | {needs(entry)} | {', '.join(entry.runners)} | "
            f"{', '.join(entry.checked)} | {known} |"
        )
    settings = [axis for axis in AXES if axis.name not in _BY_AXIS]
    lines += ["", "| setting | default | meaning |", "|---|---|---|"]
    lines += [f"| `{a.name}` | `{a.default}` | {a.meaning}{_belongs(a)} |" for a in settings]
    return "\n".join(lines) + "\n"


def needs(entry: Technique) -> str:
    """What measuring needs, in words."""
    parts = [f"{package.name} >= {package.least}" for package in entry.packages]
    if entry.capability is not None:
        parts.append("compute capability " + ".".join(map(str, entry.capability)))
    return ", ".join(parts)


def sentence(entry: Technique) -> str:
    """What the terminal says of an entry: what it does, where it does not go, what it needs, how far it is proven."""
    parts = [entry.meaning]
    if needed := needs(entry):
        parts.append(f"needs {needed} to be measured")
    if entry.runners != Technique.runners:
        parts.append(f"runner={' or '.join(entry.runners)} only")
    parts += [f"not {setting}={'/'.join(map(text, names))} ({why})" for setting, names, why in entry.excludes]
    if entry.name != DEFAULTS.get(entry.axis):
        parts.append(f"on a card: {entry.proven or 'unproven'}")
    return "; ".join(parts)


def described(axis: Axis) -> dict[str, Any]:
    """An axis and its entries as plain values."""
    plain = ("name", "meaning", "capability", "runners", "shardings", "excludes", "checked", "proven", "source")
    return {
        "axis": axis.name,
        "type": axis.kind.__name__,
        "default": axis.default,
        "meaning": axis.meaning,
        "of": axis.of,
        "values": [
            {name: getattr(entry, name) for name in plain}
            | {"packages": [f"{package.name}>={package.least}" for package in entry.packages]}
            for entry in entries(axis.name)
        ],
    }


def _belongs(axis: Axis) -> str:
    return "" if axis.of is None else f" (with `{axis.of[0]}={' or '.join(axis.of[1])}`)"
