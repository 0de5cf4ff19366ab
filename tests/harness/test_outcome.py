"""Evidence to outcome, as a table."""

from __future__ import annotations

import pytest

from vramsweep.harness.outcome import Evidence, classify, transient


def failed(kind: str, message: str) -> Evidence:
    return Evidence(exit_code=1, result={"error": {"type": kind, "message": message}})


CASES = [
    (Evidence(exit_code=0, result={"values": {}}), "ok", False, ""),
    (failed("torch.OutOfMemoryError", "CUDA out of memory. Tried"), "oom", False, "Tried"),
    (failed("torch.AcceleratorError", "CUDA error: out of memory"), "oom", False, "out of memory"),
    (failed("builtins.RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "oom", False, "CUBLAS"),
    (
        failed("builtins.RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        "host_oom",
        False,
        "",
    ),
    (failed("builtins.MemoryError", ""), "host_oom", False, "MemoryError"),
    (failed("torch.AcceleratorError", "CUDA error: an illegal memory access"), "cuda_error", True, "illegal"),
    (failed("builtins.RuntimeError", "CUDA error: device-side assert triggered"), "cuda_error", True, "assert"),
    (
        failed("builtins.RuntimeError", "CUDA error: all CUDA-capable devices are busy or unavailable"),
        "contended",
        True,
        "",
    ),
    (failed("vramsweep.harness.trial.InvalidTrial", "seq_len too long"), "invalid", False, "seq_len too long"),
    (failed("builtins.ValueError", "no\nsecond line"), "crash", False, "builtins.ValueError: no"),
    (Evidence(expired=True, deadline_s=3), "timeout", False, "no result within 3 s"),
    (Evidence(exit_code=-9), "crash", True, "SIGKILL"),
    (Evidence(exit_code=-9, host_oom_kills=1), "host_oom", False, "kernel"),
    (Evidence(exit_code=-11, host_oom_kills=1), "crash", True, "SIGSEGV"),
    (Evidence(exit_code=3), "crash", True, "exit status 3"),
    (Evidence(exit_code=None), "crash", True, "template"),
    (Evidence(exit_code=0), "bad_result", True, "without a result"),
    (Evidence(exit_code=0, result_error="result.json cannot be read"), "bad_result", True, "cannot be read"),
    (Evidence(foreign=(7, 8)), "contended", True, "pid 7, 8"),
]


@pytest.mark.parametrize(("evidence", "outcome", "again", "reason"), CASES)
def test_evidence(evidence: Evidence, outcome: str, again: bool, reason: str) -> None:
    kind, text = classify(evidence)
    assert kind == outcome
    assert transient(kind, evidence) is again
    assert (text is None) == (outcome == "ok")
    assert reason in (text or "")
    assert "\n" not in (text or "")


def test_a_result_from_a_worker_that_was_killed_afterwards_is_not_ok() -> None:
    assert classify(Evidence(exit_code=-6, result={"values": {}}))[0] == "crash"
