"""How layers compute: attention, fused kernels, the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vramsweep.harness.spec.shardings import READABLE
from vramsweep.harness.spec.techniques.schema import H100, H200, Axis, Package, Technique

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

AXES = (
    Axis("attention", str, "sdpa", "attention implementation as asked for"),
    Axis("kernels", str, "none", "fused kernels in the place of the model's own layers"),
    Axis("loss", str, "default", "how logits and cross entropy are computed"),
)

LIGER = Package("liger-kernel", "0.8.5")
TRITON = Package("triton", "3.0")
_ATTENTION = ".techniques.attention"
_SDP_BACKEND = "https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.SDPBackend.html"


def _labels_are_left(trial: Trial) -> Iterator[str]:
    if trial.runner.options.get("label_smoothing_factor"):
        yield (
            "runner.options.label_smoothing_factor takes the loss out of the model, and "
            f"loss={trial.loss} would not be used; leave one of them out"
        )


def _half_precision(trial: Trial) -> Iterator[str]:
    if trial.device.name != "cpu" and trial.precision in ("fp32", "tf32"):
        yield (
            f"attention={trial.attention} takes fp16 and bf16 only, not precision={trial.precision}; use bf16, or sdpa"
        )


def _maskless(trial: Trial) -> Iterator[str]:
    if trial.device.name == "cpu":  # where the flash kernel takes masks
        return
    for given, asked in ((trial.padding > 0, "padding"), (trial.packing == "documents", "packing=documents")):
        if given:
            yield f"attention=sdpa_flash takes no mask, which {asked} needs; use sdpa, sdpa_cudnn or flash_attention_2"


def _one_row(trial: Trial) -> Iterator[str]:
    if trial.packing == "documents" and trial.micro_batch > 1:
        yield (
            "attention=flash_attention_2 keeps the documents of one sample apart, not of several (transformers, "
            "_is_packed_sequence); use micro_batch=1 with a longer seq_len, or sdpa"
        )


# fmt: off
TECHNIQUES: tuple[Technique, ...] = (
    # attention
    Technique("attention", "sdpa", "torch's scaled_dot_product_attention, which picks a kernel (attention_kernels says "
              "which)", module=_ATTENTION, checked=("cpu", "simulated")),
    Technique("attention", "sdpa_flash", "scaled_dot_product_attention with its flash kernel only",
              module=_ATTENTION, source=_SDP_BACKEND, capability=(8, 0),
              checked=("cpu", "simulated", "gpu"), proven=H200, rules=(_half_precision, _maskless)),
    Technique("attention", "sdpa_efficient", "scaled_dot_product_attention with its memory-efficient kernel only",
              module=_ATTENTION, source=_SDP_BACKEND, capability=(5, 0), checked=("simulated", "gpu"),
              proven=H200, excludes=(
                  ("device", ("cpu",), "torch has this kernel for CUDA only; on device=cpu use sdpa"),)),
    Technique("attention", "sdpa_cudnn", "scaled_dot_product_attention with cuDNN's kernel only",
              module=_ATTENTION, source=_SDP_BACKEND, capability=(8, 0),
              checked=("simulated", "gpu"), proven=H200, rules=(_half_precision,), excludes=(
                  ("device", ("cpu",), "torch has this kernel for CUDA only; on device=cpu use sdpa"),)),
    Technique("attention", "sdpa_math", "scaled_dot_product_attention as the formula, whose scores are stored",
              module=_ATTENTION, source=_SDP_BACKEND, checked=("cpu", "simulated", "gpu")),
    Technique("attention", "eager", "the formula in the model's own code, whose scores are stored",
              module=_ATTENTION, checked=("cpu", "simulated"), proven=H100),
    Technique("attention", "flash_attention_2", "the flash-attn package: no copies for shared heads, none of padding",
              module=_ATTENTION, packages=(Package("flash-attn", "2.3"),), capability=(8, 0),
              checked=("simulated", "gpu"), rules=(_half_precision, _one_row), source="https://github.com/Dao-AILab/"
              "flash-attention", excludes=(("device", ("cpu",), "it needs CUDA; on device=cpu use sdpa"),)),
    # kernels
    Technique("kernels", "none", "the model's own"),
    Technique("kernels", "liger", "Liger's RMSNorm, SwiGLU and rotary embedding, and with loss=default its fused "
              "linear cross entropy", module=".techniques.liger", packages=(LIGER, TRITON),
              preload=("liger_kernel.transformers",), shardings=READABLE,
              excludes=(("device", ("cpu",), "its kernels need CUDA; on device=cpu use kernels=none"),),
              checked=("simulated", "gpu"), proven=H100, source="https://github.com/linkedin/Liger-Kernel"),
    # loss
    Technique("loss", "default", "transformers' own, or Liger's with kernels=liger"),
    Technique("loss", "plain", "transformers' own: logits of all tokens, made fp32", checked=("cpu", "simulated"),
              proven=H200),
    Technique("loss", "no_upcast", "the same in the logits' own dtype", module=".techniques.loss",
              rules=(_labels_are_left,), checked=("cpu", "simulated"), proven=H200),
    Technique("loss", "chunked", "output layer and cross entropy of an eighth of the tokens at a time, computed again "
              "in the backward pass", module=".techniques.loss", shardings=READABLE,
              rules=(_labels_are_left,), checked=("cpu", "simulated"), proven=H100),
    Technique("loss", "fused_linear", "Liger's fused linear cross entropy", module=".techniques.loss",
              packages=(LIGER, TRITON), preload=("liger_kernel.transformers",), shardings=READABLE,
              excludes=(("device", ("cpu",), "its kernels need CUDA; on device=cpu use loss=chunked"),),
              rules=(_labels_are_left,), checked=("simulated", "gpu"),
              proven=H200, source="https://github.com/linkedin/Liger-Kernel"),
)
# fmt: on
