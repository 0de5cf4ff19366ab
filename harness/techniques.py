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

LIGER = Package("liger-kernel", "0.8.5")
TRITON = Package("triton", "3.0")
TORCHAO = Package("torchao", "0.18.0")
ALL_BUT_ZERO3 = ("none", "ddp", "fsdp2", "zero0", "zero1", "zero2")  # which gathers no weight outside its own layer
NOT_SIMULATED = ("device", ("simulated",), "a compiler fuses operators and plans memory anew; compile=none predicts "
                 "the eager figure")  # fmt: skip
NO_GRAPHS = ("device", ("cpu",), "it launches CUDA graphs; on device=cpu use compile=default")


def _fp8_alone(trial: Trial) -> str | None:
    for axis in ("quantization", "adapter"):
        if getattr(trial, axis) != "none":
            return f"precision=fp8 with {axis}={getattr(trial, axis)} is not supported; use precision=bf16"
    return None


def _fp8_tokens(trial: Trial) -> str | None:
    tokens = trial.micro_batch * trial.seq_len
    if tokens % 16:
        return (
            f"precision=fp8 needs a multiple of 16 tokens in a micro-batch, for its products with gradients, not "
            f"{tokens}; change seq_len or micro_batch"
        )
    return None


def _labels_are_left(trial: Trial) -> str | None:
    if trial.runner.options.get("label_smoothing_factor"):
        return (
            "runner.options.label_smoothing_factor takes the loss out of the model, and "
            f"loss={trial.loss} would not be used; leave one of them out"
        )
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
    Technique("precision", "fp8", "fp32 weights, autocast to bf16, and the products of linear layers in float8 "
              "(torchao's dynamic tensorwise scaling; not the output layer, nor layers with a dimension that 16 does "
              "not divide); slow and large unless it is compiled",
              module="vramsweep.runners.techniques.fp8", packages=(TORCHAO,), preload=("torchao.float8",),
              capability=(8, 9), runners=("torch", "trainer"), shardings=("none", "ddp"),
              rules=(_fp8_alone, _fp8_tokens),
              excludes=(("device", ("cpu",), "it needs float8 tensor cores; on device=cpu use bf16"),),
              checked=("simulated", "gpu"), source="https://docs.pytorch.org/ao/stable/workflows/training.html"),
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
    Technique("kernels", "liger", "Liger's RMSNorm, SwiGLU and rotary embedding, and with loss=default its fused "
              "linear cross entropy", module="vramsweep.runners.techniques.liger", packages=(LIGER, TRITON),
              preload=("liger_kernel.transformers",), shardings=ALL_BUT_ZERO3,
              excludes=(("device", ("cpu",), "its kernels need CUDA; on device=cpu use kernels=none"),),
              checked=("simulated", "gpu"), source="https://github.com/linkedin/Liger-Kernel"),
    # loss
    Technique("loss", "default", "transformers' own, or Liger's with kernels=liger"),
    Technique("loss", "plain", "transformers' own: logits of all tokens, made fp32", checked=("cpu", "simulated")),
    Technique("loss", "no_upcast", "the same in the logits' own dtype", module="vramsweep.runners.techniques.loss",
              rules=(_labels_are_left,), checked=("cpu", "simulated")),
    Technique("loss", "chunked", "output layer and cross entropy of an eighth of the tokens at a time, computed again "
              "in the backward pass", module="vramsweep.runners.techniques.loss", shardings=ALL_BUT_ZERO3,
              rules=(_labels_are_left,), checked=("cpu", "simulated")),
    Technique("loss", "fused_linear", "Liger's fused linear cross entropy", module="vramsweep.runners.techniques.loss",
              packages=(LIGER, TRITON), preload=("liger_kernel.transformers",), shardings=ALL_BUT_ZERO3,
              excludes=(("device", ("cpu",), "its kernels need CUDA; on device=cpu use loss=chunked"),),
              rules=(_labels_are_left,), checked=("simulated", "gpu"), source="https://github.com/linkedin/Liger-Kernel"),
    # checkpointing
    Technique("checkpointing", "none", "nothing is recomputed"),
    Technique("checkpointing", "full", "each layer keeps its input and recomputes the rest",
              module="vramsweep.runners.techniques.checkpointing", checked=("cpu", "simulated"),
              source="https://docs.pytorch.org/docs/stable/checkpoint.html"),
    # activation_offload
    Technique("activation_offload", False, "it stays on the device"),
    # compile
    Technique("compile", "none", "eager"),
    *(Technique("compile", mode, meaning, module="vramsweep.runners.techniques.compiled", runners=("torch", "trainer"),
                shardings=("none",), excludes=(NOT_SIMULATED, *more), checked=checked,
                source="https://docs.pytorch.org/docs/stable/generated/torch.compile.html")
      for mode, meaning, more, checked in (
          ("default", "torch.compile of the whole model", (), ("cpu", "gpu")),
          ("reduce-overhead", "and its kernels launched as CUDA graphs", (NO_GRAPHS,), ("gpu",)),
          ("max-autotune", "and matrix products tuned by trying", (NO_GRAPHS,), ("gpu",)))),
    # optimizer
    Technique("optimizer", "default", "AdamW as torch chooses to run it (the Trainer's own default: fused)",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated")),
    Technique("optimizer", "adamw_torch", "AdamW as torch chooses to run it: foreach on CUDA", optim="adamw_torch",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated")),
    Technique("optimizer", "adamw_torch_fused", "AdamW in one kernel, no temporaries", optim="adamw_torch_fused",
              module="vramsweep.runners.techniques.adamw", checked=("cpu", "simulated")),
    Technique("optimizer", "sgd", "SGD without momentum: no state", optim="sgd",
              module="vramsweep.runners.techniques.sgd", checked=("cpu", "simulated")),
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
    if trial.runner.name not in entry.runners:
        return f"{entry} needs runner={' or '.join(entry.runners)}, not {trial.runner.name}"
    if entry.shardings is not None and trial.sharding not in entry.shardings:
        return f"{entry} needs sharding={' or '.join(entry.shardings)}, not {trial.sharding}"
    for setting, excluded, why in entry.excludes:
        value = getattr(trial, setting)
        value = getattr(value, "name", value)  # a node: runner, device
        if value in excluded:
            return f"{entry} with {setting}={text(value)}: {why}"
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
