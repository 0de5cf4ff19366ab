"""device=simulated end to end, and against what others measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TARGETS, Run, tiny

from vramsweep.harness import gpus, trial
from vramsweep.harness.allocator import recording, restore
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.allocator.replay import replay_as_recorded
from vramsweep.runners import custom, predict, simulated, torch_loop, tracing
from vramsweep.runners import trainer as hf_trainer
from vramsweep.runners.storages import CATEGORIES

DEVICE = {"name": "simulated", "gpu": "a100-80gb"}
PARTS = (*CATEGORIES, "rounding")
MEASURED = ("tokens_per_s", "elapsed_s", "step_times_s", "device_used_bytes", "mfu", "gpu_power_w", "loss_first")


def target(function: str, **over: Any) -> dict[str, Any]:
    runner = {"name": "custom", "target": f"{TARGETS / 'on_cuda.py'}:{function}"}
    return tiny(device=DEVICE, runner=runner, **over)


def allocator(name: str, conf: str) -> dict[str, Any]:
    return tiny(device=DEVICE, allocator={"name": name, "conf": conf})


@pytest.mark.slow
def test_one_trace_serves_every_allocator(run_sweep: Run, tmp_path: Path) -> None:
    small = tiny(device={"name": "simulated", "gpu": "t4-16gb"}, seq_len=4096, micro_batch=512)
    rows = run_sweep(
        allocator("default", ""),
        allocator("expandable", "expandable_segments:True"),
        allocator("async", "backend:cudaMallocAsync"),
        tiny(device={"name": "simulated", "gpu": "voodoo2"}),
        small,
        isolation="warm",
    )
    assert [row["outcome"] for row in rows] == ["ok", "ok", "invalid", "invalid", "oom"]
    assert len(list((tmp_path / "t" / "traces").glob("*.json"))) == 2
    for row in rows[:2]:
        assert row["memory_source"] == "simulator"
        assert sum(row[f"peak_{part}_bytes"] for part in PARTS) == row["peak_allocated_bytes"]
        assert row["load_peak_allocated_bytes"] <= row["peak_allocated_bytes"] <= row["peak_reserved_bytes"]
        assert all(row[name] is None for name in MEASURED)
        assert row["simulated_gpu"] == "a100-80gb"
        assert 78 << 30 < row["memory_limit_bytes"] < row["device_total_bytes"] < 80 << 30
    assert rows[0]["peak_allocated_bytes"] == rows[1]["peak_allocated_bytes"]
    assert rows[0]["estimated_step_s"] == rows[1]["estimated_step_s"] > 0  # traced, and from the kept trace
    assert rows[4]["estimated_step_s"] > 0  # of the step as it would be
    assert [row["allocator_conf_effective"] for row in rows[:2]] == ["", "expandable_segments:True"]
    assert "cannot be simulated" in rows[2]["reason"]
    assert "a100-80gb" in rows[3]["reason"]
    assert "t4-16gb (13.81 GiB left for the allocator) is too small" in rows[4]["reason"]
    assert sum(rows[4]["oom_parts_bytes"].values()) == rows[4]["oom_request_bytes"] + rows[4]["oom_allocated_bytes"]
    assert all(row["oom_parts_bytes"] is row["oom_request_bytes"] is None for row in rows[:4])
    assert rows[4]["phase"] == "step 0, forward"


def predicted_at(batch: int, card: dict[str, Any], folder: Path) -> simulated.Predicted:
    chosen = trial.parse(tiny(device={"name": "simulated"} | card, seq_len=512, micro_batch=batch))
    trace, details = tracing.trace_trial(chosen, chosen.device.card, folder, torch_loop)
    return simulated.predict(chosen, trace, details)


@pytest.mark.slow
def test_what_would_have_fitted_does_and_hardly_more(tmp_path: Path) -> None:
    whole = predicted_at(96, {"gpu": "a100-80gb"}, tmp_path).columns["peak_reserved_bytes"]
    card = {
        "gpu": "a100-80gb",
        "memory_gib": round(whole / (1 << 30) / 3 + 0.87, 2),
        "capability": "8.6",
    }  # with a context
    error = str(predicted_at(96, card, tmp_path).error)
    found = re.search(r"by proportion about ([\d,]+) of its 49,152 tokens a pass would fit$", error)
    assert found, error
    batch = int(found[1].replace(",", "")) // 512
    assert 8 <= batch <= 80
    assert predicted_at(batch, card, tmp_path).error is None
    assert predicted_at(round(1.25 * batch), card, tmp_path).error is not None
    none = {"gpu": "a100-80gb", "memory_gib": 0.84, "capability": "8.6"}
    assert "are there at any length and batch" in str(predicted_at(96, none, tmp_path).error)


@pytest.mark.slow
def test_a_card_with_other_memory_keeps_what_is_known_of_its_speed(tmp_path: Path) -> None:
    own, smaller = (predicted_at(1, {"gpu": "h100-80gb"} | more, tmp_path) for more in ({}, {"memory_gib": 8.0}))
    assert "on h100-80gb, fp32" in smaller.columns["calibration"]
    assert smaller.columns["calibrated_step_s"] == own.columns["calibrated_step_s"]
    assert smaller.columns["gpu_name"] == "h100-80gb with 8 GiB"


def test_what_the_optimizer_takes_does_not_go_with_the_tokens(tmp_path: Path) -> None:
    """Of a single token all that counts is the optimizer's step, whose temporaries are as large as the weights."""
    values: dict[str, Any] = {"seq_len": 8, "micro_batch": 1, "precision": "fp32"}
    chosen = trial.parse(tiny(device={"name": "simulated", "gpu": "a100-80gb"}, **values))
    trace, _ = tracing.trace_trial(chosen, chosen.device.card, tmp_path, torch_loop)
    whole = predict.replay(trace, AllocatorConfig(), None)
    optimizer = max(most["allocated"] for mark, most in whole.phases if mark.phase == "optimizer")
    assert optimizer == whole.peak["allocated"]
    assert whole.breakdown["temporaries"] >= 4 * (chosen.model.parameters or 0)
    said = simulated._would_fit(chosen, whole, optimizer - 1)
    assert "are there at any length and batch" in said


