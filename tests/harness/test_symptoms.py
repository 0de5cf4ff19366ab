"""Faults by their spelling. The texts are others': what CUDA's runtime (cudaGetErrorString), the driver, its libraries,
torch and NCCL print, word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramsweep.harness import symptoms
from vramsweep.harness.outcome import Evidence, classify, transient

# fmt: off
TEXTS = {
    "oom": (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which",
        "CUDA out of memory. Tried to allocate 48.00 MiB (GPU 0; 15.90 GiB total capacity; 14.46 GiB already",
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 78.12 GiB",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA driver error: out of memory",
        "HIP out of memory. Tried to allocate 2.00 GiB.",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "Triton Error [CUDA]: out of memory",
        "NCCL error in: NCCLUtils.hpp:317, unhandled cuda error, NCCL version 2.21.5\n"
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ),
    "host_oom": (
        "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCCachingHostAllocator.cpp:278",
        "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback (most recent call last):\n"
        "RuntimeError: CUDA error: out of memory",
        "pin_memory: CUDA error: out of memory",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried",
        "not enough memory: you tried to allocate 17179869184 bytes. DefaultCPUAllocator: not enough memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "unable to mmap 4976698672 bytes from file <model.safetensors>: Cannot allocate memory (12)",
    ),
    "environment": (
        "CUDA error: unknown error\nCUDA kernel errors might be asynchronously reported at some other API call",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error was detected on NVLink",
        "CUDA error: hardware stack error",
        "CUDA error: system not yet initialized",
        "CUDA error: MPS server is not ready to accept new MPS client requests",
        "CUDA error: no kernel image is available for execution on the device",
        "CUDA error: driver shutting down",
        "CUDA error: initialization error",
        "CUDA driver error: initialization error",
        "GPU is lost", "system driver mismatch",
        "[Errno 28] No space left on device: '/scratch/checkpoint-1'",
        "unable to write to file </torch_12_34_5>: No space left on device (28)",
        "[Errno 30] Read-only file system: 'checkpoint'",
        "[Errno 122] Disk quota exceeded", "[Errno 116] Stale file handle", "[Errno 24] Too many open files",
        "can't start new thread", "[Errno 11] Resource temporarily unavailable",
    ),
    "contended": (
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    ),
    "cuda_error": (
        "CUDA error: unspecified launch failure",
        "cuda runtime error (4) : unspecified launch failure at THCTensorCopy.cu:85",
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "CUDA error: an illegal instruction was encountered",
        "CUDA error: the launch timed out and was terminated",
        "CUDA error: operation not permitted when stream is capturing",
        "NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was a network error",
        "Triton Error [CUDA]: device-side assert triggered",
    ),
    "crash": (
        "weight initialization failed", "list index out of range",
        "The size of tensor a (4) must match the size of tensor b (5)", "expected scalar type Half but found Float",
    ),
}  # fmt: skip
# fmt: on
# Of public threads and documents, each with its source; `nearly_full` is what the worker is taken to have seen.
PUBLIC = [line.split("\t") for line in (Path(__file__).parent / "public_errors.tsv").read_text().splitlines()[1:]]
CASES = [(kind, text, "unknown") for kind, texts in TEXTS.items() for text in texts]
CASES += [(kind, text.replace("\\n", "\n"), full) for kind, full, _, text in PUBLIC]
TRIED_AGAIN = {"environment", "contended", "cuda_error"}  # at once
MEMORY = {"yes": [300 << 20, 80 << 30], "no": [20 << 30, 80 << 30], "unknown": None}


@pytest.mark.parametrize(("kind", "text", "full"), CASES, ids=[f"{case[0]}-{case[1][:40]}" for case in CASES])
def test_an_error_is_the_outcome_that_its_text_says(kind: str, text: str, full: str) -> None:
    error = {"type": "builtins.RuntimeError", "message": text, "card_memory": MEMORY[full]}
    raised = Evidence(exit_code=1, result={"error": error})
    outcome, reason = classify(raised)
    assert outcome == kind
    assert reason is not None
    assert text.splitlines()[0][:60] in reason
    assert transient(outcome, raised) == (kind in TRIED_AGAIN)
    assert len({source for *_, source, _ in PUBLIC}) >= 40


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


@pytest.mark.parametrize("kind", [kind for kind in TEXTS if kind != "crash"])
def test_what_ends_a_process_from_c_is_found_above_its_stack(kind: str) -> None:
    """As libstdc++ and c10 print it: the text, then frames."""
    text = TEXTS[kind][0].splitlines()[0]
    stack = ["Exception raised from c10_cuda_check_implementation at CUDAException.cpp:44 (most recent call first):"]
    stack += [
        f"frame #{n}: at::native::something(at::Tensor const&) + 0x{n:x} (0x7f in libtorch.so)" for n in range(40)
    ]
    said = symptoms.said(["a line of the training", f"  what():  {text}", *stack])
    assert said == f"  what():  {text}"
    ended = Evidence(exit_code=-6, last_words=said)
    assert classify(ended)[0] == kind
    assert "killed by SIGABRT" in str(classify(ended)[1])


def test_a_fault_that_was_got_over_is_not_why_the_kernel_or_a_segfault_ended_a_process() -> None:
    for code in (-9, -11, 3):
        assert classify(Evidence(exit_code=code, last_words="CUDA out of memory, trying a smaller batch"))[0] == "crash"


def test_without_a_fault_the_last_line_is_the_last_word() -> None:
    assert symptoms.said(["one", "two"]) == "two"
    assert symptoms.said([]) is None


def test_what_was_got_over_is_no_last_word() -> None:
    handled = [
        "RuntimeError: CUDA out of memory, trying a smaller batch",
        "one",
        "two",
        "three",
        "free(): invalid pointer",
    ]
    assert symptoms.said(handled) == "free(): invalid pointer"
    aside = [
        "W1124 ProcessGroupNCCL.cpp:4843] using GPU 0 to perform barrier as devices used by this process",
        handled[-1],
    ]
    assert classify(Evidence(exit_code=-6, last_words=symptoms.said(aside)))[0] == "crash"
