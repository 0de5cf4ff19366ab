"""Counts of torch.compile's work, from torch itself. Needs only sys, so a script's process has it from its start."""

import sys


class Compiler:
    """Graphs and seconds of torch.compile in this process since this object was made, whoever called it.

    Source: torch._dynamo.utils, `counters` and `calculate_time_spent`. The latter has the wall time of forward
    and backward graphs, which depends on what their caches on disk held.
    """

    def __init__(self, ours: bool = True) -> None:
        """Start to count. `ours`: the process compiles for this trial only, so `compiled` ignores earlier graphs."""
        self._begun = self._so_far()
        self._ours = ours

    @staticmethod
    def _so_far() -> tuple[int, float]:
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return 0, 0.0
        return int(utils.counters["stats"]["unique_graphs"]), float(utils.calculate_time_spent()["total_wall_time"])

    def graphs(self) -> int:
        """Count the graphs compiled since this object was made."""
        return self._so_far()[0] - self._begun[0]

    def compiled(self) -> bool:
        """Check whether compiled code may run. Such code calls no operators of torch."""
        return self._so_far()[0] > (self._begun[0] if self._ours else 0)

    def seconds(self) -> float | None:
        """Return the seconds that compiling took; None if nothing was compiled."""
        return self._so_far()[1] - self._begun[1] if self.graphs() else None
