"""Test which variables of an environment a worker gets, and which of them its row records."""

import pytest
from conftest import Run, custom

from vramsweep.harness.process import attempt, worker_environment

FALSIFYING = {
    "CUDA_LAUNCH_BLOCKING": "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "NVIDIA_TF32_OVERRIDE": "0",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "ACCELERATE_USE_CPU": "true", "TRITON_INTERPRET": "1",
}  # fmt: skip
OUTER = {
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "NODE_RANK": "0", "GROUP_RANK": "0",
    "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "PMI_SIZE": "8", "MPI_LOCALNRANKS": "8", "MV2_COMM_WORLD_SIZE": "8",
}  # fmt: skip
KEPT = {"HOME": "/h", "NCCL_DEBUG": "INFO"}


def test_what_confuses_or_falsifies_is_not_passed_on_and_that_is_said() -> None:
    base = FALSIFYING | OUTER | KEPT
    environ = attempt.attempt_environment("", "cuda", base)
    assert environ.items() >= KEPT.items()
    said = [line.split(" because ")[0].replace(",", " ").split() for line in worker_environment.describe_dropped(base)]
    for name in (*FALSIFYING, *OUTER):
        assert name not in environ and sum(name in names for names in said) == 1, name
    assert worker_environment.describe_dropped(KEPT) == []


@pytest.mark.slow
def test_a_row_records_what_its_worker_had(
    run_sweep: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = {"HF_TOKEN": "hf_plantedsecret", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1", "EDITOR": "vi"}
    for name, text in (OUTER | FALSIFYING | own).items():
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