def test_a_row_that_runs_out_says_what_was_asked_for_and_what_was_there(tmp_path: Path) -> None:
    chosen = trial.parse(tiny(device=DEVICE, seq_len=512))
    trace, details = tracing.trace_trial(chosen, gpus.named("a100-80gb"), tmp_path, torch_loop)
    whole = simulated.predict(chosen, trace, details).columns["peak_reserved_bytes"]
    made = [trace.makers[origin] for origin in trace.origins]
    layers = max(n for n, c in enumerate(trace.categories[:-1]) if c == "activations" and "layers.1" in made[n][0])
    trace.sizes[layers] = 100 << 30  # one storage that no A100 has room for
    predicted = simulated.predict(chosen, trace, details)
    row = predicted.columns
    assert row["oom_request_bytes"] == 100 << 30
    assert sum(row["oom_parts_bytes"].values()) == row["oom_request_bytes"] + row["oom_allocated_bytes"]
    assert row["oom_allocated_bytes"] <= row["oom_reserved_bytes"] <= whole
    reason, who = str(predicted.error), " ".join(made[layers])
    assert f"a request of 102,400.0 MiB fails in the forward phase of step 2 (activations, {who})" in reason
    assert "beside " in reason and ", workspaces 16, optimizer state 1)" in reason
    assert "GiB, which gh200-144gb has" in reason or "GiB, which h200" in reason
    trace.sizes[layers] = 1000 << 30
    error = simulated.predict(chosen, trace, details).error
    assert "more than any listed card of capability 8.0 or later has" in str(error)


@pytest.mark.slow
def test_a_share_of_the_card_is_what_its_row_speaks_of(tmp_path: Path) -> None:
    share = {"name": "share", "conf": "per_process_memory_fraction:0.01"}
    device = {"name": "simulated", "gpu": "l4-24gb"}
    chosen = trial.parse(tiny(device=device, seq_len=512, micro_batch=16, allocator=share))
    traced = tracing.trace_trial(chosen, chosen.device.card, tmp_path, torch_loop)
    predicted = simulated.predict(chosen, *traced)
    assert predicted.columns["memory_limit_bytes"] == chosen.memory_limit() < 230_000_000
    needed = predicted.columns["unlimited_peak_reserved_bytes"]
    said = str(predicted.error)
    assert "l4-24gb (0.21 GiB left for the allocator) is too small" in said
    enough = re.search(r"which 0.01 of ([\w-]+) has", said)
    assert enough and gpus.memory_limit(gpus.named(enough[1])) * 0.01 >= needed
    fitting = int(re.search(r"about ([\d,]+) of its 8,192 tokens", said)[1].replace(",", ""))  # type: ignore[index]
    assert fitting < 8192 * chosen.memory_limit() / needed


@pytest.mark.slow
def test_a_setting_that_does_nothing_runs_with_a_note_and_a_collected_run_that_does_not_fit_says_what_it_needs(
    run_sweep: Run,
) -> None:
    """What forums advise has a threshold without a limit, which torch takes and never uses."""
    forum = "max_split_size_mb:128,garbage_collection_threshold:0.8"
    small = {"device": {"name": "simulated", "gpu": "t4-16gb"}, "seq_len": 4096, "micro_batch": 512}
    collected = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"
    plain, advised, full, full_plain = run_sweep(
        allocator("max_split_128", "max_split_size_mb:128"),
        allocator("forum", forum),
        tiny(**small, allocator={"name": "gc", "conf": collected}),
        tiny(**small),
        isolation="warm",
    )
    assert advised["outcome"] == "ok"
    assert advised["notes"] == [
        "garbage_collection_threshold has no effect without a memory limit: set per_process_memory_fraction below 1"
    ]
    assert plain["notes"] is None and advised["peak_reserved_bytes"] == plain["peak_reserved_bytes"]
    assert full["outcome"] == full_plain["outcome"] == "oom"
    assert full["unlimited_peak_reserved_bytes"] == full_plain["unlimited_peak_reserved_bytes"] > 14 << 30


