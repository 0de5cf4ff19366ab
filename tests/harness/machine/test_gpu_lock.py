"""Locks of cards, between sweeps of one user."""

import contextlib
import subprocess
import sys
from pathlib import Path

from conftest import source
from launchers import CARDS

from vramsweep.harness.machine import machine
from vramsweep.harness.machine.gpu_occupancy import lock_gpus

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
