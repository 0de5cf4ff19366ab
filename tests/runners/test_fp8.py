"""precision=fp8: the stand-in allocates what torchao itself does, operator by operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from conftest import Run, tiny
from traces import sizes

from vramsweep.harness import gpus, trial
from vramsweep.harness.roofline import estimate
from vramsweep.harness.trial import InvalidTrial
from vramsweep.runners import build, trace
from vramsweep.runners.predict import Prediction
from vramsweep.runners.techniques import fp8
from vramsweep.runners.trace import Trace

H100 = gpus.named("h100-80gb")
SIMULATED = {"device": {"name": "simulated", "gpu": "h100-80gb"}, "precision": "fp8"}


def traced(folder: Path, **over: Any) -> tuple[Trace, Prediction]:
    return traces.predicted(tiny(**SIMULATED | over), folder)


def with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on trials are traced with torchao itself, which asks for CUDA's autocast, and hides its tensors."""
    tensor = pytest.importorskip("torchao.float8.float8_training_tensor").Float8TrainingTensor
    sharded, enabled = trace.sharded, torch.is_autocast_enabled
    monkeypatch.setattr(fp8, "_stand_in", fp8._library)
    monkeypatch.setattr(trace, "sharded", lambda types: sharded(types) or tensor in types)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": enabled(device))
    monkeypatch.setattr(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))


QWEN3 = {"model_type": "qwen3", "config": {"head_dim": 16}}
ODD = {"config": {"intermediate_size": 168}}  # which 16 does not divide


@pytest.mark.slow
@pytest.mark.parametrize(
    "over",
    [{}, {"grad_accum": 2}, {"checkpointing": "full"}, {"model": QWEN3}, {"model": ODD}, {"loss": "chunked"}],
    ids=["with biases", "accumulated", "recomputed", "without", "some layers", "another loss"],
)
def test_the_stand_in_allocates_what_the_library_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: dict[str, Any]
) -> None:
    ours, predicted = traced(tmp_path, **over)
    with_the_library(monkeypatch)
    theirs, expected = traced(tmp_path, **over)
    assert sizes(ours) == sizes(theirs)
    for counter in ("allocated", "reserved"):
        assert predicted.peak[counter] == expected.peak[counter]
    assert products(ours) == products(theirs)


def products(found: Trace) -> dict[str, int]:
    """FLOPs of a step by the kind of arithmetic."""
    return {kind: sum(n * work.flops for work, n in found.kernels if work.kind == kind) for kind in ("fp8", "bf16")}


@pytest.mark.slow
def test_linear_layers_but_the_last_run_in_float8(tmp_path: Path) -> None:
    found, predicted = traced(tmp_path, seq_len=64)
    tokens = 2 * 64
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160)
    assert products(found)["fp8"] == 6 * tokens * weights
    assert products(found)["bf16"] >= 6 * tokens * 512 * 64
    assert estimate(found.kernels, H100, tf32=False) is not None
    assert estimate(found.kernels, gpus.named("rtxpro6000-96gb"), tf32=False) is None  # its rate is not known
    _, bf16 = traced(tmp_path, seq_len=64, precision="bf16")
    for part in ("parameters", "optimizer_state"):
        assert predicted.breakdown[part] == bf16.breakdown[part]


@pytest.mark.parametrize(
    ("over", "reason"),
    [
        ({"device": {"name": "cpu"}}, "float8 tensor cores"),
        ({"device": {"name": "simulated", "gpu": "a100-80gb"}}, "compute capability 8.9, and a100-80gb has 8.0"),
        ({"seq_len": 33, "micro_batch": 1}, "multiple of 16 tokens"),
        ({"sharding": "fsdp2"}, "needs sharding="),
        ({"runner": {"name": "deepspeed"}, "sharding": "zero1"}, "needs runner="),
    ],
)
def test_what_cannot_be_is_said(over: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidTrial, match=reason):
        trial.parse(tiny(**SIMULATED | over))


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "config": {"n_embd": 64, "n_layer": 1, "n_head": 2}}  # its layers are Conv1D
    with pytest.raises(InvalidTrial, match="no linear layer"):
        traced(tmp_path, model=gpt2)


def test_the_stand_in_computes_what_the_library_does() -> None:
    """On a CPU, which multiplies float8 too: the same loss and gradients, and they are those of fp32, roughly."""
    float8 = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
    chosen = trial.parse(tiny(precision="fp32"))
    batch = build.data(chosen).batch(0, 2)
    found = {}
    for name, convert in (("fp32", None), ("ours", fp8._stand_in), ("theirs", fp8._library)):
        torch.manual_seed(0)
        net = build.model(chosen, torch.device("cpu"))
        last = net.get_output_embeddings()
        taken = [m for m in net.modules() if isinstance(m, torch.nn.Linear) and m is not last]
        if convert is not None:
            convert(net, taken)
        assert sum(isinstance(m, float8) for m in net.modules()) == (14 if name == "theirs" else 0)
        loss = net(**batch).loss
        loss.backward()
        found[name] = torch.cat([loss.detach().view(1), *(p.grad.flatten() for p in net.parameters())])
    assert torch.equal(found["ours"], found["theirs"])
    assert torch.nn.functional.cosine_similarity(found["theirs"], found["fp32"], dim=0) > 0.99
    assert not torch.equal(found["theirs"], found["fp32"])


@pytest.mark.gpu
def test_a_step_on_a_card(run_sweep: Run) -> None:
    """It trains as bf16 does, and holds what is predicted, to what a trace does not show."""
    pytest.importorskip("torchao")
    wide = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 32_000}
    size: dict[str, Any] = {"seq_len": 1024, "micro_batch": 4, "model": {"config": wide}}
    bf16, row = run_sweep(*(tiny(device={"name": "cuda"}, precision=name, **size) for name in ("bf16", "fp8")))
    if row["outcome"] == "invalid":
        pytest.skip(row["reason"])
    assert row["outcome"] == bf16["outcome"] == "ok", row["reason"]
    assert row["loss_last"] == pytest.approx(bf16["loss_last"], rel=0.02)
    card = gpus.find(row["gpu_name"])
    if card is not None:
        (predicted,) = run_sweep(tiny(device={"name": "simulated", "gpu": card.name}, precision="fp8", **size))
        assert row["peak_allocated_bytes"] == pytest.approx(predicted["peak_allocated_bytes"], rel=0.1)
