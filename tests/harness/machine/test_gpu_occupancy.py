"""Cards whose memory does not come back, or comes back late, on a stand-in for NVML."""

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from test_machine import Driver, card

from vramsweep.harness.machine import machine
from vramsweep.harness.machine.gpu_occupancy import GpuTaken, Occupancy
from vramsweep.harness.rows import outcome

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


Look = Callable[..., GpuTaken | None]


@pytest.fixture
def look(driver: Driver) -> Look:
    """Looks at the cards before a trial, as a sweep does whose own processes are these."""
    occupancy, cards = Occupancy(), machine.gpus()
    return lambda *own, sleep=lambda _: None: occupancy.taken(cards, lambda: set(own), sleep)


def test_memory_that_comes_back_late_is_waited_for(driver: Driver, look: Look) -> None:
    slept = list[float]()
    assert look(sleep=slept.append) is None
    holds(driver, 60 * GIB)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            holds(driver, GIB + (200 << 20))

    assert look(sleep=sleep) is None
    assert slept == [0.2, 0.5, 1.0]


def test_who_holds_it_is_named_or_that_nobody_can_be_seen_to(driver: Driver, look: Look) -> None:
    look()
    holds(driver, 3 * GIB)
    taken = look()
    assert taken is not None and "no visible process" in str(taken.held)
    own = os.getpid()
    holds(driver, 3 * GIB, (own, 2 * GIB))
    taken = look(own)
    assert taken is not None and not taken.processes
    name = Path("/proc/self/comm").read_text().strip()
    held = f"2.0 GiB more than before are in use on GPU 0, held by process {own} {name}"
    assert taken.held is not None and taken.held.startswith(held[:-1])
    kind, reason = outcome.classify(outcome.Evidence(held=taken.held))
    assert (kind, reason) == ("contended", taken.held)
    assert outcome.is_retryable(kind, outcome.Evidence(held=taken.held))


def test_the_least_that_was_seen_is_the_measure(driver: Driver, look: Look) -> None:
    """A sweep that begins while somebody else's memory is still being cleared."""
    seen = []
    for used in (10 * GIB, 0, 10 * GIB):
        holds(driver, used)
        seen.append(look() is None)
    assert seen == [True, True, False]


def test_a_process_of_others_is_told_before_memory(driver: Driver, look: Look) -> None:
    holds(driver, 3 * GIB, (77, GIB), (78, GIB))
    taken = look(78)
    assert taken is not None and (taken.processes, taken.held) == ((77,), None)


def test_what_nvml_does_not_say_holds_nobody_up(driver: Driver, look: Look) -> None:
    driver.cards[0]["MemoryInfo"] = pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
    assert look() is None
    assert Occupancy().taken([], set, lambda _: None) is None


def test_a_desktop_that_grows_stops_nothing_and_hides_nothing(driver: Driver, look: Look) -> None:
    """A process that only draws is counted neither before nor now."""
    found = []
    for used, drawn in ((GIB, GIB), (4 * GIB, 4 * GIB), (5 * GIB, 4 * GIB)):
        holds(driver, used)
        driver.cards[0]["GraphicsRunningProcesses"] = [types.SimpleNamespace(pid=7, usedGpuMemory=drawn)]
        found.append(look())
    assert found[:2] == [None, None] and found[2] is not None
    assert str(found[2].held).startswith("1.0 GiB more than before")
