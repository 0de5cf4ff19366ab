"""Liger's kernels: what the stand-ins allocate is what the library's own code does, whose kernels are left out."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import traces
from conftest import Run, merged, tiny
from traces import sizes

from vramsweep.harness import gpus, trial
from vramsweep.harness.trial import InvalidTrial
from vramsweep.runners import build, trace, tracing
from vramsweep.runners.predict import Prediction
from vramsweep.runners.techniques import liger, loss
from vramsweep.runners.trace import Trace

SMALL = {"seq_len": 96, "micro_batch": 2, "model": {"config": {"vocab_size": 1536}}}
# The library's functions that ask for the device's type: fake tensors are on "cpu", and are to be taken as CUDA's.
ASKING = {
    "liger_kernel.ops.rms_norm": ("rms_norm_backward",),
    "liger_kernel.ops.fused_linear_cross_entropy": ("_can_use_mm_out", "fused_linear_cross_entropy_forward"),
}
ON_CUDA = {
    'device.type == "cuda"': 'device.type == "cpu"',
    'device.type != "cuda"': 'device.type != "cpu"',
    "is_autocast_enabled()": 'is_autocast_enabled("cpu")',
    'get_autocast_dtype("cuda")': 'get_autocast_dtype("cpu")',
}


def traced(folder: Path, gpu: str = "a100-80gb", **over: Any) -> tuple[Trace, Prediction]:
    values = tiny(**merged(SMALL, {"device": {"name": "simulated", "gpu": gpu}, **over}))
    return traces.predicted(values, folder)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: from then on trials are traced with Liger itself, for a card, without launching its kernels."""
    triton = pytest.importorskip("triton")
    available_impls = pytest.importorskip("liger_kernel.backends").available_impls

    def use(card: gpus.Gpu) -> None:
        for name, functions in ASKING.items():
            module: ModuleType = __import__(name, fromlist=functions)
            for function in functions:
                source = inspect.getsource(getattr(module, function))
                for asked, answered in ON_CUDA.items():
                    source = source.replace(asked, answered)
                namespace = vars(module).copy()
                exec(source, namespace)
                monkeypatch.setattr(module, function, namespace[function])
        available_impls("rope")  # else the trace has it look for them, and pytest keep what that logs, tensors and all
        properties = SimpleNamespace(multi_processor_count=card.multiprocessors)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: card.capability)
        monkeypatch.setattr(triton.runtime.jit.KernelInterface, "__getitem__", lambda kernel, grid: nothing)
        monkeypatch.setattr(torch, "equal", lambda a, b: (a == b).all() is None)  # is not to be 1: no value is there
        monkeypatch.setattr(trace, "FRAMEWORKS", (*trace.FRAMEWORKS, "liger_kernel."))  # it counts the labels
        monkeypatch.setattr(liger, "_stand_in", liger._library)
        monkeypatch.setattr(loss, "_stand_in", lambda chosen: loss._library())

    return use


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a kernel."""


PLAIN = {"kernels": "liger"}
CASES = {
    "bf16": {"precision": "bf16"},
    "fp32": {},
    "bf16_pure": {"precision": "bf16_pure"},
    "fp16 on a T4": {"precision": "fp16", "gpu": "t4-16gb"},
    "its norms alone": {"precision": "bf16", "loss": "plain"},
    "its loss alone": {"precision": "bf16", "kernels": "none", "loss": "fused_linear"},
    "accumulated": {"precision": "bf16", "grad_accum": 2},
    "an output layer of its own": {"precision": "bf16", "model": {"config": {"tie_word_embeddings": False}}},
    "sharded": {"precision": "bf16", "sharding": "fsdp2", "world_size": 4},
    "recomputed": {"precision": "bf16", "checkpointing": "full"},
    "qwen3": {"precision": "bf16", "model": {"model_type": "qwen3", "config": {"head_dim": 16}}},
    "llama": {"precision": "bf16", "model": {"model_type": "llama"}},
    "mistral": {"precision": "bf16", "model": {"model_type": "mistral"}},
}


@pytest.mark.parametrize("case", CASES)
def test_the_stand_ins_allocate_what_the_library_does(tmp_path: Path, library: Any, case: str) -> None:
    over = merged(PLAIN, CASES[case])
    ours, predicted = traced(tmp_path, **over)
    library(gpus.named(over.get("gpu", "a100-80gb")))
    theirs, expected = traced(tmp_path, **over)
    assert sizes(ours) == sizes(theirs)
    assert predicted.peak == expected.peak


@pytest.mark.slow
def test_the_norms_gradient_takes_a_row_for_each_multiprocessor(tmp_path: Path) -> None:
    """Of two cards of one generation, which otherwise trace alike."""
    large, small = gpus.named("h100-80gb"), gpus.named("h100-pcie-80gb")
    counts = {card: Counter(traced(tmp_path, card.name, **PLAIN)[0].sizes) for card in (large, small)}
    width, norms, steps = 64, 2 * 2 + 1, 3
    assert counts[large] - counts[small] == Counter({4 * width * 132: norms * steps})
    assert counts[small] - counts[large] == Counter({4 * width * 114: norms * steps})

    def key(kernels: str, card: gpus.Gpu) -> str:
        chosen = trial.parse(tiny(device={"name": "simulated", "gpu": card.name}, kernels=kernels))
        return tracing.trace_key(chosen, card)

    keys = {(kernels, card): key(kernels, card) for kernels in ("none", "liger") for card in (large, small)}
    assert keys["none", large] == keys["none", small]
    assert len(set(keys.values())) == 3


@pytest.mark.slow
def test_what_it_saves(tmp_path: Path) -> None:
    """The logits, and more: the product of gate and up is all that is kept of the activation function."""
    peaks = {
        name: traced(tmp_path, precision="bf16", model={"config": {"vocab_size": 32_768}}, **over)[1].peak["allocated"]
        for name, over in (("none", {}), ("kernels", {**PLAIN, "loss": "plain"}), ("all", PLAIN))
    }
    logits = 2 * 96 * 32_768
    assert peaks["none"] > peaks["kernels"]
    assert peaks["kernels"] - peaks["all"] > 8 * logits


@pytest.mark.slow
def test_transformers_is_put_back(tmp_path: Path) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    before = dict(vars(modeling_qwen2))
    traced(tmp_path, **PLAIN)
    assert vars(modeling_qwen2) == before


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"device": {"name": "cpu"}}, "use kernels=none"),
        ({"sharding": "zero3", "runner": {"name": "deepspeed"}}, "needs sharding="),
        (
            {"runner": {"name": "trainer", "options": {"use_liger_kernel": True}}},
            "belongs to the axis kernels",
        ),
    ],
)
def test_what_cannot_be_is_said(over: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidTrial, match=reason):
        trial.parse(tiny(**merged({"device": {"name": "simulated", "gpu": "a100-80gb"}} | PLAIN, over)))


def test_models_that_it_does_not_know(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "config": {"n_embd": 64, "n_layer": 1, "n_head": 2}}
    with pytest.raises(InvalidTrial, match="gpt2 models, only for llama, mistral, qwen2, qwen3"):
        traced(tmp_path, model=gpt2, **PLAIN)
    pytest.importorskip("liger_kernel")
    net = build.model(trial.parse(tiny(model=gpt2)), torch.device("cpu"))
    with pytest.raises(InvalidTrial, match="has nothing for gpt2 models"):
        liger._library(trial.parse(tiny()), net)


MIDDLING = {
    "precision": "bf16",
    "seq_len": 1024,
    "micro_batch": 4,
    "model": {"config": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 32_000}},
}


@pytest.mark.gpu
@pytest.mark.parametrize("over", [PLAIN, {"loss": "fused_linear"}, {**PLAIN, "loss": "chunked"}], ids=str)
def test_on_a_card(run_sweep: Run, over: dict[str, Any]) -> None:
    """It trains as without it, and holds what is predicted, to what a trace does not show."""
    plain, row = run_sweep(*(tiny(**merged(MIDDLING, {"device": {"name": "cuda"}, **o})) for o in ({}, over)))
    if row["outcome"] == "invalid":
        pytest.skip(row["reason"])
    assert row["outcome"] == plain["outcome"] == "ok", row["reason"]
    assert row["loss_last"] == pytest.approx(plain["loss_last"], rel=0.01)
    card = gpus.find(row["gpu_name"])
    if card is not None:
        device = {"name": "simulated", "gpu": card.name}
        (predicted,) = run_sweep(tiny(**merged(MIDDLING, {"device": device, **over})))
        assert row["peak_allocated_bytes"] == pytest.approx(predicted["peak_allocated_bytes"], rel=0.1)
