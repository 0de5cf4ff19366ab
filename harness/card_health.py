"""Which of a sweep's cards fail trial after trial: these rest beside cards that work, and are tried again now and then.

A card is blamed for a fault of the machine, or of CUDA, that ended a trial on it alone; of several ranks, only where it
is known which one failed. A trial that works there takes the blame away, and a trial that fails on a second card, which
worked before, is itself to blame. Where every card fails so, none rests, and the breaker decides (sweep.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vramsweep.harness.machine import Gpu
from vramsweep.harness.row import Outcome, Row

FAULTS = (Outcome.ENVIRONMENT, Outcome.CUDA_ERROR, Outcome.CONTENDED)
IN_A_ROW = 2  # trials that a card fails before it rests
REST_S = 900.0  # before it gets one trial more, doubled each time that this fails: five in a night of ten hours


class CardHealth:
    """Learns how trials end on these cards; cards without a uuid, which cannot be told apart, are left out."""

    def __init__(self, cards: Iterable[Gpu | None]) -> None:
        self._cards = {card.uuid: card for card in cards if card and card.uuid}
        self._failed: dict[str, list[tuple[Row, float]]] = {uuid: [] for uuid in self._cards}
        self._working = set[str]()  # cards whose last trial worked
        self._bad_trials = set[str]()

    def add(self, row: Row, cards: Sequence[Gpu], now_s: float) -> None:
        """Count the end of a trial on these cards, the first of them rank 0's, for or against them."""
        uuids = [card.uuid for card in cards if card.uuid in self._cards]
        if row.get("outcome") in (Outcome.OK, Outcome.OOM):
            self._working.update(uuids)
            for uuid in uuids:
                self._failed[uuid].clear()
        if row.get("outcome") not in FAULTS or row["trial_id"] in self._bad_trials:
            return
        rank = row.get("failed_rank")
        blamed = uuids if len(uuids) == 1 else uuids[rank : rank + 1] if rank is not None else []
        if row["outcome"] == Outcome.CUDA_ERROR and self._working.intersection(blamed) and self._blamed(row):
            self._bad_trials.add(row["trial_id"])
            for failed in self._failed.values():
                failed[:] = [one for one in failed if one[0]["trial_id"] != row["trial_id"]]
        else:
            for uuid in blamed:
                self._failed[uuid].append((row, now_s))
        self._working.difference_update(blamed)

    def failures(self, trial_id: str, card: Gpu | None) -> int:
        """Count how often a trial has failed on a card since another one worked there."""
        failed = self._failed.get(card.uuid or "", []) if card else []
        return sum(row["trial_id"] == trial_id for row, _ in failed)

    def explains(self, row: Row) -> bool:
        """Whether one of the cards, beside others that may work, is to blame for how this trial ended."""
        return self._blamed(row) and any(len(failed) < IN_A_ROW for failed in self._failed.values())

    def resting(self, now_s: float) -> set[str]:
        """Find the cards, by uuid, that get no trial now."""
        rest = {uuid: failed[-1][1] + REST_S * 2 ** (len(failed) - IN_A_ROW) for uuid, failed in self._failing().items()}
        return {uuid for uuid, until in rest.items() if now_s < until}

    def warnings(self) -> dict[str, str]:
        """Say which cards fail beside others that work: in short, and in a sentence with what to do."""
        found = {}
        for uuid, failed in self._failing().items():
            card, row = self._cards[uuid], failed[-1][0]
            number = card.index if card.index >= 0 else uuid
            found[f"GPU {number} failed {len(failed)} in a row"] = (
                f"GPU {number} ({uuid[:12]}, {card.name}) failed {len(failed)} times in a row and gets no more trials "
                f"while others work ({row['outcome']}: {row['reason']}); check it with nvidia-smi -i {number}"
            )
        return found

    def _failing(self) -> dict[str, list[tuple[Row, float]]]:
        found = {uuid: failed for uuid, failed in self._failed.items() if len(failed) >= IN_A_ROW}
        return found if len(found) < len(self._failed) else {}

    def _blamed(self, row: Row) -> bool:
        return any(self.failures(row["trial_id"], card) for card in self._cards.values())
