"""What weights are: their precision and that of the arithmetic, quantisation, adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.shardings import NAMES, PLAIN, WHOLE, ZERO
from vramsweep.harness.spec.techniques.schema import H100, H200, Axis, Package, Technique

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

AXES = (
    Axis("precision", str, None, "of weights and arithmetic"),
    Axis("quantization", str, "none", "of frozen base weights"),
    Axis("adapter", str, "none", "small trainable weights beside frozen ones"),
    Axis("lora_r", int, 16, "rank of the adapters", of=("adapter", ("lora",))),
    Axis("lora_alpha", int, 16, "scale of the adapters", of=("adapter", ("lora",))),
    Axis("lora_dropout", float, 0.0, "dropout before the adapters", of=("adapter", ("lora",))),
    Axis("lora_target_modules", str, "all-linear", "which layers get adapters: names joined by +, or all-linear (all "
         "but the output layer)", of=("adapter", ("lora",))),
)  # fmt: skip

TORCHAO = Package("torchao", "0.18.0")
# None of them is preloaded: peft imports bitsandbytes, whose import initialises CUDA (cuda_specs.py:
# get_compute_capabilities), and no process that has can be forked.
_PEFT = Package("peft", "0.18")  # the first that imports with transformers 5
_QLORA = (_PEFT, Package("bitsandbytes", "0.46.1"))
_QLORA_GUIDE = "https://huggingface.co/docs/peft/developer_guides/quantization"
_HALF = (("precision", ("bf16_pure", "bf16_master"), "what is not quantised is cast to fp32; use bf16 or fp16"),)
_SEVERAL = tuple(name for name in NAMES if name not in ("none", *ZERO))


def _adapted(trial: Trial) -> Iterator[str]:
    if trial.adapter == "none":
        what = "frozen weights of 4 bits are not trained themselves"
        yield f"quantization={trial.quantization}: {what}; add adapter=lora"


def _checkpoint(trial: Trial) -> Iterator[str]:
    if trial.device.name == "simulated" or trial.weights == "pretrained":
        return
    yield (
        f"quantization={trial.quantization} is measured from a quantised checkpoint: model=hub model.path=... "
        "weights=pretrained (device=simulated predicts it for any model)"
    )


def _fp8_alone(trial: Trial) -> Iterator[str]:
    for axis in ("quantization", "adapter"):
        if getattr(trial, axis) != "none":
            yield f"precision=fp8 with {axis}={getattr(trial, axis)} is not supported; use precision=bf16"


def _fp8_tokens(trial: Trial) -> Iterator[str]:
    tokens = trial.micro_batch * trial.seq_len
    if tokens % 16:
        yield (
            f"precision=fp8 needs a multiple of 16 tokens in a micro-batch, for its products with gradients, "
            f"not {tokens}; change seq_len or micro_batch"
        )


# fmt: off
TECHNIQUES: tuple[Technique, ...] = (
    # precision
    Technique("precision", "fp32", "fp32 everywhere; TF32 off", checked=("cpu", "simulated"), proven=H100),
    Technique("precision", "tf32", "fp32 weights, matrix products in TF32", checked=("simulated",), proven=H100,
              excludes=(
        ("device", ("cpu",), "it is a mode of CUDA tensor cores; on device=cpu use fp32"),)),
    Technique("precision", "bf16", "fp32 weights, autocast to bf16 (DeepSpeed: bf16 weights with fp32 master copies)",
              checked=("cpu", "simulated"), proven=H100),
    Technique("precision", "fp16", "fp32 weights, autocast to fp16 with GradScaler (DeepSpeed: fp16 weights with fp32 "
              "master copies)", checked=("simulated",), proven=H200),
    Technique("precision", "bf16_pure", "weights, gradients and optimizer state in bf16; no autocast",
              checked=("cpu", "simulated"), proven=H100),
    Technique("precision", "bf16_master", "bf16 weights, fp32 master copies of them for the optimizer; no autocast",
              module=".techniques.master_weights", runners=("torch",), checked=("cpu", "simulated"),
              proven=H200, excludes=(
        ("runner", ("deepspeed",), "DeepSpeed's bf16 is just that: use precision=bf16"),
        ("runner", ("trainer",), "the Trainer keeps no master copies; use runner=torch, or precision=bf16, which keeps "
         "the weights themselves in fp32"),
        ("sharding", _SEVERAL, "the copies are not divided; use precision=bf16, as is usual (fp32 shards, arithmetic "
         "in bf16), or sharding=none, or runner=deepspeed with precision=bf16, whose copies are")),
              source="https://arxiv.org/abs/1710.03740"),
    Technique("precision", "fp8", "fp32 weights, autocast to bf16, and the products of linear layers in float8 "
              "(torchao's dynamic tensorwise scaling; not the output layer, nor layers with a dimension that 16 "
              "does not divide); slow and large unless it is compiled", module=".techniques.fp8",
              packages=(TORCHAO,),
              preload=("torchao.float8",), capability=(8, 9), runners=("torch", "trainer"), shardings=PLAIN,
              rules=(_fp8_alone, _fp8_tokens), checked=("simulated", "gpu"),
              excludes=(("device", ("cpu",), "it needs float8 tensor cores; on device=cpu use bf16"),),
              source="https://docs.pytorch.org/ao/stable/workflows/training.html"),
    # quantization
    Technique("quantization", "none", "weights as the precision says"),
    Technique("quantization", "nf4", "linear layers but the output layer in bitsandbytes' 4 bits (NF4); the precision "
              "says their dtype before and that of the arithmetic, what is not quantised is fp32 (peft's "
              "prepare_model_for_kbit_training)", module=".techniques.nf4", packages=_QLORA,
              shardings=WHOLE, rules=(_adapted,), excludes=_HALF, checked=("cpu", "simulated"), proven=H200,
              source=_QLORA_GUIDE),
    Technique("quantization", "nf4_double", "as nf4, and the blocks' scales in 8 bits (double quantisation)",
              module=".techniques.nf4", packages=_QLORA,
              shardings=WHOLE, rules=(_adapted,), excludes=_HALF, checked=("cpu", "simulated"), proven=H200,
              source=_QLORA_GUIDE),
    Technique("quantization", "gptq", "linear layers but the output layer in GPTQ's 4 bits, groups of 128; the rest as "
              "the precision's half", module=".techniques.gptq",
              packages=(Package("gptqmodel", "7.0"), Package("optimum", "1.24")),
              runners=("torch", "trainer"), shardings=PLAIN, rules=(_adapted, _checkpoint),
              checked=("simulated",),
              excludes=(("precision", ("fp32", "tf32", "bf16_pure", "bf16_master"), "its kernels work in half "
                         "precision; use bf16 or fp16"),), source="https://huggingface.co/docs/transformers/quantization/gptq"),
    # adapter
    Technique("adapter", "none", "all weights are trained"),
    Technique("adapter", "lora", "low-rank matrices beside frozen linear layers (peft), in fp32 also where those are "
              "in half precision", module=".techniques.lora", packages=(_PEFT,),
              checked=("cpu", "simulated"), proven=H100, excludes=(
                  ("precision", ("bf16_master",), "what is trained is fp32 already; use bf16_pure, with bf16 base "
                   "weights, or bf16"),),
              source="https://huggingface.co/docs/peft/developer_guides/lora"),
)
# fmt: on
