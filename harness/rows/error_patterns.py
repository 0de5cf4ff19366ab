"""What an error's text says of an attempt: the one table of faults by their spelling. Pure.

The texts are those of CUDA's runtime and driver (cudaGetErrorString, cuGetErrorName), of its libraries' status codes,
and of what torch, NCCL, triton and bitsandbytes make of them. Not covered: what an outcome means for the trial, and how
a process ends (outcome.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vramsweep.harness.rows.schema import Outcome


@dataclass(frozen=True)
class ErrorPattern:
    """A fault, the outcome of an attempt that shows it, and how it is spelled: a pattern, whatever the case."""

    fault: str
    outcome: Outcome
    spelling: str
    when_full: bool = False  # only where the card is known to have been nearly full; else it is another fault's


# The first that is found decides: a collective that runs out of memory also says NCCL, and a lost card CUDA error.
# fmt: off
SYMPTOMS = (
    ErrorPattern("no room in the host's memory that can be page-locked: torch's pinned allocator, DataLoader's thread "
        "for it", Outcome.HOST_OOM,
        r"out of memory[\s\S]*CachingHostAllocator|CachingHostAllocator[\s\S]*out of memory|"
        r"in pin memory thread[\s\S]*out of memory|pin_memory: [^\n]*out of memory"),
    ErrorPattern("no room on the GPU: torch's allocator, either backend", Outcome.OOM,
        r"(CUDA|HIP) out of memory|would exceed allowed memory"),
    ErrorPattern("no room on the GPU: CUDA's runtime and driver, triton, bitsandbytes, spconv, XLA, TensorFlow",
        Outcome.OOM,
        r"(CUDA|HIP) (driver |runtime )?error( \(2\) ?)?: (2 )?out of memory|cudaErrorMemoryAllocation|"
        r"cuda failed with error 2 out of memory|RESOURCE_EXHAUSTED: Out of memory|OOM when allocating tensor.*GPU|"
        r"hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|Triton Error \[CUDA\]: out of memory|"
        r"Error out of memory at line"),
    ErrorPattern("no room on the GPU: cuBLAS, cuDNN, cuSOLVER, cuSPARSE, cuFFT", Outcome.OOM,
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|"
        r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ErrorPattern("no room on the GPU: NCCL", Outcome.OOM,
        r"(NCCL|ncclUnhandledCudaError)[\s\S]*out of memory|Cuda failure( 2)? '?out of memory"),
    ErrorPattern("no room in the host's memory", Outcome.HOST_OOM,
        r"DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|std::bad_alloc|"
        r"Unable to allocate [\d.]+ \w+ for an array"),
    ErrorPattern("no driver, or one that does not go with this torch or GPU", Outcome.ENVIRONMENT,
        r"No CUDA GPUs are available|Found no NVIDIA driver|NVIDIA driver on your system is too old|"
        r"cudaGetDeviceCount|CUDA unknown error|no CUDA-capable device|driver version is insufficient|"
        r"CUDA driver initialization failed|CUDA (driver )?error: initialization error|Driver/library version mismatch|"
        r"unsupported display driver / cuda driver combination|system driver mismatch|SYSTEM_?DRIVER_?MISMATCH|"
        r"forward compatibility was attempted on non supported HW|Cuda failure( 3)? '?initialization error|"
        r"no kernel image is available for execution|invalid device ordinal|CUDA error: driver shutting down"),
    ErrorPattern("the GPU or its link is broken or gone (Xid 48, 63, 64, 74, 79, 94, 95)", Outcome.ENVIRONMENT,
        r"ECC error|(GPU|device) is lost|fallen off the bus|CUDA (driver )?error: unknown error|NVLink error|"
        r"error( was)? (detected|encountered) .*NVLink|over nvlink or a hardware error|hardware stack error|"
        r"Cuda failure( 999)? '?unknown error|GPU requires reset|Unable to determine the device handle|"
        r"Xid \(PCI:[^)]*\): (48|6[234]|74|79|9[45]|119|120),"),
    ErrorPattern("the node is not ready", Outcome.ENVIRONMENT,
        r"system not yet initialized|MPS (server|client|daemon)"),
    ErrorPattern("no room on a disk, or none that can be written to", Outcome.ENVIRONMENT,
        r"No space left on device|Disk quota exceeded|Read-only file system|Stale file handle|Input/output error|"
        r"out of shared memory"),  # /dev/shm, where data loaders' workers leave their batches
    ErrorPattern("the system gives no more files or processes", Outcome.ENVIRONMENT,
        r"Too many open files|Resource temporarily unavailable|can't start new thread"),
    ErrorPattern("others use the GPU", Outcome.CONTENDED,
        r"CUDA-capable device(s|\(s\)) (is\/)?are busy|device is in use"),
    # torch asks NVML who holds the card's memory once it ran out, and stops where NVML may not say
    ErrorPattern("no room on the GPU, in disguise: of torch's report, of what a library takes when it starts, NCCL's",
        Outcome.OOM,
        r"NVML_SUCCESS == .*INTERNAL ASSERT FAILED|NCCL[^\n]*unhandled cuda error(?![\s\S]*Cuda failure)|"
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)",
        when_full=True),
    ErrorPattern("any other of CUDA's: device-side assert, illegal access, launch failure, a library's",
        Outcome.CUDA_ERROR,
        r"(CUDA|HIP) (driver |runtime )?error|(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS|CUFFT_|AcceleratorError|"
        r"NCCL[^\n]*(error|fail|timeout|timed out|abort)|nccl\w+Error|Watchdog (caught collective|got stuck)|"
        r"device-side assert|Triton Error \[CUDA\]|NVML_SUCCESS == |CUDA_ERROR_|Xid \(PCI:"),
)
# fmt: on
_ENDED = re.compile(r"terminate called|^\s*what\(\): ")  # how libstdc++ announces the end
NEAR = 3  # lines from the last: a Python error is followed by what its streams and threads still say
_PATTERNS = tuple((symptom, re.compile(symptom.spelling, re.IGNORECASE)) for symptom in SYMPTOMS)


def find(text: str, full: bool = False) -> ErrorPattern | None:
    """The fault that a text tells of; None where it tells of none that is known. `full`: the card was, nearly."""
    return next((one for one, pattern in _PATTERNS if (full or not one.when_full) and pattern.search(text)), None)


def error_text(lines: list[str]) -> str | None:
    """Of the lines that a process wrote before it ended, the one that says why; None where it wrote none.

    It is among the last, or where C++ says that it ends and why, above its stack. What a line further up tells of was
    got over.
    """
    ended = next((at for at in reversed(range(len(lines))) if _ENDED.search(lines[at])), None)
    why = lines[-NEAR:][::-1] if ended is None else lines[ended:]
    return next((line for line in why if find(line) is not None), lines[-1] if lines else None)
