"""Recordings made by the simulator itself, in the format of torch.cuda.memory._snapshot()."""

from typing import Any

from test_allocator_simulator import Driver

from vramsweep.harness.allocator.config import parse
from vramsweep.harness.allocator.snapshot import RecordingSimulator


class Recorder(RecordingSimulator):
    """A simulator that writes down a trace as PyTorch does; `simulator` and `trace` are what tests read."""

    def __init__(self, config: str, limit: int | None = None) -> None:
        super().__init__(parse(config), limit, lambda _handle: 0)
        self.simulator, self.trace = self, self.events

    def snapshot(self, keep: int | None = None) -> dict[str, Any]:
        """The final state with the last `keep` events, as a ring buffer would have them."""
        found = super().snapshot()
        return found | {"device_traces": [self.trace if keep is None else self.trace[len(self.trace) - keep :]]}


def record(operations: Any, config: str = "", limit: int | None = None) -> Recorder:
    """Run drawn operations (see test_allocator_simulator) under a recorder; out of memory is noted and survived."""
    recorder = Recorder(config, limit)
    for _ in Driver(recorder).run(operations):
        pass
    return recorder
