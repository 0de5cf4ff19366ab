"""GPUs whose memory does not come back, or late, on a stand-in for NVML; and the locks of one user's sweeps."""

import contextlib
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest
from conftest import source
from launchers import CARDS
from test_machine import Driver, card

from vramsweep.harness.machine import machine
from vramsweep.harness.machine.gpu_readiness import GpuTaken, Occupancy, lock_gpus
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


HOLDS = source("holder_of_a_lock.txt")


def test_another_sweep_s_card_is_waited_for_and_said_and_is_free_when_its_process_ends(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin and other.stdout and other.stdout.readline() == "None\n"
    slept = list[float]()
    with lock_gpus(CARDS[:2], slept.append, 3, tmp_path) as others:
        assert others == f"GPU 1 is used by another sweep, process {other.pid}"
    assert sum(slept) == 3
    with lock_gpus(CARDS[:1], slept.append, 3, tmp_path) as others:
        assert others is None

    def sleep(seconds: float) -> None:
        other.kill()
        other.wait()

    with lock_gpus(CARDS[:2], sleep, 3, tmp_path) as others:
        assert others is None
    other.communicate()


def test_who_waits_comes_before_who_has_just_had_it(tmp_path: Path) -> None:
    """One that is at the head of the queue keeps a third, and the one that has the card now, from going before it."""
    first, order = CARDS[:1], list[str]()
    with contextlib.ExitStack() as had:
        assert had.enter_context(lock_gpus(first, lambda _: None, 0, tmp_path)) is None

        def third_comes_too(seconds: float) -> None:
            with lock_gpus(first, lambda _: None, 0, tmp_path) as others:
                order.append(f"third: {others is None}")
            had.close()

        with lock_gpus(first, third_comes_too, 9, tmp_path) as others:
            order.append(f"second: {others is None}")
    assert order == ["third: False", "second: True"]


def test_without_a_folder_or_names_it_is_as_without_locks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nameless = machine.Gpu(0, "NVIDIA H100", None, "1", 80 << 30, 0, (), (9, 0))
    for cards, folder in ((CARDS, tmp_path / "file" / "below"), ([nameless], tmp_path)):
        with lock_gpus(cards, lambda _: None, 0, folder) as others:
            assert others is None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (tmp_path / "GPU-0.lock").symlink_to(tmp_path / "file")
    with lock_gpus(CARDS[:1], lambda _: None, 0, tmp_path) as others:
        assert others is None
    assert (tmp_path / "file").read_text() == ""
