"""Attention: one kernel of torch's scaled_dot_product_attention (`sdpa_*`), or the flash-attn package.

A forced kernel (SDPBackend) is the only one that torch may choose. If it cannot serve a call, torch refuses, and so do
the simulated kernels (sdpa_kernels.py). Then the trial is invalid, with torch's reasons.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.patches import patched
from vramsweep.runners.techniques import flash_attention_stub

BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa_math": SDPBackend.MATH,
}
REFUSED_BY_TORCH = ("No available kernel", "No viable backend")  # select_sdp_backend, scaled_dot_product_attention
REFUSED_BY_TRANSFORMERS = ("attention implementation", "Flash Attention", "FlashAttention", "flash_attn")


@contextlib.contextmanager
def around(trial: Trial, device: torch.device) -> Iterator[None]:
    """Allow only the attention that the trial asks for, until the context is left."""
    chosen: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if trial.attention in BACKENDS:
        chosen = _forced(trial)
    elif trial.attention == "flash_attention_2" and trial.device.name == "simulated":
        chosen = flash_attention_stub.stands_in()
    with _supported(trial), chosen:
        yield


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model; simulated, it calls the stand-in for flash-attn."""
    if trial.attention == "flash_attention_2" and trial.device.name == "simulated":
        flash_attention_stub.call(net)
    return net


@contextlib.contextmanager
def _supported(trial: Trial) -> Iterator[None]:
    """Turn transformers' refusal of a model or of a GPU into InvalidTrial with its reason."""
    try:
        yield
    except (ImportError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
        if not any(said in first for said in REFUSED_BY_TRANSFORMERS):
            raise
        other = "eager" if trial.attention.startswith("sdpa") else "sdpa"
        raise InvalidTrial(f"attention={trial.attention}: {first}; use attention={other}") from error


@contextlib.contextmanager
def _forced(trial: Trial) -> Iterator[None]:
    """Allow one kernel only, and turn torch's refusal into InvalidTrial with its reasons."""
    with _torch_s_reasons() as reasons:
        try:
            with sdpa_kernel(BACKENDS[trial.attention]):
                yield
        except RuntimeError as error:
            if not str(error).startswith(REFUSED_BY_TORCH):
                raise
            told = [text for line in (*str(error).splitlines()[1:], *reasons) if (text := line.strip(" ."))]
            why = f" ({'; '.join(dict.fromkeys(told))})" if told else ""
            raise InvalidTrial(
                f"attention={trial.attention} cannot run this model's attention{why}; use attention=sdpa, with which "
                "torch chooses a suitable kernel"
            ) from error


@contextlib.contextmanager
def _torch_s_reasons() -> Iterator[list[str]]:
    """Collect torch's warnings about its kernels (sdp_utils), which it gives if it finds no kernel."""
    found: list[str] = []
    show = warnings.showwarning

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        text, _, where = str(message).partition("(Triggered internally at ")
        if "sdp_utils" in where and "not used because" not in text:
            found.append(text)
        show(message, *args, **kwargs)

    with patched([(warnings, "showwarning", note)]):
        yield found
