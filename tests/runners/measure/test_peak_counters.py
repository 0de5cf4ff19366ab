"""Two readers of one set of peaks, against a stand-in of torch's counters that has but one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.cuda import max_memory_allocated, reset_peak_memory_stats  # as scripts take them, before anything is there

from vramsweep.runners.measure.counters import CudaMemory
from vramsweep.runners.measure.peak_counters import READ, READS, RESET, RESETS, SharedPeaks

CARD = torch.device("cuda", 0)


class Counters:
    """A stand-in for torch's counters of each GPU: bytes now, and the most since the last reset, whoever resets."""

    def __init__(self) -> None:
        self.now, self.peak = [0, 0], [0, 0]
        self.failed = 0

    def hold(self, *amounts: int, card: int = 0) -> None:
        for amount in amounts:
            self.now[card] = amount
            self.peak[card] = max(self.peak[card], amount)

    def read(self, card: int) -> dict[str, Any]:
        pool = {"current": self.now[card], "peak": self.peak[card]}
        names = ("allocated", "active", "requested", "reserved", "inactive_split")
        return {f"{name}_bytes": {"all": dict(pool)} for name in names} | {"num_ooms": self.failed}

    def reset(self, card: int) -> None:
        self.peak[card] = self.now[card]


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    found = Counters()
    for name in READS:
        monkeypatch.setattr(torch._C, name, found.read, raising=False)
    for name in RESETS:
        monkeypatch.setattr(torch._C, name, found.reset, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True, raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    for module in (torch.cuda.memory, getattr(torch.accelerator, "memory", None)):
        if module is not None:
            monkeypatch.setattr(module, "_get_device_index", lambda device, optional: device or 0)
    return found


@pytest.fixture
def shared(counters: Counters) -> Iterator[SharedPeaks]:
    found = SharedPeaks()
    found.install()
    yield found
    found.uninstall()
    for card in (0, 1):
        reset_peak_memory_stats(card)
    assert (getattr(torch._C, READ), getattr(torch._C, RESET)) == (counters.read, counters.reset)


def test_neither_sees_the_others_resets(counters: Counters, shared: SharedPeaks) -> None:
    ours = CudaMemory(CARD, shared)
    counters.hold(100, 10)
    torch.cuda.reset_peak_memory_stats()  # the script's, as a memory tracker of the Trainer does
    counters.hold(50, 20)
    assert ours.take()["allocated"] == 100  # not 50, which is all that torch still knows
    assert (ours.held, ours.held_reserved) == (20, 20)
    assert torch.cuda.max_memory_allocated() == 50  # not 20, which our take has left
    counters.hold(30)
    assert (ours.take()["allocated"], ours.take()["allocated"]) == (30, 30)
    assert torch.cuda.max_memory_allocated() == 50
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 30
    counters.hold(60)
    assert torch.cuda.memory_stats()["reserved_bytes.all.peak"] == 60


def test_no_way_leads_past_us(counters: Counters, shared: SharedPeaks) -> None:
    ways = [(reset_peak_memory_stats, max_memory_allocated)]
    if hasattr(torch._C, "_accelerator_resetPeakStats") and hasattr(torch.accelerator, "max_memory_allocated"):
        ways.append((torch.accelerator.reset_peak_memory_stats, torch.accelerator.max_memory_allocated))
    for reset, most in ways:
        counters.hold(100, 10)
        reset()
        counters.hold(50, 20)
        assert shared.take(CARD)["allocated_bytes"]["all"]["peak"] == 100
        assert most() == 50


def test_what_was_reset_before_the_meter_is_there_still_counts(counters: Counters, shared: SharedPeaks) -> None:
    counters.hold(100, 10)
    torch.cuda.reset_peak_memory_stats()  # just before its loop: the load is over
    assert CudaMemory(CARD, shared).take()["allocated"] == 100


def test_the_script_goes_on_reading_what_it_would_without_us(counters: Counters, shared: SharedPeaks) -> None:
    counters.hold(100, 10)
    shared.take(CARD)
    shared.uninstall()
    assert torch.cuda.max_memory_allocated() == 100
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 10
    assert (getattr(torch._C, READ), getattr(torch._C, RESET)) == (counters.read, counters.reset)


def test_cards_are_told_apart(counters: Counters, shared: SharedPeaks) -> None:
    first, second = CudaMemory(CARD, shared), CudaMemory(torch.device("cuda", 1), shared)
    counters.hold(100, 10)
    counters.hold(70, 7, card=1)
    torch.cuda.reset_peak_memory_stats(1)
    assert (first.take()["allocated"], second.take()["allocated"]) == (100, 70)
    assert (torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_allocated(1)) == (100, 7)


def test_what_an_earlier_training_left_is_not_of_the_next(
    counters: Counters, shared: SharedPeaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters.hold(100, 10)
    counters.failed = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    shared.forget()
    ours = CudaMemory(CARD, shared)
    counters.hold(30, 20)
    counters.failed = 4
    assert ours.take()["allocated"] == 30
    assert shared.counted(CARD, "num_ooms") == 1
    assert torch.cuda.max_memory_allocated() == 100  # the script's own view


def test_without_cuda_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, READ, raising=False)
    before = dict(vars(torch._C))
    shared = SharedPeaks()
    shared.install()
    shared.uninstall()
    assert dict(vars(torch._C)) == before
