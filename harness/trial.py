"""What custom targets of earlier versions import by this name; new ones say `from vramsweep import Trial`."""

from vramsweep.harness.spec.trial import (
    AllocatorAxis,
    DeviceAxis,
    InvalidTrial,
    ModelAxis,
    ProtocolAxis,
    RunnerAxis,
    Trial,
)

__all__ = ["AllocatorAxis", "DeviceAxis", "InvalidTrial", "ModelAxis", "ProtocolAxis", "RunnerAxis", "Trial"]
