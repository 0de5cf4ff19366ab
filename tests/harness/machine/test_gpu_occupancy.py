"""Cards whose memory does not come back, or comes back late, on a stand-in for NVML."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import pynvml
import pytest
from test_machine import Driver, card

from vramsweep.harness import machine, outcome
from vramsweep.harness.occupancy import Occupancy

GIB = 1 << 30


def holding(used: int, *processes: tuple[int, int], **over: Any) -> dict[str, Any]:
    listed = [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes]
    memory = types.SimpleNamespace(total=80 * GIB, used=used)
    return card(MemoryInfo=memory, ComputeRunningProcesses=listed, GraphicsRunningProcesses=[], **over)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(monkeypatch, [holding(GIB)])
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetGraphicsRunningProcesses", lambda one: one["GraphicsRunningProcesses"], raising=False
    )
    return made


def holds(driver: Driver, used: int, *processes: tuple[int, int]) -> None:
    driver.cards[0].update(holding(used, *processes))


def nobody() -> set[int]:
    return set()


def test_memory_that_comes_back_late_is_waited_for(driver: Driver) -> None:
    occupancy, cards, slept = Occupancy(), machine.gpus(), list[float]()
    assert occupancy.taken(cards, nobody, slept.append) is None
    holds(driver, 60 * GIB)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            holds(driver, GIB + (200 << 20))

    assert occupancy.taken(cards, nobody, sleep) is None
    assert slept == [0.2, 0.5, 1.0]


def test_who_holds_it_is_named(driver: Driver) -> None:
    occupancy, cards = Occupancy(), machine.gpus()
    occupancy.taken(cards, nobody, lambda _: None)
    own = os.getpid()
    holds(driver, 3 * GIB)
    driver.cards[0]["ComputeRunningProcesses"] = [types.SimpleNamespace(pid=own, usedGpuMemory=2 * GIB)]
    taken = occupancy.taken(cards, lambda: {own}, lambda _: None)
    assert taken is not None and not taken.processes
    name = Path("/proc/self/comm").read_text().strip()
    held = f"2.0 GiB more than before are in use on GPU 0, held by process {own} {name}"
    assert taken.held is not None and taken.held.startswith(held[:-1])
    kind, reason = outcome.classify(outcome.Evidence(held=taken.held))
    assert (kind, reason) == ("contended", taken.held)
    assert outcome.transient(kind, outcome.Evidence(held=taken.held))


def test_memory_that_nobody_holds_is_said_to_be(driver: Driver) -> None:
    occupancy, cards = Occupancy(), machine.gpus()
    occupancy.taken(cards, nobody, lambda _: None)
    holds(driver, 3 * GIB)
    taken = occupancy.taken(cards, nobody, lambda _: None)
    assert taken is not None and "no process that can be seen" in str(taken.held)


def test_the_least_that_was_seen_is_the_measure(driver: Driver) -> None:
    """A sweep that begins while somebody else's memory is still being cleared."""
    occupancy, cards = Occupancy(), machine.gpus()
    holds(driver, 10 * GIB)
    assert occupancy.taken(cards, nobody, lambda _: None) is None
    holds(driver, 0)
    assert occupancy.taken(cards, nobody, lambda _: None) is None
    holds(driver, 10 * GIB)
    assert occupancy.taken(cards, nobody, lambda _: None) is not None


def test_a_process_of_others_is_told_before_memory(driver: Driver) -> None:
    occupancy, cards = Occupancy(), machine.gpus()
    holds(driver, 3 * GIB, (77, GIB), (78, GIB))
    taken = occupancy.taken(cards, lambda: {78}, lambda _: None)
    assert taken is not None and (taken.processes, taken.held) == ((77,), None)


def test_what_nvml_does_not_say_holds_nobody_up(driver: Driver) -> None:
    occupancy, cards = Occupancy(), machine.gpus()
    driver.cards[0]["MemoryInfo"] = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    assert occupancy.taken(cards, nobody, lambda _: None) is None
    assert occupancy.taken([], nobody, lambda _: None) is None


def test_a_desktop_that_grows_stops_nothing_and_hides_nothing(driver: Driver) -> None:
    """What only draws is not counted, then or now."""
    occupancy, cards = Occupancy(), machine.gpus()
    drawing = driver.cards[0]["GraphicsRunningProcesses"]
    drawing.append(types.SimpleNamespace(pid=7, usedGpuMemory=GIB))
    assert occupancy.taken(cards, nobody, lambda _: None) is None
    holds(driver, 4 * GIB)
    driver.cards[0]["GraphicsRunningProcesses"] = [types.SimpleNamespace(pid=7, usedGpuMemory=4 * GIB)]
    assert occupancy.taken(cards, nobody, lambda _: None) is None
    holds(driver, 5 * GIB)
    driver.cards[0]["GraphicsRunningProcesses"] = [types.SimpleNamespace(pid=7, usedGpuMemory=4 * GIB)]
    taken = occupancy.taken(cards, nobody, lambda _: None)
    assert taken is not None and str(taken.held).startswith("1.0 GiB more than before")
