"""Every runner on the tiny model, in real workers, on CPU."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, Run, custom, tiny

from vramsweep.analysis.data.load import load
from vramsweep.harness.process import attempt
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import plan, run_trials

pytestmark = pytest.mark.slow


def deepspeed(stage: int, **over: Any) -> dict[str, Any]:
    runner = {"name": "deepspeed", "zero_stage": stage, "offload_optimizer": False, "offload_param": False}
    # buckets of DeepSpeed's default size would be 2 GB of zeros each
    small = {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}
    runner["options"] = {"zero_optimization": small}
    return tiny(runner=runner | over.pop("runner", {}), **over)


def same_but_for_the_machine(row: Row) -> Row:
    """Return the columns that must not depend on how the process started: no times, resident sets and bookkeeping."""
    kept = ("memory_source", "outcome", "optimizer_effective", "attention_effective", "parameters", "runner_config",
            "trial_id")  # fmt: skip
    columns = {k: v for k, v in row.items() if "allocated" in k or "flops" in k or k.startswith("loss") or k in kept}
    return {k: v for k, v in columns.items() if v is not None}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Row]]:
    """One row for each runner and isolation."""
    values = {"torch": tiny(), "trainer": tiny(runner={"name": "trainer"}), "deepspeed": deepspeed(2, precision="bf16")}
    rows: dict[str, dict[str, Row]] = {}
    for isolation in ("cold", "warm"):
        folder = tmp_path_factory.mktemp(isolation)
        expanded = plan.expand_trials(values.values(), 1)
        chosen = plan.Settings(**(SETTINGS | {"isolation": isolation}))
        done, _ = run_trials.run(plan.order_trials(expanded), chosen, folder)
        rows[isolation] = {name: done[trials[0].trial_id] for name, trials in zip(values, expanded, strict=True)}
    return rows


@pytest.mark.parametrize("runner", ["torch", "trainer", "deepspeed"])
def test_cold_and_warm_give_equal_rows(both: dict[str, dict[str, Row]], runner: str) -> None:
    cold, warm = (both[isolation][runner] for isolation in ("cold", "warm"))
    assert cold["outcome"] == "ok", cold["reason"]
    expected, found = same_but_for_the_machine(cold), same_but_for_the_machine(warm)
    peaks = {name for name, value in expected.items() if name.endswith("allocated_bytes") and runner == "deepspeed"}
    for name in peaks & found.keys():  # gloo's thread lets go of a scalar that was reduced after wait() returned
        assert found.pop(name) == pytest.approx(expected.pop(name), abs=8), name
    assert expected == found
    assert (cold["isolation"], warm["isolation"]) == ("cold", "warm")


def test_the_same_training_whoever_drives_it(both: dict[str, dict[str, Row]]) -> None:
    plain, trainer = both["cold"]["torch"], both["cold"]["trainer"]
    for name in ("parameters", "model_flops_per_token", "hardware_flops_per_token"):
        assert plain[name] == trainer[name], name
    assert plain["parameters"] == 119360
    assert trainer["runner_config"]["max_grad_norm"] == 1.0  # the Trainer's own default, not ours


def test_a_row_of_the_torch_runner(both: dict[str, dict[str, Row]]) -> None:
    row = both["cold"]["torch"]
    linear = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160) + 512 * 64
    attention = 2 * 2 * 2 * 32 * 64
    # transformers 4.57 also rotates positions with a small matrix product
    assert row["model_flops_per_token"] == pytest.approx(3 * (2 * linear + attention), rel=1e-4)
    state = 119360 * 4  # parameters, gradients and Adam's two moments are alive when the backward pass ends
    assert row["optimizer_peak_allocated_bytes"] >= 4 * state
    assert row["peak_allocated_bytes"] == max(
        row[f"{p}_peak_allocated_bytes"] for p in ("forward", "backward", "optimizer")
    )
    assert row["peak_reserved_bytes"] > row["peak_allocated_bytes"]
    unknown = ("mfu", "gpu_name", "allocator_conf_effective", "alloc_retries")  # this CPU has no published peak
    assert {row[name] for name in unknown} == {None}
    assert (len(row["warmup_step_times_s"]), len(row["step_times_s"])) == (1, row["measured_steps"]) == (1, 2)
    assert row["tokens_per_s"] == pytest.approx(2 * 32 * 2 / sum(row["step_times_s"]))
    assert row["samples_per_s"] == pytest.approx(row["tokens_per_s"] / 32)
    assert 0 < row["overhead_s"] < row["duration_s"]


def test_throughput_agrees_with_the_target_s_own_clock(
    run_sweep: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A harness that is off by the number of steps, or by one step, is off by far more than the tolerance."""
    log = tmp_path / "clock"
    monkeypatch.setenv("SLEEPY_LOG", str(log))
    began = time.perf_counter()
    (row,) = run_sweep(custom("sleepy", protocol={"warmup_steps": 2, "measured_steps": 8}))
    wall = time.perf_counter() - began
    own = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(own) == 2 + 1 + 8 + 1
    elapsed = own[10] - own[2]  # from the end of the probe step to the end of the last measured one
    assert row["elapsed_s"] == pytest.approx(elapsed, rel=0.05)
    assert row["tokens_per_s"] == pytest.approx(8 * 2 * 32 / elapsed, rel=0.05)
    assert row["elapsed_s"] < wall
    assert len(row["step_times_s"]) == 8
    assert min(row["step_times_s"]) >= 0.03


