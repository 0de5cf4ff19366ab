"""Two readers of one set of peaks, against a stand-in of torch's counters that has but one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vramsweep.runners.shared_peaks import SharedCudaMemory


class Counters:
    """What torch has of each card: bytes now, and the most since the last reset, whoever resets."""

    def __init__(self) -> None:
        self.now, self.peak = [0, 0], [0, 0]

    def hold(self, amount: int, card: int = 0) -> None:
        self.now[card] = amount
        self.peak[card] = max(self.peak[card], amount)

    def read(self, device: int | None = None) -> dict[str, Any]:
        card = device or 0
        pool = {"current": self.now[card], "peak": self.peak[card]}
        names = ("allocated", "active", "requested", "reserved", "inactive_split")
        return {f"{name}_bytes": {"all": dict(pool)} for name in names} | {"num_ooms": 0}

    def reset(self, device: int | None = None) -> None:
        self.peak[device or 0] = self.now[device or 0]


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    found = Counters()
    for place in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(place, "memory_stats_as_nested_dict", found.read)
        monkeypatch.setattr(place, "reset_peak_memory_stats", found.reset)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


def test_neither_sees_the_others_resets(counters: Counters) -> None:
    ours = SharedCudaMemory()
    ours.install()
    counters.hold(100)
    counters.hold(10)
    torch.cuda.reset_peak_memory_stats()  # the script's, as a memory tracker of the Trainer does
    counters.hold(50)
    counters.hold(20)
    assert ours.take()["allocated"] == 100  # not 50, which is all that torch still knows
    assert ours.held == 20
    assert torch.cuda.max_memory_allocated() == 50  # not 20, which our take has left
    counters.hold(30)
    assert (ours.take()["allocated"], ours.take()["allocated"]) == (30, 30)
    assert torch.cuda.max_memory_allocated() == 50
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 30
    counters.hold(60)
    assert torch.cuda.memory_stats()["reserved_bytes.all.peak"] == 60
    ours.uninstall()
    assert torch.cuda.memory_stats_as_nested_dict == counters.read
    assert torch.cuda.memory.reset_peak_memory_stats == counters.reset


def test_another_card_is_left_alone(counters: Counters) -> None:
    ours = SharedCudaMemory()
    ours.install()
    for card, amount in ((0, 100), (1, 70), (0, 10), (1, 7)):
        counters.hold(amount, card)
    torch.cuda.reset_peak_memory_stats(1)
    assert ours.take()["allocated"] == 100
    assert (torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_allocated(1)) == (100, 7)
    ours.uninstall()
