"""LoRA beside 4-bit weights (bitsandbytes NF4), prepared otherwise than by peft's prepare_model_for_kbit_training
alone.

`kept`: nothing is cast; embeddings, norms and output layer stay in half precision (fms-acceleration's own
preparation). `norms`: peft's preparation, and after it trl 0.13's peft_module_casting_to_bf16: norms stay in fp32,
embeddings and the output layer are half again. The step is the Trainer's: autocast, gradients clipped to a norm of 1,
no scaler. The loss is that of transformers 4.46 to 4.48: logits made fp32, and a copy of all positions but the last.

Simulated only: bitsandbytes' layers are vramsweep's stand-ins. The trial's axes say the rest.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F

from vramsweep.harness.spec.trial import DeviceAxis, RunnerAxis, Trial
from vramsweep.runners.model import apply_techniques
from vramsweep.runners.model import build as parts
from vramsweep.runners.techniques import quantized_base

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
CLIP = 1.0


def kept(trial: Trial) -> tuple[Any, ...]:
    """Nothing is cast to fp32."""
    return _made(trial, cast=False)


def norms(trial: Trial) -> tuple[Any, ...]:
    """Only the norms are fp32."""
    return _made(trial, cast=True)


def _made(trial: Trial, cast: bool) -> tuple[Any, ...]:
    device, half = torch.device("cuda"), HALF[trial.precision]
    inner = trial.model_copy(
        update={"runner": RunnerAxis(name="torch"), "device": DeviceAxis(name="simulated", gpu="a100-80gb")}
    )
    _around(inner, device)
    net = _prepared(inner, device, cast)
    if cast:
        for layer in (net.get_input_embeddings(), net.get_output_embeddings()):
            layer.weight.data = layer.weight.data.to(half)
    net.loss_function = _loss
    optimizer = parts.optimizer(inner, net.parameters(), device)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cuda", half):
            loss: torch.Tensor = net(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        net.zero_grad()
        return loss.detach()

    return net, optimizer, step


def _around(inner: Trial, device: torch.device) -> None:
    """What techniques put around a whole run, for as long as this process lives."""
    stack = contextlib.ExitStack()
    for hook in apply_techniques.hooks(inner, "around"):
        stack.enter_context(hook(inner, device))
    _OPEN.append(stack)


_OPEN: list[contextlib.ExitStack] = []


def _prepared(inner: Trial, device: torch.device, cast: bool) -> Any:
    peft_way = quantized_base.prepare

    def freeze(net: Any) -> None:
        for parameter in net.parameters():
            parameter.requires_grad = False

    quantized_base.prepare = peft_way if cast else freeze
    try:
        return parts.model(inner, device)
    finally:
        quantized_base.prepare = peft_way


def _loss(logits: torch.Tensor, labels: torch.Tensor, **rest: Any) -> torch.Tensor:
    """Called by the model, which still holds the last hidden states."""
    whole = logits.float()
    shifted = whole[..., :-1, :].contiguous()
    following = labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, shifted.shape[-1]), following.view(-1))
