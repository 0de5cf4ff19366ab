"""Places for trials: who may start when, on what; what one that ends does to its neighbours (nothing)."""

import functools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, Run, custom, gone, refusal, tiny
from hypothesis import given
from hypothesis import strategies as some
from launchers import CARDS, swept

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import attempt
from vramsweep.harness.process.signals import Finished, Interrupts
from vramsweep.harness.sweep import plan, scheduler
from vramsweep.harness.sweep.budget import Expected
from vramsweep.harness.sweep.plan import Planned
from vramsweep.harness.sweep.scheduler import Pool, Resource, Slot
from vramsweep.harness.verbs import plan as plan_verb


def planned(*ranks: int, device: str = "cuda") -> list[Planned]:
    values = [
        tiny(device={"name": device}, seed=n, world_size=size, sharding="ddp" if size > 1 else "none")
        for n, size in enumerate(ranks)
    ]
    return [one for of in plan.expand_trials(values, 1) for one in of]


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor() as executor:
        yield executor


@given(some.lists(some.integers(1, 4), max_size=12), some.integers(1, 6), some.booleans())
def test_no_place_is_had_by_two_and_every_trial_runs_once(ranks: list[int], places: int, exclusive: bool) -> None:
    lock, held, most, seen = threading.Lock(), set[str](), [0, 0], list[str]()
    with ThreadPoolExecutor() as executor:
        cards = [Resource(card) for card in CARDS[:places]]

        def run(item: Planned, slot: Slot) -> dict[str, Any]:
            own = {str(card.uuid) for card in slot.cards}
            assert item.trial and len(own) == min(item.trial.world_size, places)
            with lock:
                assert not held & own
                held.update(own)
                most[:] = max(most[0], len(held)), max(most[1], len(held) if not own else 0)
                seen.append(item.trial_id)
            time.sleep(0.0005)
            with lock:
                held.difference_update(own)
            return {"trial_id": item.trial_id}

        items = planned(*ranks)
        waiting, rows = list(items), dict[str, Any]()
        with Pool(executor, cards, exclusive) as running:
            while True:
                while started(running, waiting, run):
                    assert not exclusive or len(running) == 1
                if not running:
                    break
                item, row = running.wait()
                rows[item.trial_id] = row
    assert not waiting and sorted(seen) == sorted(rows) == sorted(item.trial_id for item in items)


def started(pool: Pool, waiting: list[Planned], run: Any) -> bool:
    """Whether one of `waiting` could be started, which then is out of the list."""
    first = pool.first_fitting(waiting)
    if first is not None:
        item = waiting.pop(first[0])
        pool.start(item, first[1], functools.partial(run, item))
    return first is not None


def test_those_that_ran_together_know_of_each_other_and_no_others(threads: Any) -> None:
    gates = {item.trial_id: threading.Event() for item in planned(1, 1, 1)}
    first, second, third = gates

    def run(item: Planned, slot: Slot) -> dict[str, Any]:
        gates[item.trial_id].wait(10)
        return {"beside": slot.beside}

    waiting, found = planned(1, 1, 1), dict[str, Any]()
    with Pool(threads, [Resource(), Resource()], exclusive=False) as running:
        while started(running, waiting, run):
            pass
        for gate, waits in ((first, True), (second, False), (third, False)):
            gates[gate].set()
            item, row = running.wait()
            assert item.trial_id == gate and row is not None
            found[gate] = row["beside"]
            assert started(running, waiting, run) is waits
    assert found == {first: {second}, second: {first, third}, third: {second}}


def test_cards_and_cpus_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    other = machine.Gpu(8, "NVIDIA T4", "GPU-8", "1", 16 << 30, 0, (), (7, 5))
    monkeypatch.setattr(machine, "visible_gpus", lambda _: [*CARDS[:4], other])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    assert scheduler.list_resources(planned(1, 2), None) == [
        Resource(CARDS[0], (0, 1)), Resource(CARDS[1], (2, 3, 4)),
        Resource(CARDS[2], (5, 6)), Resource(CARDS[3], (7, 8, 9)),
    ]  # fmt: skip
    assert [place.card for place in scheduler.list_resources(planned(1), 1)] == CARDS[:1]
    assert scheduler.list_resources(planned(1), 1)[0].cpus == ()  # one at a time has them all
    assert [place.card for place in scheduler.list_resources(planned(1, 3), 2)] == CARDS[:3]
    assert [place.card for place in scheduler.list_resources(planned(5), 2)] == [*CARDS[:4], other]
    assert scheduler.list_resources(planned(1, 1, device="cpu"), None) == [Resource()]
    # more than there are CPUs: they share them
    assert scheduler.list_resources(planned(1, device="cpu"), 12) == [Resource()] * 12


