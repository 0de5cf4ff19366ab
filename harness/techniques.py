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

    `module` applies it (runners/techniques/__init__.py says how). `packages` are what measuring needs, `preload` the
    modules that a template imports for it, `capability` the least CUDA compute capability, measured or simulated.
    `runners` and `shardings` are those that it works with (None: all); custom targets apply what they want themselves.
    `excludes` are values of other settings that do not go with it, each with the reason and the way out: (setting,
    values, text). `optim` is its name in TrainingArguments.

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
    Axis("padding", float, 0.0, "share of the tokens of each synthetic sample that is padding"),
    Axis("padding_side", str, "right", "where padding stands"),
    Axis("packing", str, "none", "several documents in one sample"),
    Axis("use_cache", str, "default", "the model's key-value cache, which training has no use for"),
)

BITSANDBYTES = (Package("bitsandbytes", "0.44"),)  # blocks of 2,048 elements before
TORCHAO = (Package("torchao", "0.11"),)  # torchao.optim; prototypes before
NO_DTENSOR = (("sharding", ("fsdp2",), "its kernels do not take FSDP2's sharded tensors; use optimizer=adamw_torch, or "
               "sharding=zero2"),)  # fmt: skip
NOT_PAGED = (("device", ("cpu",), "bitsandbytes pages nothing there; use the optimizer of that name without paged"),
             ("offload_optimizer", (True,), "what is offloaded steps in host memory, where nothing is paged; leave one "
              "of them out"))  # fmt: skip


def _fused_under_deepspeed(trial: Trial) -> str | None:
    if trial.runner.name == "deepspeed" and trial.device.name == "cpu":
        return "optimizer adamw_torch_fused with deepspeed needs CUDA; on device=cpu use adamw_torch"
    return None

def _adapted(trial: Trial) -> str | None:
    if trial.adapter != "none":
        return None
    return f"quantization={trial.quantization}: frozen weights of 4 bits are not trained themselves; add adapter=lora"


def _checkpoint(trial: Trial) -> str | None:
    if trial.device.name == "simulated" or trial.weights == "pretrained":
        return None
    return (
        f"quantization={trial.quantization} is measured from a quantised checkpoint: model=hub model.path=... "
        "weights=pretrained (device=simulated predicts it for any model)"
    )


_PEFT = Package("peft", "0.17")
_QLORA = (_PEFT, Package("bitsandbytes", "0.46.1"))
_QLORA_GUIDE = "https://huggingface.co/docs/peft/developer_guides/quantization"
_HALF = (("precision", ("bf16_pure",), "what is not quantised is cast to fp32; use bf16 or fp16"),)
_WHOLE = ("none", "ddp", "zero0", "zero1", "zero2")  # shardings that leave each rank its own copy of the weights

LIGER = Package("liger-kernel", "0.8.5")
TRITON = Package("triton", "3.0")
TORCHAO = Package("torchao", "0.18.0")
ALL_BUT_ZERO3 = ("none", "ddp", "fsdp2", "zero0", "zero1", "zero2")  # which gathers no weight outside its own layer
NOT_SIMULATED = ("device", ("simulated",), "a compiler fuses operators and plans memory anew; compile=none predicts the "
                 "eager figure")  # fmt: skip
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
            f"precision=fp8 needs a multiple of 16 tokens in a micro-batch, for its products with gradients, not {tokens}; "
            "change seq_len or micro_batch"
        )
    return None


def _labels_are_left(trial: Trial) -> str | None:
    if trial.runner.options.get("label_smoothing_factor"):
        return (
            f"runner.options.label_smoothing_factor takes the loss out of the model, and loss={trial.loss} would not be "
            "used; leave one of them out"
        )
    return None


_ATTENTION = "vramsweep.runners.techniques.attention"
_CHECKPOINTING = "vramsweep.runners.techniques.checkpointing"
_SDP_BACKEND = "https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.SDPBackend.html"


def _half_precision(trial: Trial) -> str | None:
    if trial.device.name != "cpu" and trial.precision in ("fp32", "tf32"):
        return (
            f"attention={trial.attention} takes fp16 and bf16 only, not precision={trial.precision}; use bf16, or sdpa"
        )
    return None


