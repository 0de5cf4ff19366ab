"""Liger's kernels and torchao's float8: stand-ins allocate what the library's own code does, kernels left out."""

import inspect
import json
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import traces
from conftest import Run, cases, literal_cases, merged, refusal, tiny
from traces import on_this_gpu, sizes

from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.hardware.roofline import estimate
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.runners.model import build
from vramsweep.runners.predict import trace_cache
from vramsweep.runners.predict.replay_trace import Prediction
from vramsweep.runners.techniques import fp8, liger, loss
from vramsweep.runners.trace import step_tracer
from vramsweep.runners.trace.trace_data import Trace

pytestmark = pytest.mark.deterministic

SMALL = {"seq_len": 96, "micro_batch": 2, "model": {"config": {"vocab_size": 1536}}}
# The library's functions that ask for the device's type: fake tensors are on "cpu", and are to be taken as CUDA's.
ASKING = {
    "liger_kernel.ops.rms_norm": ("rms_norm_backward",),
    "liger_kernel.ops.fused_linear_cross_entropy": ("_can_use_mm_out", "fused_linear_cross_entropy_forward"),
}
ON_CUDA = {
    'device.type == "cuda"': 'device.type == "cpu"', 'device.type != "cuda"': 'device.type != "cpu"',
    "is_autocast_enabled()": 'is_autocast_enabled("cpu")', 'get_autocast_dtype("cuda")': 'get_autocast_dtype("cpu")',
}  # fmt: skip


def traced(folder: Path, gpu: str = "a100-80gb", **over: Any) -> tuple[Trace, Prediction]:
    values = tiny(**merged(SMALL, {"device": {"name": "simulated", "gpu": gpu}, **over}))
    return traces.predicted(values, folder)


def with_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on trials are traced with torchao itself, which asks for CUDA's autocast, and hides its tensors."""
    tensor = pytest.importorskip("torchao.float8.float8_training_tensor").Float8TrainingTensor
    sharded, enabled = step_tracer.sharded, torch.is_autocast_enabled
    monkeypatch.setattr(fp8, "_stand_in", fp8._library)
    monkeypatch.setattr(step_tracer, "sharded", lambda types: sharded(types) or tensor in types)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": enabled(device))
    monkeypatch.setattr(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))


@pytest.fixture
def with_liger(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: from then on trials are traced with Liger itself, for a card, without launching its kernels."""
    triton = pytest.importorskip("triton")
    available_impls = pytest.importorskip("liger_kernel.backends").available_impls

    def use(card: gpu_lookup.Gpu) -> None:
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
        counting = (*step_tracer.FRAMEWORKS, "liger_kernel.")  # it counts the labels
        monkeypatch.setattr(step_tracer, "FRAMEWORKS", counting)
        monkeypatch.setattr(liger, "_stand_in", liger._library)
        fused = pytest.importorskip("liger_kernel.transformers.model.loss_utils").LigerForCausalLMLoss
        monkeypatch.setattr(loss.liger_stub, "causal_loss", lambda capability, *given, **named: fused(*given, **named))

    return use


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a kernel."""


PLAIN = {"kernels": "liger"}
FP8 = {"precision": "fp8", "gpu": "h100-80gb"}
FP8_CASES: dict[str, dict[str, Any]] = dict(literal_cases("trials_of_fp8"))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "settings"), cases("trials_of_liger"))
def test_the_stand_ins_allocate_what_liger_does(tmp_path: Path, with_liger: Any, case: str, settings: str) -> None:
    over = merged(PLAIN, json.loads(settings))
    ours, predicted = traced(tmp_path, **over)
    with_liger(gpu_lookup.gpu_named(over.get("gpu", "a100-80gb")))
    theirs, expected = traced(tmp_path, **over)
    assert sizes(ours) == sizes(theirs)
    assert predicted.peak == expected.peak


@pytest.mark.slow
@pytest.mark.parametrize("case", FP8_CASES)
def test_the_stand_in_allocates_what_torchao_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    ours, predicted = traced(tmp_path, **FP8, **FP8_CASES[case])
    with_torchao(monkeypatch)
    theirs, expected = traced(tmp_path, **FP8, **FP8_CASES[case])
    assert sizes(ours) == sizes(theirs)
    for counter in ("allocated", "reserved"):
        assert predicted.peak[counter] == expected.peak[counter]
    assert products(ours) == products(theirs)