def model_states(stage: int, world: int) -> tuple[int, int]:
    """Bytes of parameters and of optimizer state that a rank keeps with AdamW in half precision.

    Rajbhandari et al. 2020 (arXiv:1910.02054), section 3.1 and figure 1: 2 bytes a parameter, and 12 for the fp32 copy
    and the two moments; stages 1 to 3 divide the state by the ranks, stage 3 the parameters too.
    """
    return 2 * 119360 // (world if stage == 3 else 1), 12 * 119360 // (world if stage else 1)


def test_deepspeed_stages_offload_and_two_ranks_real_and_predicted(run_sweep: Run) -> None:
    simulated = {"device": {"name": "simulated", "gpu": "a100-80gb"}, "precision": "bf16"}
    *rows, two, eight, offloaded = run_sweep(
        deepspeed(0, precision="fp32"), deepspeed(1, precision="bf16"), deepspeed(3, precision="bf16"),
        deepspeed(2, precision="bf16", runner={"offload_optimizer": True}),
        deepspeed(3, precision="bf16", runner={"offload_optimizer": True, "offload_param": True}),
        deepspeed(2, precision="bf16", runner={"world_size": 2}, grad_accum=2),
        deepspeed(3, precision="bf16", runner={"world_size": 2}), deepspeed(3, **simulated, runner={"world_size": 2}),
        deepspeed(1, **simulated, runner={"world_size": 8}),
        deepspeed(2, **simulated, runner={"world_size": 8, "offload_optimizer": True}),
    )  # fmt: skip
    assert [row["outcome"] for row in rows] == ["ok"] * 7, [row["reason"] for row in rows]
    for row, state in ((two, model_states(3, 2)), (eight, model_states(1, 8)), (offloaded, (2 * 119360, 0))):
        assert (row["peak_parameters_bytes"], row["peak_optimizer_state_bytes"]) == state, row["reason"]
        assert row["peak_communication_bytes"] >= 2 << 20  # the bucket of 1 Mi half-precision gradients
        assert row["deepspeed_version"]
    # in the optimizer's phase a CPU does not update all parameters at once; docs/real_ranks.md on the backward phase
    for phase, tolerance in (("forward", 0.03), ("backward", 0.15)):
        column = f"{phase}_peak_allocated_bytes"
        assert two[column] - two["peak_workspaces_bytes"] == pytest.approx(rows[6][column], rel=tolerance), phase
    assert [row["sharding"] for row in rows] == [f"zero{stage}" for stage in (0, 1, 3, 2, 3, 2, 3)]
    for row in rows:
        assert row["runner_config"]["zero_optimization"]["stage"] == int(row["sharding"][-1])
        assert row["deepspeed_version"]
        assert row["parameters"] == 119360
        assert len(row["rank_peak_allocated_bytes"]) == row["world_size"]
        assert row["peak_reserved_bytes"] == row["rank_peak_reserved_bytes"][row["worst_rank"]]
        assert row["peak_reserved_bytes"] == max(row["rank_peak_reserved_bytes"])
        assert row["skipped_steps"] == 0
    accumulated = rows[5]
    assert accumulated["tokens_per_s"] == pytest.approx(2 * 2 * 2 * 32 * 2 / sum(accumulated["step_times_s"]))
    assert accumulated["rank_peak_allocated_bytes"][accumulated["worst_rank"]] == accumulated["peak_allocated_bytes"]
    assert "offload_optimizer" in rows[3]["runner_config"]["zero_optimization"]