@pytest.mark.slow
def test_custom_targets_run_as_they_are_or_say_why_not(run_sweep: Run) -> None:
    rows = run_sweep(
        target("asks_for_a_value"),
        target("unknown_operator"),
        target("selects_by_value"),
        *(target("documented", precision=precision) for precision in ("fp32", "bf16", "fp16")),
        target("loads_and_adapts"),
        isolation="warm",
    )
    assert [row["outcome"] for row in rows] == ["invalid"] * 3 + ["ok"] * 4
    assert ".item()" in rows[0]["reason"]
    assert "register_fake" in rows[1]["reason"]
    assert "vramsweep_tests" in rows[1]["reason"]
    assert "value" in rows[2]["reason"]
    for row in rows[3:]:
        assert row["peak_parameters_bytes"] == 4 * row["parameters"] == 4 * (64 * 256 * 2 + 256 + 64)


@pytest.mark.parametrize(("function", "known"), [("by_grad", True), ("by_hand", False)])
def test_phases_are_predicted_whoever_starts_the_backward_pass(tmp_path: Path, function: str, known: bool) -> None:
    values = tiny(device=DEVICE, runner={"name": "custom", "target": f"{TARGETS / 'backward.py'}:{function}"})
    trace, _ = tracing.trace_trial(trial.parse(values), gpus.named("a100-80gb"), tmp_path, custom)
    row = simulated.columns(predict.replay(trace, AllocatorConfig(), None))
    phases = [row[f"{phase}_peak_allocated_bytes"] for phase in ("forward", "backward", "optimizer")]
    if known:
        assert max(phases) == row["peak_allocated_bytes"] and row["notes"] is None
    else:
        assert phases == [None] * 3 and "not known" in row["notes"][0]


@pytest.mark.slow
def test_gpt2_with_the_trainer_s_defaults_of_transformers_4(tmp_path: Path) -> None:
    """A user's measurement on torch 2.9.1, transformers 4.57.3, whose Trainer left the key/value cache on, and whose
    GPT-2 had a mask of 1 MiB in each of its layers."""
    versions = {"transformers": "4.57.3"}
    values = tiny(seq_len=512, micro_batch=8, runner={"name": "trainer"}, versions=versions, device=DEVICE)
    values["model"] = yaml.safe_load((ROOT / "conf/model/gpt2.yaml").read_text())
    trace, details = tracing.trace_trial(trial.parse(values), gpus.named("rtx3090-24gb"), tmp_path, hf_trainer)
    peak = predict.replay(trace, AllocatorConfig(), None).peak
    assert set(details["differences"]) == {"gpt2_mask_buffers", "trainer_cache"}
    assert peak["allocated"] == pytest.approx(8_450_177.5 * 1024, rel=0.0002)
    assert peak["reserved"] == pytest.approx(9_154_560 * 1024, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "precision"), [(128, "fp32"), (512, "bf16")])
def test_against_recordings_of_a_decoder_model(tmp_path: Path, length: int, precision: str) -> None:
    name = f"snapshots/results_medium_{length}_training_memory_snapshot.pickle"
    path = ROOT.parent / "shared" / "data" / name
    if not path.is_file():
        pytest.skip("the public recordings are not here")
    recorded = recording.load(path)
    measured = replay_as_recorded(recorded, restore.undo(recorded))
    values = tiny(seq_len=length, micro_batch=4, precision=precision, device=DEVICE)
    target = ROOT / "benchmarks" / "published" / "targets" / "cs336.py"
    options = {"rotary": "own", "clear": "first"}
    values["runner"] = {"name": "custom", "target": f"{target}:build", "options": options}
    trace, details = tracing.trace_trial(trial.parse(values), gpus.named("a100-80gb"), tmp_path, custom)
    predicted = predict.replay(trace, AllocatorConfig(), None)
    assert predicted.peak["allocated"] == pytest.approx(measured.peak_allocated, rel=0.005)
    assert predicted.peak["reserved"] == pytest.approx(measured.peak_reserved, rel=0.01)
    assert predicted.breakdown["parameters"] == 4 * details["parameters"]


def test_a_trace_kept_by_a_version_that_predicts_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, card = trial.parse(tiny(device={"name": "simulated", "gpu": "a100-80gb"})), gpus.named("a100-80gb")
    before = tracing.trace_key(chosen, card)
    assert before == tracing.trace_key(chosen, card)
    monkeypatch.setattr(tracing, "SIMULATION", tracing.SIMULATION + 1)
    assert before != tracing.trace_key(chosen, card)
