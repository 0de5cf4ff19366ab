"""For a process that has this folder on its PYTHONPATH: NVML with four cards, each as empty as can be."""

from types import SimpleNamespace


class NVMLError(Exception):
    pass


def _says(answer: object):  # type: ignore[no-untyped-def]
    return lambda *asked: answer(*asked) if callable(answer) else answer


nvmlInit = nvmlShutdown = nvmlDeviceGetCurrentClocksEventReasons = _says(None)
nvmlDeviceGetCount, nvmlSystemGetDriverVersion = _says(4), _says("580.0")
nvmlDeviceGetHandleByIndex = _says(lambda index: f"GPU-{index}")
nvmlDeviceGetUUID = nvmlDeviceGetHandleByUUID = _says(lambda uuid: uuid)
nvmlDeviceGetName, nvmlDeviceGetCudaComputeCapability = _says("NVIDIA H100 80GB HBM3"), _says((9, 0))
nvmlDeviceGetMemoryInfo = _says(SimpleNamespace(total=80 << 30, used=0))
nvmlDeviceGetComputeRunningProcesses = nvmlDeviceGetGraphicsRunningProcesses = _says([])
