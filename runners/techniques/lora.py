"""Low-rank adapters (LoRA) next to frozen weights, as peft adds them: in fp32 next to half precision.

Simulated runs have layers of ours that allocate what peft's do, in their order (peft 0.21: tuners/lora/layer.py,
bnb.py and gptq.py). These layers do not need peft.
"""

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from vramsweep.harness.spec.trial import InvalidTrial, Trial

ALL = "all-linear"  # peft's keyword (peft/utils/constants.py: INCLUDE_LINEAR_LAYERS_SHORTHAND)


def model(trial: Trial, net: Any, device: torch.device) -> Any:
    """Return the model with adapters on its target layers; only the adapters are trained.

    Raises InvalidTrial for targets that the model lacks, or that are not linear layers.
    """
    names = targets(net, trial.lora_target_modules)
    if trial.device.name == "simulated":
        adapted = _with_stand_ins(trial, net, names, device)
    else:
        adapted = _with_peft(trial, net, names)
    if trial.checkpointing != "none" and trial.checkpointing_reentrant:
        # otherwise a checkpointed layer's output needs no gradient, and nothing is trained; transformers 5 does it
        # (PreTrainedModel.activation_checkpointing_enable), transformers 4 only for adapters that it loaded
        net.enable_input_require_grads()
    return adapted


def targets(net: Any, asked: str) -> list[str]:
    """Return the names of the layers that get adapters: all linear ones but the output layer, or by ends of names.

    Raises InvalidTrial for names that match no layer or a layer that is not linear.
    """
    modules = dict(net.named_modules())
    linear = [name for name, module in modules.items() if is_linear(module)]
    if asked == ALL:  # peft/tuners/tuners_utils.py: _maybe_include_all_linear_layers
        output = net.get_output_embeddings() if hasattr(net, "get_output_embeddings") else None
        return [name for name in linear if modules[name] is not output]
    endings = asked.split("+")
    for ending in endings:
        names = {name for name in modules if _ends(name, ending)}
        if not names or not names <= set(linear):
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise InvalidTrial(
                f"lora_target_modules: the model has no linear layer called {ending!r}; it has {ends} (or {ALL})"
            )
    return [name for name in linear if any(_ends(name, ending) for ending in endings)]


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def is_linear(module: nn.Module) -> bool:
    """Check whether a module is a linear layer, quantised or not."""
    if isinstance(module, (nn.Linear, Conv1D)):  # bitsandbytes' are nn.Linear
        return True
    return isinstance(getattr(module, "in_features", None), int) and hasattr(module, "out_features")


def _with_peft(trial: Trial, net: Any, names: list[str]) -> Any:
    from peft import LoraConfig, get_peft_model

    modules = dict(net.named_modules())
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=trial.lora_r,
        lora_alpha=trial.lora_alpha,
        lora_dropout=trial.lora_dropout,
        target_modules=ALL if trial.lora_target_modules == ALL else trial.lora_target_modules.split("+"),
        # weights of (in, out) instead of (out, in), as GPT-2's; peft sets it itself, with a warning
        fan_in_fan_out=any(isinstance(modules[name], Conv1D) for name in names),
    )
    return get_peft_model(net, config)


def _with_stand_ins(trial: Trial, net: Any, names: list[str], device: torch.device) -> Any:
    net.requires_grad_(False)
    modules = dict(net.named_modules())
    adapters = [Adapter(trial, modules[name], device) for name in names]
    for name, adapter in zip(names, adapters, strict=True):
        net.set_submodule(name, adapter)
    for adapter in adapters:  # after all are in place (peft/tuners/tuners_utils.py: cast_adapter_dtype)
        adapter.raise_to_fp32()
    return net


class Adapter(nn.Module):
    """Stand-in for peft's lora.Linear, Linear4bit or GPTQLoraLinear, depending on the layer that it wraps."""

    def __init__(self, trial: Trial, base_layer: Any, device: torch.device) -> None:
        super().__init__()
        self.base_layer = base_layer
        dropout, rank = trial.lora_dropout, trial.lora_r
        if isinstance(base_layer, Conv1D):
            entering, leaving = base_layer.weight.shape
        else:
            entering, leaving = base_layer.in_features, base_layer.out_features
        dtype = base_layer.compute_dtype if hasattr(base_layer, "compute_dtype") else base_layer.weight.dtype
        self.scaling = trial.lora_alpha / rank
        self.lora_dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.lora_A = nn.Linear(entering, rank, bias=False, device=device, dtype=dtype)
        self.lora_B = nn.Linear(rank, leaving, bias=False, device=device, dtype=dtype)

    @property
    def weight(self) -> Any:
        """Return the weight of the wrapped layer."""
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        """Return the bias of the wrapped layer."""
        return self.base_layer.bias

    def raise_to_fp32(self) -> None:
        """Cast adapters of half precision to fp32 (PeftModel's autocast_adapter_dtype, which is its default)."""
        for part in (self.lora_A, self.lora_B):
            if part.weight.dtype in (torch.float16, torch.bfloat16):
                part.weight = nn.Parameter(part.weight.data.to(torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's product to the wrapped layer's, in the order of peft's layer for 4 bits or its others."""
        return self._forward_4bit(x) if hasattr(self.base_layer, "quant_state") else self._forward_plain(x)

    def _forward_plain(self, x: torch.Tensor) -> torch.Tensor:
        """Compute Linear.forward of peft/tuners/lora/layer.py, or GPTQLoraLinear.forward of gptq.py."""
        result: torch.Tensor = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling
        result = result.to(dtype)  # as in peft, because this decides how long tensors live
        return result  # noqa: RET504

    def _forward_4bit(self, x: torch.Tensor) -> torch.Tensor:
        """Compute Linear4bit.forward of peft/tuners/lora/bnb.py."""
        result: torch.Tensor = self.base_layer(x)
        result = result.clone()
        alone = not torch.is_autocast_enabled()
        dtype = result.dtype
        if alone:
            x = x.to(self.lora_A.weight.dtype)
        output = self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling
        if alone:
            output = output.to(dtype)
        result = result + output
        return result  # noqa: RET504
