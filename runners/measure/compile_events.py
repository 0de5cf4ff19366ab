"""What torch.compile has done, as torch itself counts it. Needs nothing: a script's process has it from its start."""

from __future__ import annotations

import sys


class Compiler:
    """What torch.compile has done in this process since the instrument was made, whoever asked for it.

    Source: torch._dynamo.utils, `counters` and `calculate_time_spent`, which has the wall time of forward and backward
    graphs, with whatever their caches on disk held.
    """

    def __init__(self, ours: bool = True) -> None:
        """`ours`: nothing was compiled in this process that is not this trial's."""
        self._begun = self._so_far()
        self._ours = ours

    @staticmethod
    def _so_far() -> tuple[int, float]:
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return 0, 0.0
        return int(utils.counters["stats"]["unique_graphs"]), float(utils.calculate_time_spent()["total_wall_time"])

    def graphs(self) -> int:
        """How many graphs were compiled."""
        return self._so_far()[0] - self._begun[0]

    def compiled(self) -> bool:
        """Whether compiled code may run, which calls no operators of torch's."""
        return self._so_far()[0] > (self._begun[0] if self._ours else 0)

    def seconds(self) -> float | None:
        """Seconds that compiling took; None where nothing was compiled."""
        return self._so_far()[1] - self._begun[1] if self.graphs() else None
