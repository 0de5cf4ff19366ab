"""Trials whose layers are all alike: a few are traced, and the trace lengthened to all (trace/alike_layers.py).

Layers are alike if the modules of the model that the configuration describes, which is made without weights, are the
same in each but for their number. Whatever does not come out alike is traced whole.

Not covered: models from folders and hubs, user's code, DDP, FSDP1 and DeepSpeed, whose buckets and streams go across
layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from vramsweep.harness.hardware.gpu_lookup import Gpu
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.model import build
from vramsweep.runners.predict import make_trace
from vramsweep.runners.trace.alike_layers import FEW, Layered, Lengthened, Unlike, find_layers, lengthen
from vramsweep.runners.trace.step_tracer import Tracer
from vramsweep.runners.trace.trace_data import Trace

FEWEST = 8  # layers for which it is quicker
WORDS = re.compile(r"[\w-]+([,+][\w-]+)*")  # names of modules, in whichever layer


def trace_trial(trial: Trial, card: Gpu, folder: Path) -> tuple[Trace, dict[str, Any]]:
    """Trace the trial, of its layers as many as are needed; as make_trace.trace_trial does it whole."""

    def trace(few: Trial) -> Layered:
        tracer = Tracer(card.capability)
        return find_layers(tracer, make_trace.trace_trial(few, card, folder, tracer=tracer)[1])

    found = trace_alike(trial, trace)
    return (found.trace, found.details) if found is not None else make_trace.trace_trial(trial, card, folder)


def trace_alike(trial: Trial, trace: Callable[[Trial], Layered]) -> Lengthened | None:
    """Return the trial's trace from two of fewer layers; None where its layers are not alike."""
    layers = count_alike_layers(trial)
    if layers is None:
        return None
    try:
        return lengthen(trace(with_layers(trial, FEW)), trace(with_layers(trial, FEW + 1)), layers)
    except Unlike as error:
        print(f"every layer is traced: {error} differ", flush=True)
    except Exception as error:  # the trial as it is says it better, or has no trouble with it
        print(f"every layer is traced: {type(error).__name__}: {error!s:.200}", flush=True)
    return None


def count_alike_layers(trial: Trial) -> int | None:
    """Return how many layers the trial's model has, if they are alike and tracing few is quicker."""
    ours = trial.model.path is None and trial.model.model_type is not None and trial.runner.name in ("torch", "trainer")
    known = ours and trial.runner.command is None and trial.runner.target is None and trial.ds_config is None
    apart = trial.sharding in ("none", "fsdp2") and trial.checkpointing_every == 1
    told = trial.model.config.get("num_hidden_layers", FEWEST)
    if not known or not apart or not WORDS.fullmatch(trial.lora_target_modules) or trial.compile != "none":
        return None
    if not isinstance(told, int) or told < FEWEST:
        return None
    config = build.read_config(trial)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int) or layers < FEWEST:
        return None
    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    lists = [one for one in net.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == layers]
    alike = len(lists) == 1 and all(_describe(layer) == _describe(lists[0][0]) for layer in lists[0])
    return layers if alike else None


def with_layers(trial: Trial, layers: int) -> Trial:
    """Return the same trial of a model with so many layers."""
    config = build.read_config(trial)
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fewer = {key: value[:layers] if isinstance(value, list) else value for key, value in trial.model.config.items()}
    return trial.model_copy(update={"model": trial.model.model_copy(update={"config": fewer | {name: layers}})})


def _describe(layer: torch.nn.Module) -> list[Any]:
    """All that is told of the modules in a layer, but for its number."""

    def plain(module: torch.nn.Module) -> dict[str, Any]:
        said = {key: value for key, value in vars(module).items() if isinstance(value, (int, float, str, tuple))}
        return {key: value for key, value in said.items() if key not in ("layer_idx", "layer_index", "layer_id")}

    shapes = [[(name, one.shape) for name, one in module.named_parameters()] for module in layer.modules()]
    return [(name, type(one), plain(one)) for name, one in layer.named_modules()] + shapes
