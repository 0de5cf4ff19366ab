"""Test which variables of an environment a worker gets, and which of them its row records."""

import pytest
from conftest import Run, cases, custom

from vramsweep.harness.process import attempt, worker_environment

FALSIFYING = dict(cases("falsifying_variables"))
OUTER = dict(cases("variables_of_launchers"))
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
