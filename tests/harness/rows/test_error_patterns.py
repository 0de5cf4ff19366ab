"""Faults by their spelling. The texts are others': what CUDA's runtime (cudaGetErrorString), the driver, its libraries,
torch and NCCL print, word for word."""

from pathlib import Path

import pytest

from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.outcome import Evidence, classify, is_retryable

# Of public threads and documents, or as a library prints it; `nearly_full` is what the worker is taken to have seen.
LINES = (Path(__file__).parent / "public_errors.tsv").read_text().splitlines()[1:]
CASES = [(kind, full, source, text.replace("\\n", "\n")) for kind, full, source, text in (x.split("\t") for x in LINES)]
TEXTS = [(kind, text) for kind, full, _, text in CASES if full == "unknown"]  # as where no card can be asked
TRIED_AGAIN = {"environment", "contended", "cuda_error"}  # at once
MEMORY = {"yes": [300 << 20, 80 << 30], "no": [20 << 30, 80 << 30], "unknown": None}


@pytest.mark.parametrize(("kind", "full", "source", "text"), CASES, ids=[f"{c[0]}-{c[3][:40]}" for c in CASES])
def test_an_error_is_the_outcome_that_its_text_says(kind: str, full: str, source: str, text: str) -> None:
    error = {"type": "builtins.RuntimeError", "message": text, "card_memory": MEMORY[full]}
    raised = Evidence(exit_code=1, result={"error": error})
    outcome, reason = classify(raised)
    assert outcome == kind
    assert reason is not None
    assert text.splitlines()[0][:60] in reason
    assert is_retryable(outcome, raised) == (kind in TRIED_AGAIN)
    assert source and len({case[2] for case in CASES if "/" in case[2]}) >= 40


@pytest.mark.parametrize(
    ("memory", "kind"),
    [([1023 << 20, 80 << 30], "oom"), ([1024 << 20, 80 << 30], "cuda_error"), ([255 << 20, 5 << 30], "oom"),
     ([257 << 20, 5 << 30], "cuda_error"), ([], "cuda_error"), (["0", 1], "cuda_error"), (7, "cuda_error")],
)  # fmt: skip
def test_nearly_full_is_less_than_a_gibibyte_or_a_twentieth_and_never_guessed(memory: object, kind: str) -> None:
    error = {"type": "builtins.RuntimeError", "message": "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"}
    outcome, reason = classify(Evidence(exit_code=1, result={"error": error | {"card_memory": memory}}))
    assert outcome == kind
    assert ("GiB were free" in str(reason)) == (kind == "oom")


@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in CASES} - {"crash"}))
def test_what_ends_a_process_from_c_is_found_above_its_stack(kind: str) -> None:
    """As libstdc++ and c10 print it: the text, then frames."""
    text = next(t for k, full, _, t in CASES if (k, full) == (kind, "unknown") and "\n" not in t)
    stack = ["Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44 (most recent call first):"]
    stack += [
        f"frame #{n}: at::native::something(at::Tensor const&) + 0x{n:x} (0x7f in libtorch.so)" for n in range(40)
    ]
    said = outcome.error_text(["a line of the training", f"  what():  {text}", *stack])
    assert said == f"  what():  {text}"
    ended = Evidence(exit_code=-6, last_words=said)
    assert classify(ended)[0] == kind
    assert "killed by SIGABRT" in str(classify(ended)[1])


def test_a_fault_that_was_got_over_is_not_why_the_kernel_or_a_segfault_ended_a_process() -> None:
    for code in (-9, -11, 3):
        assert classify(Evidence(exit_code=code, last_words="CUDA out of memory, trying a smaller batch"))[0] == "crash"


def test_without_a_fault_the_last_line_is_the_last_word() -> None:
    assert outcome.error_text(["one", "two"]) == "two"
    assert outcome.error_text([]) is None


def test_what_was_got_over_is_no_last_word() -> None:
    last = "free(): invalid pointer"
    handled = ["RuntimeError: CUDA out of memory, trying a smaller batch", "one", "two", "three", last]
    assert outcome.error_text(handled) == last
    aside = "W1124 ProcessGroupNCCL.cpp:4843] using GPU 0 to perform barrier as devices used by this process"
    assert classify(Evidence(exit_code=-6, last_words=outcome.error_text([aside, last])))[0] == "crash"
