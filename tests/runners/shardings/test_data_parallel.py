"""DDP, FSDP1 and FSDP2, whoever drives them: predicted against real ranks; targets that wrap their model themselves."""

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TARGETS, Run, cases, literal_cases, tiny
from test_sharded import WORKSPACES
from traces import SIMULATED, alive, signed, total, trace_trial

from vramsweep.harness.spec import trial, trial_parser

PARAMETERS = 119360
DIVIDED = 4 * (256 * 512 + 512 + 512 * 256 + 256)  # bytes, of tests/targets/divided.py


def under_trainer(sharding: str, **over: Any) -> dict[str, Any]:
    config = {"fsdp_config": over.pop("config")} if "config" in over else {}
    values = {"runner": {"name": "trainer", "options": config}, "sharding": sharding, "world_size": 4}
    return tiny(**values | {"device": SIMULATED} | over)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_the_trainer_holds_its_share_in_fp32(tmp_path: Path, sharding: str) -> None:
    """Also of a model that was loaded in bf16: accelerate casts what is trained."""
    trace, _ = trace_trial(under_trainer(sharding, precision="bf16"), tmp_path)
    assert total(trace, "parameters") == PARAMETERS
    assert total(trace, "optimizer_state") == pytest.approx(2 * PARAMETERS, abs=200)  # and counters


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("config", "fsdp1", "fsdp2"), cases("fsdp_config_mistakes"))
def test_what_fsdp_config_may_say(tmp_path: Path, sharding: str, config: str, fsdp1: str, fsdp2: str) -> None:
    with pytest.raises(trial.InvalidTrial, match={"fsdp1": fsdp1, "fsdp2": fsdp2}[sharding]):
        trace_trial(under_trainer(sharding, config=json.loads(config)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["trainer", "torch"])
def test_what_is_offloaded_is_page_locked_and_there_once(tmp_path: Path, runner: str) -> None:
    """CPUOffloadPolicy's pin_memory is true, of parameters and of gradients (_fsdp_param.py, _fsdp_collectives.py)."""
    trace, _ = trace_trial(under_trainer("fsdp2", offload_param=True, runner={"name": runner}), tmp_path)
    assert not any(total(trace, name) for name in ("parameters", "gradients", "optimizer_state"))
    assert total(trace, "communication") > 4 * PARAMETERS
    host = trace.host
    held = Counter[tuple[str, bool]]()
    for number in alive(host.events):
        held[host.categories[number], host.pinned[number]] += host.sizes[number]
    assert held["parameters", True] == PARAMETERS and not held["parameters", False]  # fp32, a quarter of them
    assert held["other", False] < 1000 and not held["other", True]
    gradients = [pinned for pinned, name in zip(host.pinned, host.categories, strict=True) if name == "gradients"]
    assert gradients and all(gradients)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_what_has_no_memory_yet_takes_none_while_it_is_divided(tmp_path: Path, options: dict[str, Any]) -> None:
    values = under_trainer("fsdp2", runner={"name": "torch", "options": options}, world_size=64)
    trace, _ = trace_trial(values, tmp_path)
    most = max(itertools.accumulate(signed(trace, 0, trace.marks[0].end)))
    largest = 4 * 512 * 64  # which torch makes before it is the module's
    assert largest < most < largest + 2 * 4 * PARAMETERS / 64 + 4096


@pytest.mark.slow
def test_offloaded_parameters_train_on_real_ranks(run_sweep: Run) -> None:
    cpu = {"device": {"name": "cpu"}, "world_size": 2, "offload_param": True}
    ways = ("fsdp1", "fsdp2")
    rows = run_sweep(*(under_trainer(one, **cpu) for one in ways), *(tiny(sharding=one, **cpu) for one in ways))
    assert [row["outcome"] for row in rows] == ["ok"] * 4, [row["reason"] for row in rows]
    assert {row["parameters"] for row in rows} == {PARAMETERS}


def divided(function: str, **over: Any) -> dict[str, Any]:
    runner = {"name": "custom", "target": f"{TARGETS / 'divided.py'}:{function}"}
    return tiny(**{"runner": runner, "sharding": "ddp", "world_size": 2, "model": {"name": "own"}} | over)


TOLERANCES: dict[str, int] = dict(literal_cases("tolerances_of_ranks"))


@pytest.mark.slow
@pytest.mark.deterministic
@pytest.mark.timeout(900)
def test_real_ranks_hold_what_is_predicted() -> None:
    """At rest and in each phase; token ids and counters apart.

    In a process of their own: one that has run tensor operations cannot fork ranks.
    """
    check = [sys.executable, str(ROOT / "benchmarks" / "sharded_check.py"), "--exact", "--json", "--worlds", "2"]
    done = subprocess.run([*check, *TOLERANCES], capture_output=True, text=True, check=True, timeout=850)
    found = {one["case"]: one for one in json.loads(done.stdout)}
    assert set(found) == set(TOLERANCES), done.stderr
    wrong = {}
    for name, tolerance in TOLERANCES.items():
        real, predicted = found[name]["real"], found[name]["predicted"]
        allowed = {"built": 0, "rest": 0, "forward": tolerance, "backward": tolerance, "optimizer": tolerance}
        wrong |= {
            (name, at): (predicted[at], real[at])
            for at, most in allowed.items()
            if abs(predicted[at] - real[at]) > most
        }
    assert not wrong


@pytest.mark.slow
def test_a_target_wraps_its_own_model(run_sweep: Run) -> None:
    """Buckets double the gradients, on real ranks and in the prediction."""
    predicted, whole, flattened, gathered, real, flat, shards = run_sweep(
        divided("ddp", device=SIMULATED), divided("alone"), divided("fsdp1", sharding="fsdp1", device=SIMULATED),
        divided("fsdp2", sharding="fsdp2", device=SIMULATED), divided("ddp"),
        *(divided(kind, sharding=kind) for kind in ("fsdp1", "fsdp2")),
    )  # fmt: skip
    assert [row["outcome"] for row in (real, predicted, shards, gathered)] == ["ok"] * 4, (real, predicted, shards)
    assert [row["outcome"] for row in (flat, flattened)] == ["ok"] * 2, (flat, flattened)
    assert real["parameters"] == predicted["parameters"] == shards["parameters"] == DIVIDED // 4
    assert len(real["rank_peak_allocated_bytes"]) == 2
    for row in (real, predicted):  # weights, two states, gradients, buckets
        assert row["optimizer_peak_allocated_bytes"] >= 5 * DIVIDED
    for measured, traced in ((real, predicted), (shards, gathered)):
        held = traced["optimizer_peak_allocated_bytes"] - WORKSPACES
        assert held == pytest.approx(measured["optimizer_peak_allocated_bytes"], rel=0.02)
    # with gloo one layer's part more is there, for which no reason was found
    more = flat["optimizer_peak_allocated_bytes"] - (flattened["optimizer_peak_allocated_bytes"] - WORKSPACES)
    assert 0 <= more <= DIVIDED / 4
    assert shards["optimizer_peak_allocated_bytes"] < 4 * DIVIDED
    assert whole["outcome"] == "invalid"
    assert "Sequential is no DistributedDataParallel and contains none" in whole["reason"]


@pytest.mark.parametrize(("function", "sharding", "reason"), cases("target_mistakes"))
def test_what_a_target_does_wrong_is_said_in_a_line(tmp_path: Path, function: str, sharding: str, reason: str) -> None:
    with pytest.raises(trial.InvalidTrial, match=reason):
        trace_trial(divided(function, sharding=sharding, device=SIMULATED), tmp_path)


def test_all_of_a_wrapper_s_parameters_count(tmp_path: Path) -> None:
    _, details = trace_trial(divided("in_a_wrapper", sharding="fsdp2", device=SIMULATED), tmp_path)
    assert details["parameters"] == DIVIDED // 4 + 256 * 257


def test_a_target_has_no_stages_of_zero() -> None:
    target = {"name": "custom", "target": f"{__file__}:x"}
    with pytest.raises(trial.InvalidTrial, match="needs runner=trainer or deepspeed"):
        trial_parser.parse(tiny(world_size=2, sharding="zero1", runner=target))
