"""What of an environment a worker gets, and what its row records of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run, custom
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness import attempt, variables

FALSIFYING = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "ACCELERATE_USE_CPU": "true",
    "TRITON_INTERPRET": "1",
}
OUTER = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "NODE_RANK": "0",
    "GROUP_RANK": "0",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "PMI_SIZE": "8",
    "MPI_LOCALNRANKS": "8",
    "MV2_COMM_WORLD_SIZE": "8",
}


@pytest.mark.parametrize("name", [*FALSIFYING, *OUTER])
def test_what_confuses_or_falsifies_is_not_passed_on_and_that_is_said(name: str) -> None:
    base = FALSIFYING | OUTER | {"HOME": "/h", "NCCL_DEBUG": "INFO"}
    environ = attempt.environment("", "cuda", base)
    assert name not in environ
    assert environ["HOME"] == "/h"
    assert environ["NCCL_DEBUG"] == "INFO"
    assert sum(name in line.partition(":")[0].replace(",", " ").split() for line in variables.dropped(base)) == 1
    assert variables.dropped({"HOME": "/h", "NCCL_DEBUG": "INFO"}) == []


@given(
    st.sampled_from(["TORCH_", "NCCL_", "HF_", "CUDA_", "PYTORCH_", "DS_", ""]),
    st.sampled_from(["TOKEN", "API_KEY", "SECRET", "PASSWORD", "AUTH", "CREDENTIAL", "PWD", "PAT", "PASSPHRASE"]),
    st.sampled_from(["", "_2", "S", "_FILE"]),
)
def test_a_secret_is_passed_on_and_never_recorded(before: str, word: str, after: str) -> None:
    environ = {f"{before}{word}{after}": "hunter2", "NCCL_DEBUG": "INFO"}
    assert attempt.environment("", "cuda", environ).items() >= environ.items()
    assert variables.recorded(environ) == {"NCCL_DEBUG": "INFO"}


@pytest.mark.slow
def test_a_row_records_what_its_worker_had_and_no_secret(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    planted = {
        "HF_TOKEN": "hf_plantedsecret",
        "WANDB_API_KEY": "plantedsecret",
        "NCCL_SECRET_KEY": "plantedsecret",
        "TORCHINDUCTOR_REDIS": "redis://me:plantedsecret@host",
        "NCCL_DEBUG": "WARN",
        "OMP_NUM_THREADS": "1",
        "EDITOR": "vi",
    }
    for name, text in (OUTER | FALSIFYING | planted).items():
        monkeypatch.setenv(name, text)
    rows = run_sweep(custom("good"), custom("killed"), isolation="warm")
    assert [row["outcome"] for row in rows] == ["ok", "crash"]
    for row in rows:  # a killed worker tells nothing, so then it is what it was given
        assert row["environment"]["NCCL_DEBUG"] == "WARN"
        assert row["environment"]["OMP_NUM_THREADS"] == "1"
        assert row["environment"]["CUDA_VISIBLE_DEVICES"] == ""
        assert not set(row["environment"]) & {*FALSIFYING, *OUTER, "EDITOR", "HF_TOKEN", "HOME"}
    said = capfd.readouterr().err
    assert said.count("CUDA_LAUNCH_BLOCKING") == 1
    held = [path for path in tmp_path.rglob("*") if path.is_file() and b"plantedsecret" in path.read_bytes()]
    assert held == []
