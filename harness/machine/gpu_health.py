"""The health of a sweep's GPUs: one that fails trial after trial rests while others work, and is retried now and then.

A GPU is blamed if a fault of the machine or of CUDA ended a trial on it alone. For several ranks, the GPU of the rank
that the reason names is blamed, if it names one. A trial that works on a GPU clears its blame. A trial with CUDA errors
on several GPUs is itself to blame until it works somewhere; its failures count a third each. If every GPU fails, none
rests and the breaker decides (trial_loop.py). GPUs of another model than the first are ignored; trials seldom get them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vramsweep.harness.machine.machine import Gpu
from vramsweep.harness.rows.schema import Outcome, Row

FAULTS = (Outcome.ENVIRONMENT, Outcome.CUDA_ERROR, Outcome.CONTENDED)
IN_A_ROW = 2  # failed trials before a GPU rests
REST_S = 900.0  # until it gets another trial, doubled at each failure: five trials in a night of ten hours


class GpuHealth:
    """Outcomes of trials on the GPUs of a sweep, and which of these GPUs should rest."""

    def __init__(self, cards: Iterable[Gpu | None]) -> None:
        known = [card for card in cards if card]
        self._cards = {card.uuid: card for card in known if card.name == known[0].name}
        self._failed: dict[str | None, list[tuple[Row, float]]] = {uuid: [] for uuid in self._cards}
        self._errors_on = defaultdict[str, set[str | None]](set)  # by trial that only met CUDA errors: its GPUs

    def add(self, row: Row, cards: Sequence[Gpu], now_s: float) -> None:
        """Count the end of a trial for or against its GPUs, which are in the order of the ranks."""
        uuids = [card.uuid for card in cards if card.uuid in self._cards]
        if row.get("outcome") in (Outcome.OK, Outcome.OOM):
            self._errors_on.pop(row["trial_id"], None)
            for uuid in uuids:
                self._failed[uuid].clear()
        if row.get("outcome") in FAULTS:
            rank = re.match(r"rank (\d+)\b", str(row["reason"]))
            blamed = cards if len(cards) == 1 else cards[int(rank[1]) : int(rank[1]) + 1] if rank else []
            for uuid in (card.uuid for card in blamed if card.uuid in self._cards):
                self._failed[uuid].append((row, now_s))
                if row["outcome"] == Outcome.CUDA_ERROR:
                    self._errors_on[row["trial_id"]].add(uuid)

    def failures(self, trial_id: str, card: Gpu | None) -> int:
        """Count how often a trial has failed on a GPU since a trial last worked there."""
        failed = self._failed.get(card.uuid, []) if card else []
        return sum(row["trial_id"] == trial_id for row, _ in failed)

    def explains(self, row: Row) -> bool:
        """Return whether a GPU is to blame for the end of this trial, while others may work."""
        failed = any(self.failures(row["trial_id"], card) for card in self._cards.values())
        others = row["world_size"] < len(self._cards) and any(self._count(uuid) < IN_A_ROW for uuid in self._cards)
        return failed and others and not self._is_bad(row)

    def resting(self, now_s: float) -> set[str | None]:
        """Return the uuids of the GPUs that get no trial now."""
        wait = {uuid: REST_S * 2 ** (self._count(uuid) - IN_A_ROW) for uuid in self._failing()}
        return {uuid for uuid, seconds in wait.items() if now_s < self._failed[uuid][-1][1] + seconds}

    def warnings(self) -> list[str]:
        """Describe each GPU that fails while others work, and what to do."""
        found = []
        for card, failed in ((self._cards[uuid], self._failed[uuid]) for uuid in self._failing()):
            number, row = card.index if card.index >= 0 else card.uuid, failed[-1][0]
            why = f"so it gets few trials ({row['outcome']}: {row['reason']}); check it with nvidia-smi -i {number}"
            name = f"GPU {number} ({str(card.uuid)[:12]}, {card.name})"
            found.append(f"{name} failed {len(failed)} times in a row while other GPUs work, {why}")
        return found

    def _failing(self) -> list[str | None]:
        found = [uuid for uuid in self._cards if self._count(uuid) >= IN_A_ROW]
        return found if len(found) < len(self._cards) else []

    def _count(self, uuid: str | None) -> int:
        bad = sum(self._is_bad(row) for row, _ in self._failed[uuid])
        return len(self._failed[uuid]) - bad + bad // 3

    def _is_bad(self, row: Row) -> bool:
        return len(self._errors_on.get(row["trial_id"], ())) > 1