def _maskless(trial: Trial) -> str | None:
    if trial.device.name == "cpu":  # where the flash kernel takes masks
        return None
    for given, asked in ((trial.padding > 0, "padding"), (trial.packing == "documents", "packing=documents")):
        if given:
            return f"attention=sdpa_flash takes no mask, which {asked} needs; use sdpa, sdpa_cudnn or flash_attention_2"
    return None


def _one_row(trial: Trial) -> str | None:
    if trial.packing == "documents" and trial.micro_batch > 1:
        return (
            "attention=flash_attention_2 keeps the documents of one sample apart, not of several (transformers, "
            "_is_packed_sequence); use micro_batch=1 with a longer seq_len, or sdpa"
        )
    return None


def _not_compiled(trial: Trial) -> str | None:
    if trial.compile != "none":
        return f"activation_offload with compile={trial.compile}: the compiler decides what is saved; use compile=none"
    return None


def _accumulating(trial: Trial) -> str | None:
    if trial.grad_accum == 1:
        return "no_sync=false changes nothing with grad_accum=1, after whose only pass gradients are averaged anyway"
    return None


def _padded(trial: Trial) -> str | None:
    if not trial.padding:
        return None
    if trial.data != "synthetic":
        return f"padding={trial.padding} is of data=synthetic; the samples of a text have the padding that they need"
    if trial.packing != "none":
        return f"padding={trial.padding} with packing={trial.packing}: packed samples have none; give one of them"
    if not 0 < round(trial.padding * trial.seq_len) < trial.seq_len:
        return f"padding={trial.padding} of seq_len={trial.seq_len} is no token or all of them; change one of them"
    return None


def _to_the_left(trial: Trial) -> str | None:
    if trial.packing != "none" or (trial.data == "synthetic" and not trial.padding):
        return (
            "padding_side=left changes nothing where samples have no padding; give padding=, or a text without packing"
        )
    return None


def _full(trial: Trial) -> str | None:
    if trial.packing == "documents" and trial.data == "synthetic" and trial.seq_len < 2:
        return "packing=documents needs a seq_len of at least 2"
    return None


