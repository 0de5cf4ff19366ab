"""Frozen weights of few bits: the parts that all quantisations share, measured and simulated.

A model with random weights is built without any first, and filled layer by layer, as `from_pretrained` does. So only
one layer's weights exist in half precision at a time. Then the model follows the recipe of peft's guide to
quantisation. Its weights are frozen and, except with GPTQ, what is not quantised is cast to fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.trace.fake_placement import weightless

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Layer = Callable[[int, int, bool], nn.Module]  # of (in, out, bias)
Quantize = Callable[[nn.Module, str, torch.Tensor], nn.Parameter | None]


def dtype(trial: Trial) -> torch.dtype:
    """Return the dtype of the weights before they are quantised, and of the arithmetic."""
    return DTYPES.get(trial.precision, torch.float32)


def skeleton(make: Callable[[torch.dtype], Any], dtype: torch.dtype) -> Any:
    """Return the model with its parameters on device meta."""
    with weightless():
        return make(dtype)


def replace(net: Any, layer: Layer) -> None:
    """Replace each linear layer, but not the output layer and what shares its weights, by a layer without values.

    Source: transformers/quantizers/base.py: get_keys_to_not_convert, for models whose last parameter is the output
    layer's or a norm's.
    """
    output = net.get_output_embeddings()
    for name, module in list(net.named_modules()):
        if module is output or not (type(module) is nn.Linear or isinstance(module, Conv1D)):
            continue
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        leaving, entering = reversed(weight.shape) if isinstance(module, Conv1D) else weight.shape
        net.set_submodule(name, layer(entering, leaving, module.bias is not None))


def fill(net: Any, device: torch.device, dtype: torch.dtype, quantize: Quantize) -> None:
    """Give the parameters on device meta random values, one by one; `quantize` packs some of them.

    `quantize` gets a layer, the name of its parameter and values in `dtype`, and returns None for values that stay.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}  # shared parameters stay so
    for module in net.modules():
        for name, empty in list(module.named_parameters(recurse=False)):
            if not empty.is_meta:
                continue
            if empty not in made:
                values = torch.empty(empty.shape, dtype=dtype, device=device)
                if empty.dim() > 1:
                    values.normal_(0, 0.02)
                else:
                    values.fill_(0 if name.endswith("bias") else 1)
                own = quantize(module, name, values)
                made[empty] = nn.Parameter(values, empty.requires_grad) if own is None else own
                del values, own
            setattr(module, name, made[empty])


def prepare(net: Any) -> None:
    """Do prepare_model_for_kbit_training of peft/utils/other.py, but no checkpointing, which is an axis of its own."""
    net.requires_grad_(False)
    for parameter in net.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.to(torch.float32)
    torch.cuda.empty_cache()