@pytest.mark.slow
def test_the_norms_gradient_takes_a_row_for_each_multiprocessor(tmp_path: Path) -> None:
    """Two GPUs of one generation otherwise have the same trace."""
    large, small = gpu_lookup.gpu_named("h100-80gb"), gpu_lookup.gpu_named("h100-pcie-80gb")
    counts = {card: Counter(traced(tmp_path, card.name, **PLAIN)[0].sizes) for card in (large, small)}
    width, norms, steps = 64, 2 * 2 + 1, 3
    assert counts[large] - counts[small] == Counter({4 * width * 132: norms * steps})
    assert counts[small] - counts[large] == Counter({4 * width * 114: norms * steps})

    def key(kernels: str, card: gpu_lookup.Gpu) -> str:
        chosen = trial_parser.parse(tiny(device={"name": "simulated", "gpu": card.name}, kernels=kernels))
        return trace_cache.trace_key(chosen, card)

    keys = {(kernels, card): key(kernels, card) for kernels in ("none", "liger") for card in (large, small)}
    assert keys["none", large] == keys["none", small]
    assert len(set(keys.values())) == 3


@pytest.mark.slow
def test_transformers_is_put_back(tmp_path: Path) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    before = dict(vars(modeling_qwen2))
    traced(tmp_path, **PLAIN)
    assert vars(modeling_qwen2) == before


def test_models_that_it_does_not_know(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "config": {"n_embd": 64, "n_layer": 1, "n_head": 2}}
    with pytest.raises(InvalidTrial, match="gpt2 models, only for llama, mistral, qwen2, qwen3"):
        traced(tmp_path, model=gpt2, **PLAIN)
    pytest.importorskip("liger_kernel")
    net = build.model(trial_parser.parse(tiny(model=gpt2)), torch.device("cpu"))
    assert "has no kernels for gpt2 models" in refusal(InvalidTrial, liger._library, trial_parser.parse(tiny()), net)


def products(found: Trace) -> dict[str, int]:
    """FLOPs of a step by the kind of arithmetic."""
    return {kind: sum(n * work.flops for work, n in found.kernels if work.kind == kind) for kind in ("fp8", "bf16")}


@pytest.mark.slow
def test_linear_layers_but_the_last_run_in_float8(tmp_path: Path) -> None:
    found, predicted = traced(tmp_path, **FP8, seq_len=64)
    tokens = 2 * 64
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160)
    assert products(found)["fp8"] == 6 * tokens * weights
    assert products(found)["bf16"] >= 6 * tokens * 1536 * 64
    assert estimate(found.kernels, gpu_lookup.gpu_named("h100-80gb"), tf32=False) is not None
    assert estimate(found.kernels, gpu_lookup.gpu_named("rtxpro6000-96gb"), tf32=False) is None  # its rate is not known
    _, bf16 = traced(tmp_path, **FP8 | {"precision": "bf16"}, seq_len=64)
    for part in ("parameters", "optimizer_state"):
        assert predicted.breakdown[part] == bf16.breakdown[part]


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "config": {"n_embd": 64, "n_layer": 1, "n_head": 2}}  # its layers are Conv1D
    assert "no linear layer" in refusal(InvalidTrial, traced, tmp_path, **FP8, model=gpt2)


def test_the_stand_in_computes_what_the_library_does() -> None:
    """On a CPU, which multiplies float8 too: the same loss and gradients, and they are those of fp32, roughly."""
    float8 = pytest.importorskip("torchao.float8.float8_linear").Float8Linear
    chosen = trial_parser.parse(tiny(precision="fp32"))
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


MIDDLING: dict[str, Any] = {
    "precision": "bf16", "seq_len": 1024, "micro_batch": 4,
    "model": {"config": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 32_000}},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(
    "over", [PLAIN, {"loss": "fused_linear"}, {**PLAIN, "loss": "chunked"}, {"precision": "fp8"}], ids=str
)
def test_on_a_card(run_sweep: Run, over: dict[str, Any]) -> None:
    """It trains as without it, and holds what is predicted, to what a trace does not show."""
    pairs = on_this_gpu(run_sweep, tiny(**MIDDLING), tiny(**MIDDLING | over), may_be_refused=True)
    (plain, _), (row, predicted) = pairs
    rounded = 0.02 if over.get("precision") == "fp8" else 0.01  # which has fewer digits
    assert row["loss_last"] == pytest.approx(plain["loss_last"], rel=rounded)
    assert row["peak_allocated_bytes"] == pytest.approx(predicted["peak_allocated_bytes"], rel=0.1)
