"""Which of a sweep's cards fail trial after trial: these rest beside cards that work, and are tried again now and then.

A card is blamed for a fault of the machine, or of CUDA, that ended a trial on it alone; of several ranks, only where
the reason names one. A trial that works there takes the blame away. A trial with an error of CUDA on several cards is
itself to blame until it works somewhere: it counts a third. Where every card fails so, none rests: the breaker decides
(trial_loop.py). Not covered: cards that are not as the first, which trials seldom have.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from vramsweep.harness.machine.machine import Gpu
from vramsweep.harness.rows.schema import Outcome, Row

FAULTS = (Outcome.ENVIRONMENT, Outcome.CUDA_ERROR, Outcome.CONTENDED)
IN_A_ROW = 2  # trials that a card fails before it rests
REST_S = 900.0  # before it gets one trial more, doubled each time that this fails: five in a night of ten hours


class GpuHealth:
    """Learns how trials end on these cards."""

    def __init__(self, cards: Iterable[Gpu | None]) -> None:
        known = [card for card in cards if card]
        self._cards = {card.uuid: card for card in known if card.name == known[0].name}
        self._failed: dict[str | None, list[tuple[Row, float]]] = {uuid: [] for uuid in self._cards}
        self._errors_on = defaultdict[str, set[str | None]](set)  # the cards of each trial that met errors of CUDA only

    def add(self, row: Row, cards: Sequence[Gpu], now_s: float) -> None:
        """Count the end of a trial on these cards, the first of them rank 0's, for or against them."""
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
        """Count how often a trial has failed on a card since another one worked there."""
        failed = self._failed.get(card.uuid, []) if card else []
        return sum(row["trial_id"] == trial_id for row, _ in failed)

    def explains(self, row: Row) -> bool:
        """Whether one of the cards, beside others that may work, is to blame for how this trial ended."""
        failed = any(self.failures(row["trial_id"], card) for card in self._cards.values())
        others = row["world_size"] < len(self._cards) and any(self._count(uuid) < IN_A_ROW for uuid in self._cards)
        return failed and others and not self._is_bad(row)

    def resting(self, now_s: float) -> set[str | None]:
        """Find the cards, by uuid, that get no trial now."""
        wait = {uuid: REST_S * 2 ** (self._count(uuid) - IN_A_ROW) for uuid in self._failing()}
        return {uuid for uuid, seconds in wait.items() if now_s < self._failed[uuid][-1][1] + seconds}

    def warnings(self) -> list[str]:
        """Say which cards fail beside others that work, and what to do."""
        found = []
        for card, failed in ((self._cards[uuid], self._failed[uuid]) for uuid in self._failing()):
            number, row = card.index if card.index >= 0 else card.uuid, failed[-1][0]
            why = f"while others work ({row['outcome']}: {row['reason']}); check it with nvidia-smi -i {number}"
            name = f"GPU {number} ({str(card.uuid)[:12]}, {card.name})"
            found.append(f"{name} failed {len(failed)} times in a row and gets no more trials {why}")
        return found

    def _failing(self) -> list[str | None]:
        found = [uuid for uuid in self._cards if self._count(uuid) >= IN_A_ROW]
        return found if len(found) < len(self._cards) else []

    def _count(self, uuid: str | None) -> int:
        bad = sum(self._is_bad(row) for row, _ in self._failed[uuid])
        return len(self._failed[uuid]) - bad + bad // 3

    def _is_bad(self, row: Row) -> bool:
        return len(self._errors_on.get(row["trial_id"], ())) > 1
