"""Optimizers whose kernels are compiled on first use: torchao's by Inductor, DeepSpeed's Adam by a C++ compiler."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import Run, tiny
from test_optimizers import COMPILED, EFFECTIVE, deepspeed, library, state, stored
from traces import SIMULATED as A100

from vramsweep.runners.measure.step_meter import COMPILED_UNSEEN

pytestmark = pytest.mark.deterministic


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.timeout(600)
def test_real_compiled_steps(run_sweep: Run, name: str) -> None:
    """Also where every operator is watched, which `torch.compile` does not suffer; what it hides is null, and said."""
    library(name)
    (row,) = run_sweep(tiny(optimizer=name), timeout_s=500)
    assert row["outcome"] == "ok", row["reason"]
    assert row["optimizer_effective"] == EFFECTIVE[name]
    assert math.isfinite(row["loss_last"])
    assert row["compile_s"] > 0 and row["hardware_flops_per_token"]
    assert row["optimizer_peak_allocated_bytes"] is None and COMPILED_UNSEEN in row["notes"]


@pytest.mark.slow
def test_deepspeed_s_fused_adam_has_its_python_code_s_state_and_no_temporaries(run_sweep: Run) -> None:
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.op_builder import FusedAdamBuilder

    compiled = SimpleNamespace(multi_tensor_adam=lambda *args: None)
    with mock.patch.object(FusedAdamBuilder, "load", lambda self: compiled):
        weights = torch.nn.Parameter(torch.zeros(119360))
        weights.grad = torch.zeros_like(weights)
        own = FusedAdam([weights])
        own.step()
    pairs = itertools.product(("zero0", "zero2", "zero3"), ("deepspeed_fused_adam", "adamw_torch_foreach"))
    rows = run_sweep(*(tiny(device=A100, **deepspeed(sharding, optimizer=name)) for sharding, name in pairs))
    assert [row["outcome"] for row in rows] == ["ok"] * 6, [row["reason"] for row in rows]
    for fused, foreach in zip(rows[::2], rows[1::2], strict=True):
        assert fused["optimizer_effective"].endswith("(FusedAdam)")
        assert fused["peak_optimizer_state_bytes"] == stored([weights]) + state(own)
        if fused["sharding"] != "zero2":  # where gradients are the peak
            assert fused["optimizer_peak_allocated_bytes"] < foreach["optimizer_peak_allocated_bytes"]
        assert fused["estimated_launches"] < foreach["estimated_launches"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_deepspeed_s_cpu_adam_really_steps_and_takes_none_of_the_card(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled on first use, which takes a minute or two: a folder of its own, as one given up leaves a lock behind."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    offloaded = {"offload_optimizer": True, "optimizer": "deepspeed_cpu_adam"}
    two, three, theirs, real = run_sweep(
        tiny(device=A100, **deepspeed("zero2", **offloaded)), tiny(device=A100, **deepspeed("zero3", **offloaded)),
        tiny(device=A100, **deepspeed("zero2", **offloaded | {"optimizer": "adamw_torch"})),
        tiny(**deepspeed("zero2", **offloaded)), timeout_s=800,
    )  # fmt: skip
    assert [row["outcome"] for row in (two, three, theirs, real)] == ["ok"] * 4, real["reason"]
    assert two["peak_optimizer_state_bytes"] == three["peak_optimizer_state_bytes"] == 0
    assert two["peak_allocated_bytes"] == theirs["peak_allocated_bytes"]
    assert two["optimizer_effective"] == real["optimizer_effective"] == "DeepSpeedZeroOptimizer(DeepSpeedCPUAdam)"
    assert math.isfinite(real["loss_last"])