@pytest.mark.parametrize(
    ("near", "shares"),
    [  # of cards 0 to 3; this process may run on CPUs 0 to 9
        ({0: range(8, 64), 1: range(8), 2: range(8, 64), 3: range(8)}, [(8,), (0, 1, 2, 3), (9,), (4, 5, 6, 7)]),
        ({0: range(9, 64), 1: range(9), 2: range(9, 64), 3: range(9)}, [(9,), (0, 1, 2, 3), (9,), (4, 5, 6, 7, 8)]),
        ({0: range(5), 1: range(5)}, None),  # of two cards it is not known
        ({0: range(6), 1: range(4, 10), 2: range(6), 3: range(6)}, None),  # these are no nodes
        ({0: range(20, 30), 1: range(5), 2: range(5), 3: range(5)}, None),  # it may not run there
    ],
)
def test_cpus_are_those_next_to_the_card_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch, near: dict[int, range], shares: list[tuple[int, ...]] | None
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda _: CARDS[:4])
    monkeypatch.setattr(machine, "cpus_near", lambda card: tuple(near.get(card.index, ())))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    found = [place.cpus for place in scheduler.list_resources(planned(1), None)]
    assert found == (shares or [(0, 1), (2, 3, 4), (5, 6), (7, 8, 9)])


def test_cards_that_are_not_alike_are_for_trials_that_need_them(threads: Any) -> None:
    other = machine.Gpu(8, "NVIDIA T4", "GPU-8", "1", 16 << 30, 0, (), (7, 5))
    seen: dict[int, list[str]] = {}

    def run(item: Planned, slot: Slot) -> dict[str, Any]:
        assert item.trial
        seen[item.trial.seed] = [card.name for card in slot.cards]
        return {}

    waiting = planned(1, 1, 2)
    with Pool(threads, [Resource(CARDS[0]), Resource(other)], exclusive=False) as running:
        while started(running, waiting, run) or running:
            if running:
                running.wait()
    assert seen == {0: ["NVIDIA H100"], 1: ["NVIDIA H100"], 2: ["NVIDIA H100", "NVIDIA T4"]}


def test_cards_that_have_no_name_of_their_own_are_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    nameless = machine.Gpu(0, "NVIDIA H100", None, "1", 80 << 30, 0, (), (9, 0))
    monkeypatch.setattr(machine, "visible_gpus", lambda _: [nameless, nameless])
    assert scheduler.list_resources(planned(1), 2) == [Resource()]


def test_one_that_fits_passes_by_one_that_does_not(threads: Any) -> None:
    gate, order = threading.Event(), list[int]()

    def run(item: Planned, slot: Slot) -> dict[str, Any]:
        assert item.trial
        order.append(item.trial.world_size)
        if item.trial.world_size == 2:
            gate.wait(10)
        return {}

    waiting = planned(2, 3, 1)
    with Pool(threads, [Resource(card) for card in CARDS[:3]], exclusive=False) as running:
        assert [started(running, waiting, run) for _ in range(3)] == [True, True, False]
        running.wait()
        assert not started(running, waiting, run)
        gate.set()
        running.wait()
        assert started(running, waiting, run)
        running.wait()
    assert order == [2, 1, 3]


