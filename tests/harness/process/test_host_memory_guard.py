"""Test the reading of free host memory, in cgroups too, and the end of an attempt that takes it all."""

import mmap
from pathlib import Path

import psutil
import pytest
from conftest import Run, custom, parametrized, tiny

from vramsweep.harness.machine import host_memory
from vramsweep.harness.machine.host_memory import Room
from vramsweep.harness.process import host_memory_guard
from vramsweep.harness.rows import outcome

GIB, MIB = 1 << 30, 1 << 20


def test_the_less_there_is_the_sooner_it_is_looked_at() -> None:
    rooms = iter([Room(64 * GIB, left) for left in (64 * GIB, 64 * GIB, 2 * GIB, 1025 * MIB)])
    watch = host_memory_guard.HostMemoryGuard(list, room=lambda: next(rooms))
    waits = [watch.look() for _ in range(3)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] <= host_memory_guard.LOOK_S and waits[-1] == host_memory_guard.SOONEST_S


def test_next_to_nothing_left_ends_the_attempt() -> None:
    rooms = iter([Room(64 * GIB, 60 * GIB), Room(64 * GIB, GIB - 1)])
    watch = host_memory_guard.HostMemoryGuard(lambda: [psutil.Process().pid, 1 << 22], room=lambda: next(rooms))
    with pytest.raises(host_memory_guard.HostMemoryExhausted) as found:
        watch.look()
    memory = found.value.memory
    assert (memory.total, memory.used, memory.before) == (64 * GIB, 63 * GIB + 1, 4 * GIB)
    assert 10 * MIB < memory.held < 20 * GIB  # this process; another does not exist


@parametrized("full_host_memory")
def test_whose_doing_it_was(held: int, before: int, kind: str, said: str) -> None:
    memory = outcome.HostMemory(held * GIB, 63 * GIB, 64 * GIB, before * GIB)
    found, reason = outcome.classify(outcome.Evidence(expired=True, starved=memory))
    assert (found, said in str(reason)) == (kind, True)


def test_what_is_shared_or_page_locked_is_held_too() -> None:
    own = psutil.Process().pid
    before = host_memory_guard.resident_bytes([own])
    with mmap.mmap(-1, 64 * MIB) as shared:
        for at in range(0, 64 * MIB, 4096):
            shared[at] = 1
        assert host_memory_guard.resident_bytes([own]) - before >= 60 * MIB


@parametrized("memory_files_of_cgroups")
def test_a_cgroup_s_files_make_room_for_others(
    tmp_path: Path, version: str, text: str, place: str, most: str, used: str, stat: str
) -> None:
    (tmp_path / "own").write_text(text)
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / most).write_text("1000")
    (tmp_path / place / used).write_text("900")
    (tmp_path / place / "memory.stat").write_text(stat)
    (tmp_path / place).parent.joinpath(most).write_text("max" if version == "v2" else str(1 << 62))
    assert host_memory.memory_room(tmp_path / "own", tmp_path) == Room(1000, 500)
    assert host_memory.memory_here(tmp_path / "own", tmp_path) == 1000


@pytest.mark.slow
def test_a_trial_that_takes_the_host_s_memory_is_host_oom_and_the_next_runs(
    run_sweep: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a GiB were all there is: the trial is ended long before the machine is."""
    own = psutil.Process()

    def room() -> Room:
        return Room(
            4 * GIB, 4 * GIB - host_memory_guard.resident_bytes(child.pid for child in own.children(recursive=True))
        )

    monkeypatch.setattr(host_memory, "memory_room", room)
    rows = run_sweep(custom("fills_memory"), tiny(seq_len=8), isolation="cold")
    assert [row["outcome"] for row in rows] == ["host_oom", "ok"]
    assert "of the host's 4.0 GiB" in rows[0]["reason"]
    assert rows[0]["terminal"] and rows[0]["attempt"] == 1