def _uncached(trial: Trial) -> str | None:
    """transformers looks for documents where there is no cache only (masking_utils._preprocess_mask_arguments)."""
    cached = trial.runner.name == "trainer" and (_numbers(version("transformers") or "5")) < (5,)
    if trial.use_cache == "on" or (trial.use_cache == "default" and cached):
        return "packing=documents: with a key-value cache transformers does not keep documents apart; use use_cache=off"
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
    Technique("precision", "fp8", "fp32 weights, autocast to bf16, and the products of linear layers in float8 (torchao's "
              "dynamic tensorwise scaling; not the output layer, nor layers with a dimension that 16 does not divide)",
              module="vramsweep.runners.techniques.fp8", packages=(TORCHAO,), preload=("torchao.float8",),
              capability=(8, 9), runners=("torch", "trainer"), shardings=("none", "ddp"), rules=(_fp8_alone, _fp8_tokens),
              excludes=(("device", ("cpu",), "it needs float8 tensor cores; on device=cpu use bf16"),),
              checked=("simulated", "gpu"), source="https://docs.pytorch.org/ao/stable/workflows/training.html"),
    # quantization
    Technique("quantization", "none", "weights as the precision says"),
    Technique("quantization", "nf4", "linear layers but the output layer in bitsandbytes' 4 bits (NF4); the precision "
              "says their dtype before and that of the arithmetic, what is not quantised is fp32 (peft's "
              "prepare_model_for_kbit_training)", module="vramsweep.runners.techniques.nf4", packages=_QLORA,
              preload=("bitsandbytes", "peft"), shardings=_WHOLE,
              rules=(_adapted,), excludes=_HALF, checked=("cpu", "simulated"), source=_QLORA_GUIDE),
    Technique("quantization", "nf4_double", "as nf4, and the blocks' scales in 8 bits (double quantisation)",
              module="vramsweep.runners.techniques.nf4", packages=_QLORA, preload=("bitsandbytes", "peft"),
              shardings=_WHOLE, rules=(_adapted,), excludes=_HALF, checked=("cpu", "simulated"),
              source=_QLORA_GUIDE),
    Technique("quantization", "gptq", "linear layers but the output layer in GPTQ's 4 bits, groups of 128; the rest as "
              "the precision's half", module="vramsweep.runners.techniques.gptq",
              packages=(Package("gptqmodel", "7.0"), Package("optimum", "1.24")), preload=("gptqmodel",),
              runners=("torch", "trainer"), shardings=("none", "ddp"), rules=(_adapted, _checkpoint),
              checked=("simulated",),
              excludes=(("precision", ("fp32", "tf32", "bf16_pure"), "its kernels work in half precision; use bf16 or "
                         "fp16"),), source="https://huggingface.co/docs/transformers/quantization/gptq"),
    # adapter
    Technique("adapter", "none", "all weights are trained"),
    Technique("adapter", "lora", "low-rank matrices beside frozen linear layers (peft), in fp32 also where those are "
              "in half precision", module="vramsweep.runners.techniques.lora", packages=(_PEFT,), preload=("peft",),
              shardings=(*_WHOLE, "fsdp2"), checked=("cpu", "simulated"),
              source="https://huggingface.co/docs/peft/developer_guides/lora"),
    # attention
    Technique("attention", "sdpa", "torch's scaled_dot_product_attention, which picks a kernel (attention_kernels says "
              "which)", module=_ATTENTION, checked=("cpu", "simulated")),
    Technique("attention", "sdpa_flash", "scaled_dot_product_attention with its flash kernel only", module=_ATTENTION, source=_SDP_BACKEND,
              capability=(8, 0), checked=("cpu", "simulated", "gpu"), rules=(_half_precision, _maskless)),
    Technique("attention", "sdpa_efficient", "scaled_dot_product_attention with its memory-efficient kernel only",
              module=_ATTENTION, source=_SDP_BACKEND, capability=(5, 0), checked=("simulated", "gpu"), excludes=(
                  ("device", ("cpu",), "torch has this kernel for CUDA only; on device=cpu use sdpa"),)),
    Technique("attention", "sdpa_cudnn", "scaled_dot_product_attention with cuDNN's kernel only", module=_ATTENTION, source=_SDP_BACKEND,
              capability=(8, 0), checked=("simulated", "gpu"), rules=(_half_precision,), excludes=(
                  ("device", ("cpu",), "torch has this kernel for CUDA only; on device=cpu use sdpa"),)),
    Technique("attention", "sdpa_math", "scaled_dot_product_attention as the formula, whose scores are stored", module=_ATTENTION, source=_SDP_BACKEND,
              checked=("cpu", "simulated", "gpu")),
    Technique("attention", "eager", "the formula in the model's own code, whose scores are stored",
              module=_ATTENTION, checked=("cpu", "simulated")),
    Technique("attention", "flash_attention_2", "the flash-attn package: no copies for shared heads, none of padding",
              module=_ATTENTION, packages=(Package("flash-attn", "2.3"),), capability=(8, 0),
              checked=("simulated", "gpu"), rules=(_half_precision, _one_row), source="https://github.com/Dao-AILab/"
              "flash-attention", excludes=(("device", ("cpu",), "it needs CUDA; on device=cpu use sdpa"),)),
    # kernels
    Technique("kernels", "none", "the model's own"),
    Technique("kernels", "liger", "Liger's RMSNorm, SwiGLU and rotary embedding, and with loss=default its fused linear "
              "cross entropy", module="vramsweep.runners.techniques.liger", packages=(LIGER, TRITON),
              preload=("liger_kernel.transformers",), shardings=ALL_BUT_ZERO3,
              excludes=(("device", ("cpu",), "its kernels need CUDA; on device=cpu use kernels=none"),),
              checked=("simulated", "gpu"), source="https://github.com/linkedin/Liger-Kernel"),
    # loss
    Technique("loss", "default", "transformers' own, or Liger's with kernels=liger"),
    Technique("loss", "plain", "transformers' own: logits of all tokens, made fp32", checked=("cpu", "simulated")),
    Technique("loss", "no_upcast", "the same in the logits' own dtype", module="vramsweep.runners.techniques.loss",
              rules=(_labels_are_left,), checked=("cpu", "simulated")),
    Technique("loss", "chunked", "output layer and cross entropy of an eighth of the tokens at a time, computed again in "
              "the backward pass", module="vramsweep.runners.techniques.loss", shardings=ALL_BUT_ZERO3,
              rules=(_labels_are_left,), checked=("cpu", "simulated")),
    Technique("loss", "fused_linear", "Liger's fused linear cross entropy", module="vramsweep.runners.techniques.loss",
              packages=(LIGER, TRITON), preload=("liger_kernel.transformers",), shardings=ALL_BUT_ZERO3,
              excludes=(("device", ("cpu",), "its kernels need CUDA; on device=cpu use loss=chunked"),),
              rules=(_labels_are_left,), checked=("simulated", "gpu"), source="https://github.com/linkedin/Liger-Kernel"),
    # checkpointing
    Technique("checkpointing", "none", "nothing is recomputed"),
    Technique("checkpointing", "full", "each layer keeps its input and recomputes the rest", module=_CHECKPOINTING,
              checked=("cpu", "simulated"), source="https://docs.pytorch.org/docs/stable/checkpoint.html"),
    Technique("checkpointing", "selective", "each layer also keeps what chosen operators return (checkpointing_ops)",
              module=_CHECKPOINTING, checked=("cpu", "simulated"), source="https://docs.pytorch.org/docs/stable/"
              "checkpoint.html#torch.utils.checkpoint.create_selective_checkpoint_contexts"),
    # activation_offload
    Technique("activation_offload", False, "it stays on the device"),
    Technique("activation_offload", True, "it is copied to pinned memory and back (save_on_cpu), but for weights",
              module="vramsweep.runners.techniques.activation_offload",
              shardings=("none", "ddp", "zero0", "zero1", "zero2"), rules=(_not_compiled,), checked=("simulated", "gpu"), source="https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd."
              "graph.save_on_cpu", excludes=(
                  ("device", ("cpu",), "there all memory is the host's; simulate it, or measure on device=cuda"),
                  ("checkpointing", ("selective",), "what its operators return is kept past autograd's hooks, on the "
                   "device; use checkpointing=full or none"))),
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
    Technique("optimizer", "paged_adamw_8bit", "the same in managed memory, which moves between host and card",
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
              shardings=("ddp",), checked=("cpu",), rules=(_accumulating,), source="https://docs.pytorch.org/docs/stable/"
              "generated/torch.nn.parallel.DistributedDataParallel.html"),
    # data
    Technique("padding_side", "right", "after the text", checked=("cpu", "simulated"), rules=(_padded,)),
    Technique("padding_side", "left", "before the text", checked=("cpu", "simulated"), rules=(_padded, _to_the_left)),
    Technique("packing", "none", "one document a sample"),
    Technique("packing", "wrapped", "documents joined and cut at the sequence length, each token sees all before it",
              checked=("cpu", "simulated")),
    Technique("packing", "documents", "documents joined and cut; positions start anew with each, whose tokens see no "
              "other", module="vramsweep.runners.techniques.packing", checked=("cpu", "simulated"),
              rules=(_full, _uncached), source="https://huggingface.co/docs/transformers/main_classes/data_collator"),
    Technique("use_cache", "default", "the runner's own way: off, but for the Trainer before transformers 5"),
    Technique("use_cache", "on", "the model makes one", checked=("cpu", "simulated"), excludes=(
        ("checkpointing", ("full", "selective"), "transformers takes the cache from a checkpointed layer; use "
         "use_cache=off"),)),
    Technique("use_cache", "off", "the model makes none", checked=("cpu", "simulated")),
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


def changed(trial: Trial) -> list[str]:
    """What of a trial's techniques is not the default, as it is typed; precision is always given, so not among them."""
    values = ((name, getattr(trial, name), default) for name, default in DEFAULTS.items())
    return [f"{name}={text(value)}" for name, value, default in values if value != default]


def unproven(trial: Trial) -> list[str]:
    """The techniques of a trial, beyond the defaults, that no card has been seen to run as predicted; none on a CPU."""
    if trial.device.name == "cpu":
        return []
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
    for setting, excluded, why in entry.excludes:
        value = getattr(trial, setting)
        value = getattr(value, "name", value)  # a node: runner, device
        if value in excluded:
            return f"{entry} with {setting}={text(value)}: {why}"
    if trial.runner.name not in entry.runners:
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
