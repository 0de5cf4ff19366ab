"""A bad card of four costs only its own trials; what fails everywhere is not blamed on the cards."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, parametrized, refusal, tiny
from launchers import CARDS, StandIn, error

from vramsweep.harness.machine import gpu_readiness, machine
from vramsweep.harness.machine.gpu_readiness import REST_S, GpuHealth
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import plan, run_trials

LOST = error("x.EnvironmentFault", "no CUDA device")
ECC = error("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered")


def night(folder: Path, faults: Any, trials: int = 24, slow_s: float = 0.002, **over: Any) -> tuple[list[Row], int]:
    values = [tiny(device={"name": "cuda"}, seed=n, **over.pop("trial", {})) for n in range(trials)]
    settings = plan.Settings(**(SETTINGS | {"retries": 2, "breaker": 5, "isolation": "warm"} | over))
    launcher: Any = StandIn(faults, slow_s)
    status = run_trials.run(plan.order_trials(plan.expand_trials(values, 1)), settings, folder, launcher=launcher)[1]
    return journal.read(folder)[0], status


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> list[machine.Gpu]:
    seen = CARDS[:4]
    monkeypatch.setattr(machine, "gpus", lambda: seen)
    monkeypatch.setattr(gpu_readiness, "PROCESSES_S", ())
    return seen


@pytest.mark.slow
@parametrized("bad_gpus")
def test_a_bad_card_costs_only_its_own_trials(
    tmp_path: Path, cards: Any, capfd: pytest.CaptureFixture[str], case: str, bad: set[int], slow_s: float
) -> None:
    faults = {f"GPU-{n}": LOST if case == "lost" else ECC for n in bad if case in ("lost", "ecc")}
    for n in bad if case == "contended" else ():
        cards[n] = machine.Gpu(n, "NVIDIA H100", f"GPU-{n}", "1", 80 << 30, 0, (4711,), (9, 0))
    if case == "gone":  # before the sweep begins
        cards[2] = machine.Gpu(2, None, None, "1", None, None, None, problem="GPU is lost")
    rows, status = night(tmp_path, faults, slow_s=slow_s)
    went = Counter(row["gpu_uuid"] for row in rows)
    assert (status, Counter(row["outcome"] for row in rows)["ok"]) == (0, 24)
    assert [went[f"GPU-{n}"] for n in bad] == [0 if case == "gone" else 2] * len(bad)
    attempts = {(row["trial_id"], row["attempt"]) for row in rows}
    assert len(attempts) == len(rows) == 24 + sum(went[f"GPU-{n}"] for n in bad)
    out = capfd.readouterr().out
    for n in bad if case != "gone" else ():
        told = f"GPU {n} (GPU-{n}, NVIDIA H100) failed 2 times in a row while other GPUs work, so it gets few trials ("
        assert told in str(out.splitlines()[-len(bad) :]) and f"check it with nvidia-smi -i {n}" in out
        assert f"ETA 0:00 · GPU {n} (GPU-{n}, NVIDIA H100) failed 2 times in a row" in out or len(bad) > 1


def test_where_every_card_fails_the_breaker_rules(tmp_path: Path, cards: Any) -> None:
    assert "5 trials in a row" in refusal(UserError, night, tmp_path / "all", {f"GPU-{n}": LOST for n in range(4)})
    with pytest.raises(UserError, match="5 trials in a row"):
        night(tmp_path / "host", dict.fromkeys(range(6, 24), ECC))  # the trials' own
    del cards[1:]
    assert "5 trials in a row" in refusal(UserError, night, tmp_path / "one", {"GPU-0": LOST})
    assert len(journal.read(tmp_path / "one")[0]) == 15  # each trial three times, as there is no other card


def test_trials_that_fail_on_every_card_are_blamed_and_no_card_rests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, status = night(tmp_path, dict.fromkeys(range(5, 24, 6), ECC), breaker=0)
    assert (status, Counter(row["outcome"] for row in rows)) == (1, {"ok": 20, "cuda_error": 12})
    assert len({row["gpu_uuid"] for row in rows if row["trial"]["seed"] == 23}) > 1
    assert "nvidia-smi" not in capsys.readouterr().out  # a card may have rested for a moment


def test_who_is_to_blame() -> None:
    health = GpuHealth(CARDS[:4])

    def ended(trial: str, outcome: str, *cards: int, rank: int | None = None, at_s: float = 0.0) -> set[str]:
        row = {"trial_id": trial, "outcome": outcome, "reason": "why" if rank is None else f"rank {rank}: why"}
        health.add(row, [CARDS[n] for n in cards], at_s)
        return health.resting(at_s)

    assert ended("a", "environment", 0, 1) == ended("b", "environment", 0, 1) == set()  # nobody knows which rank
    assert ended("a", "environment", 0, 1, rank=1) == set() and ended("b", "contended", 1, 2, rank=0) == {"GPU-1"}
    assert [health.explains({"trial_id": trial, "world_size": 2}) for trial in "bc"] == [True, False]
    assert ended("e", "cuda_error", rank=3) == ended("e", "cuda_error", 1, 1, rank=3) == {"GPU-1"}  # no such card
    assert health.resting(REST_S + 1) == set()  # one trial more
    assert ended("c", "environment", 1, at_s=REST_S + 1) == health.resting(3 * REST_S) == {"GPU-1"}
    assert ended("d", "crash", 1, at_s=REST_S) == {"GPU-1"}  # which says nothing of the card
    assert ended("d", "ok", 1, at_s=REST_S) == set() and health.warnings() == []
    for card in range(4):
        for trial in "ab":
            resting = ended(trial, "environment", card)
    assert resting == set() and not health.explains({"trial_id": "a", "world_size": 1})  # never all of them
    mixed = [CARDS[0], dataclasses.replace(CARDS[1], name="another"), CARDS[2]]
    health = GpuHealth(mixed)
    for rank in (1, 2, 2):
        health.add({"trial_id": f"{rank}", "outcome": "environment", "reason": f"rank {rank}: why"}, mixed, 0.0)
    assert health.resting(0.0) == {"GPU-2"}