def test_what_is_raised_in_a_slot_stops_the_others_and_is_raised(threads: Any) -> None:
    def run(item: Planned, slot: Slot) -> dict[str, Any]:
        if item.trial and item.trial.seed == 1:
            raise OSError("no disk")
        slot.sleep(60)
        raise AssertionError("not stopped")

    waiting, began = planned(1, 1), time.monotonic()
    with pytest.raises(OSError, match="no disk"), Pool(threads, [Resource()] * 2, exclusive=False) as running:
        while started(running, waiting, run):
            pass
        running.wait()
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("as_in_a_terminal")
def test_asked_to_stop_nothing_is_tried_again(threads: Any) -> None:
    def run(item: Planned, slot: Slot) -> dict[str, Any]:
        slot.sleep(60)
        raise AssertionError("not stopped")

    with (
        Interrupts().heard() as interrupts,
        pytest.raises(Finished),
        interrupts.finishing(),
        Pool(threads, [Resource()], exclusive=False, asked=interrupts.check) as running,
    ):
        started(running, planned(1), run)
        os.kill(os.getpid(), signal.SIGINT)
        assert running.wait()[1] is None


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "two", 513])
def test_slots_that_cannot_be(run_sweep: Run, value: Any) -> None:
    assert "allowed is null" in refusal(UserError, run_sweep, tiny(), slots=value)


@pytest.mark.slow
def test_one_that_is_ended_leaves_its_neighbour_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is ended at its deadline with its daemon; its neighbour, of the same template, and its daemon live on."""
    monkeypatch.setenv("NEIGHBOURS", str(tmp_path))
    both = [custom("neighbour", seed=1), custom("neighbour", seed=2)]
    attempt_ = attempt.Launcher.attempt

    def sooner(self: attempt.Launcher, spec: Any, folder: Path, environ: Any, runner: str, *more: Any) -> Any:
        return attempt_(self, spec, folder, environ, runner, 12.0 if spec["trial"]["seed"] == 1 else 200.0, more[-1])

    monkeypatch.setattr(attempt.Launcher, "attempt", sooner)
    first, second = swept(None, tmp_path / "t", *both, slots=2)
    assert (first["outcome"], second["outcome"]) == ("timeout", "ok"), second["reason"]
    assert first["node_trials"] == [second["trial_id"]] and second["node_trials"] == [first["trial_id"]]
    assert "not_alone" in second["flags"]
    assert all(gone(int((tmp_path / name).read_text())) for name in "12")
    assert len(list((tmp_path / "t" / "trials" / "templates").iterdir())) == 1


def test_plan_expects_less_time_where_trials_run_beside_each_other() -> None:
    items = planned(1, 1, 1, 2, device="cpu")
    expected = {item.trial_id: Expected(100.0, "a test") for item in items}

    def seconds(**over: Any) -> float | None:
        settings = plan.Settings(**(SETTINGS | over))
        return plan_verb._spread_over_slots(Expected(400.0, "a test"), items, expected, settings).seconds

    assert seconds() == 400 and seconds(slots=4, exclusive=True) == 400
    assert seconds(slots=4) == 125  # three of one place, one of two
    assert seconds(slots=400) == 100  # no less than the longest


def test_plan_says_that_trials_at_the_same_time_make_no_speed_and_what_another_way_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda _: CARDS[:4])
    monkeypatch.setattr(plan_verb.Budget, "total", lambda self, items: Expected(8 * 3600.0, "a test"))
    monkeypatch.setattr(plan_verb.Budget, "expected", lambda self, item: Expected(3600.0, "a test"))

    def said(device: str = "cuda", ranks: tuple[int, ...] = (1,) * 8, **over: Any) -> str:
        plan_verb.show(
            planned(*ranks, device=device), plan.Settings(**(SETTINGS | {"predict": False} | over)), tmp_path
        )
        return capsys.readouterr().out

    assert "up to 4 trials run at the same time, so `check` rejects their speed" in said()
    assert "exclusive=true runs one trial at a time, in 8 h instead of 2 h" in said()
    assert '"estimated_exclusive_s": 28800.0' in said(output="json")
    assert "up to 2 trials run at the same time" in (two := said(ranks=(2,) * 8)) and "; 2 at the same time" in two
    for ranks in ((4,) * 8, (1, 4), (1, 4, 4)):  # a trial of four takes all places
        assert "at the same time" not in said(ranks=ranks)
    for silent in (said(exclusive=True), said(slots=1), said("cpu"), said("simulated", slots=4)):
        assert "exclusive=true" not in silent
    assert "exclusive=true" in said("cpu", slots=2)