def test_a_rank_that_fails_ends_the_trial_at_once(run_sweep: Run) -> None:
    broken = deepspeed(2, precision="bf16", runner={"world_size": 2, "options": {"optimizer": {"type": "NoSuch"}}})
    (row,) = run_sweep(broken, timeout_s=60)
    assert row["outcome"] == "invalid"  # found out by each rank
    assert "DeepSpeed" in row["reason"] and "no NoSuch" in row["reason"]


def test_what_fails_after_the_measured_steps_leaves_the_measurement(run_sweep: Run, tmp_path: Path) -> None:
    """An out of memory there would be a false frontier."""
    whole, oom, killed = run_sweep(custom("good"), custom("oom_afterwards"), custom("killed_afterwards"))
    assert whole["outcome"] == oom["outcome"] == "ok", (whole["reason"], oom["reason"])
    assert whole["model_flops_per_token"] is not None and whole["notes"] is None
    assert oom["model_flops_per_token"] is None
    assert "the step that counts FLOPs failed" in oom["notes"][0] and "CUDA out of memory" in oom["notes"][0]
    result, _ = attempt.read_result(tmp_path / "t" / "trials" / "attempts" / killed["trial_id"] / "1")
    assert result is not None and result["complete"] is False
    for values in (whole, oom, result["values"]):
        assert values["tokens_per_s"] > 0 and values["peak_reserved_bytes"] > 0
        assert len(values["step_times_s"]) == values["measured_steps"] == 2
        assert values["parameters"] == 72 and values["torch_version"]
        assert values["loss_last"] == whole["loss_last"]


def test_what_targets_and_options_say_reaches_the_row(run_sweep: Run, tmp_path: Path) -> None:
    target = tmp_path / "mine.py"
    target.write_text("def build(trial):\n    return 5\n")
    no_model = "model must be a torch.nn.Module and step a function, not NoneType"
    aborted = "killed by SIGABRT; its last words: terminate called after throwing an instance"
    said: list[tuple[dict[str, Any], str, str]] = [
        (custom("says_half_a_character"), "crash", "builtins.RuntimeError: no file ? here"),
        (custom("gives_up"), "crash", "builtins.SystemExit: config wrong"),
        (custom("no_model"), "invalid", no_model),
        (custom("aborts"), "crash", aborted),
        (custom("nothing_of_that_name"), "invalid", "has no function nothing_of_that_name"),
        (
            tiny(runner={"name": "custom", "target": f"{target}:build"}),
            "invalid",
            "must return (model, optimizer, step[, batches])",
        ),
        (tiny(runner={"name": "trainer", "options": {"no_such_argument": 1}}), "invalid", "no_such_argument"),
        (custom("raises"), "crash", "this target is broken, at faults.py:53"),
    ]
    rows = run_sweep(*(values for values, _, _ in said))
    for row, (_, outcome, reason) in zip(rows, said, strict=True):
        assert row["outcome"] == outcome and reason in row["reason"], row["reason"]
    folder = tmp_path / "t" / "trials" / "attempts" / rows[-1]["trial_id"] / "1"
    assert "this target is broken" in (folder / "stderr.log").read_text()
    assert json.loads((folder / "spec.json").read_text())["trial"] == rows[-1]["trial"]
    assert {row["trial_id"]: row for row in journal.read(tmp_path / "t")[0]} == {row["trial_id"]: row for row in rows}
    assert load(tmp_path / "t").frame["reason"].tolist()
