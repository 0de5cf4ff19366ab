"""device=simulated end to end, and against what others measured."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TARGETS, Run, tiny
from traces import A100, SIMULATED, peak, predicted, trace_trial

from vramsweep.harness.allocator import initial_state, recording
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.allocator.replay import replay_as_recorded
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import predicted_row, replay_trace, trace_cache
from vramsweep.runners.trace.trace_data import CATEGORIES

pytestmark = pytest.mark.deterministic

PARTS = (*CATEGORIES, "rounding")
MEASURED = ("tokens_per_s", "elapsed_s", "step_times_s", "device_used_bytes", "mfu", "gpu_power_w", "loss_first")


def target(function: str, **over: Any) -> dict[str, Any]:
    runner = {"name": "custom", "target": f"{TARGETS / 'on_cuda.py'}:{function}"}
    return tiny(device=SIMULATED, runner=runner, **over)


def allocator(name: str, conf: str) -> dict[str, Any]:
    return tiny(device=SIMULATED, allocator={"name": name, "conf": conf})


@pytest.mark.slow
def test_one_trace_serves_every_allocator(run_sweep: Run, tmp_path: Path) -> None:
    small = tiny(device={"name": "simulated", "gpu": "t4-16gb"}, seq_len=4096, micro_batch=512)
    rows = run_sweep(
        allocator("default", ""), allocator("expandable", "expandable_segments:True"),
        allocator("async", "backend:cudaMallocAsync"), tiny(device={"name": "simulated", "gpu": "voodoo2"}), small,
    )  # fmt: skip
    assert [row["outcome"] for row in rows] == ["ok", "ok", "ok", "invalid", "oom"]
    assert len(list((tmp_path / "t" / "trials" / "traces").glob("*.json"))) == 2
    for row in rows[:3]:
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
    driver = rows[2]  # as expandable segments, with the range that an H100 showed
    assert driver["peak_reserved_bytes"] == rows[1]["peak_reserved_bytes"]
    assert driver["notes"][0].startswith("cudaMallocAsync is predicted as expandable_segments. On an H100")
    assert "device.gpu=voodoo2: there is no such GPU" in rows[3]["reason"]
    assert "t4-16gb (13.8 GiB left for the allocator) is too small" in rows[4]["reason"]
    assert sum(rows[4]["oom_parts_bytes"].values()) == rows[4]["oom_request_bytes"] + rows[4]["oom_allocated_bytes"]
    assert all(row["oom_parts_bytes"] is row["oom_request_bytes"] is None for row in rows[:4])
    assert rows[4]["phase"] == "step 0, forward"


def predicted_at(batch: int, card: dict[str, Any], folder: Path) -> predicted_row.Predicted:
    values = tiny(device={"name": "simulated"} | card, seq_len=512, micro_batch=batch)
    return predicted_row.predict(trial_parser.parse(values), *trace_trial(values, folder))


@pytest.mark.slow
def test_what_would_have_fitted_does_and_hardly_more(tmp_path: Path) -> None:
    whole = predicted_at(96, {"gpu": "a100-80gb"}, tmp_path).columns["peak_reserved_bytes"]
    gib = round(whole / (1 << 30) / 3 + 0.87, 2)  # with a context
    card = {"gpu": "a100-80gb", "memory_gib": gib, "capability": "8.6"}
    error = str(predicted_at(96, card, tmp_path).error)
    found = re.search(r"; a pass of about ([\d,]+) of its 49,152 tokens would fit, by proportion$", error)
    assert found, error
    batch = int(found[1].replace(",", "")) // 512
    assert 8 <= batch <= 80
    assert predicted_at(batch, card, tmp_path).error is None
    assert predicted_at(round(1.25 * batch), card, tmp_path).error is not None
    none = {"gpu": "a100-80gb", "memory_gib": 0.84, "capability": "8.6"}
    assert "GiB of it do not depend on length or batch" in str(predicted_at(96, none, tmp_path).error)


@pytest.mark.slow
def test_a_card_with_other_memory_keeps_what_is_known_of_its_speed(tmp_path: Path) -> None:
    own, smaller = (predicted_at(1, {"gpu": "h100-80gb"} | more, tmp_path) for more in ({}, {"memory_gib": 8.0}))
    assert smaller.columns["calibrated_step_s"] == own.columns["calibrated_step_s"]
    low, step, high = (own.columns[f"calibrated_step_{name}s"] for name in ("low_", "", "high_"))
    assert own.columns["estimated_step_s"] < low < step < high
    assert own.columns["estimated_bound_by"] == "host"  # a tiny model has kernels of microseconds
    assert smaller.columns["gpu_name"] == "h100-80gb with 8 GiB"


@pytest.mark.parametrize(
    ("over", "kind"),
    [
        ({}, "plain"),
        ({"checkpointing": "full"}, "checkpointing"),
        ({"optimizer": "adamw_torch_8bit", "checkpointing": "full"}, "torchao"),
        ({"runner": {"name": "deepspeed"}, "sharding": "zero3", "world_size": 2}, "sharded"),
    ],
)
def test_the_host_s_time_goes_by_what_a_step_calls(over: dict[str, Any], kind: str) -> None:
    assert predicted_row.host_kind(trial_parser.parse(tiny(device=SIMULATED, **over))) == kind


@pytest.mark.slow
def test_what_the_optimizer_takes_does_not_go_with_the_tokens(tmp_path: Path) -> None:
    """With few tokens only the optimizer's step counts; its temporaries are as large as the weights."""
    values: dict[str, Any] = {"seq_len": 8, "micro_batch": 1, "precision": "fp32"}
    chosen = trial_parser.parse(tiny(device=SIMULATED, **values))
    _, whole = predicted(tiny(device=SIMULATED, **values), tmp_path)
    optimizer = max(most["allocated"] for mark, most in whole.phases if mark.phase == "optimizer")
    assert optimizer == whole.peak["allocated"]
    assert whole.breakdown["temporaries"] >= 4 * (chosen.model.parameters or 0)
    said = predicted_row._would_fit(chosen, whole, optimizer - 1, {})
    assert "GiB of it do not depend on length or batch" in said


@pytest.mark.slow
def test_a_row_that_runs_out_says_what_was_asked_for_and_what_was_there(tmp_path: Path) -> None:
    values = tiny(device=SIMULATED, seq_len=512)
    chosen, (trace, details) = trial_parser.parse(values), trace_trial(values, tmp_path)
    whole = predicted_row.predict(chosen, trace, details).columns["peak_reserved_bytes"]
    made = [trace.makers[origin] for origin in trace.origins]
    layers = max(n for n, c in enumerate(trace.categories[:-1]) if c == "activations" and "layers.1" in made[n][0])
    trace.sizes[layers] = 100 << 30  # one storage that no A100 has room for
    found = predicted_row.predict(chosen, trace, details)
    row = found.columns
    assert row["oom_request_bytes"] == 100 << 30
    assert sum(row["oom_parts_bytes"].values()) == row["oom_request_bytes"] + row["oom_allocated_bytes"]
    assert row["oom_allocated_bytes"] <= row["oom_reserved_bytes"] <= whole
    reason, who = str(found.error), " ".join(made[layers][:2])
    assert f". A request of 100.0 GiB fails in the forward phase of step 2 (activations, {who})" in reason
    small = [format_gib(row["oom_parts_bytes"][name]) for name in ("workspaces", "optimizer_state")]
    assert "0.0" not in small and float(small[0]) > 0
    assert f"), next to {format_gib(row['oom_allocated_bytes'])} GiB already allocated (" in reason
    assert f", workspaces {small[0]}, optimizer state {small[1]})" in reason
    assert "GiB, which fits in gh200-144gb" in reason or "GiB, which fits in h200" in reason
    trace.sizes[layers] = 1000 << 30
    error = predicted_row.predict(chosen, trace, details).error
    assert "more than any listed GPU of capability 8.0 or later has" in str(error)


@pytest.mark.slow
def test_a_share_of_the_card_is_what_its_row_speaks_of(tmp_path: Path) -> None:
    share = {"name": "share", "conf": "per_process_memory_fraction:0.01"}
    device = {"name": "simulated", "gpu": "l4-24gb"}
    values = tiny(device=device, seq_len=512, micro_batch=16, allocator=share)
    chosen = trial_parser.parse(values)
    found = predicted_row.predict(chosen, *trace_trial(values, tmp_path))
    assert found.columns["memory_limit_bytes"] == chosen.memory_limit() < 230_000_000
    needed = found.columns["unlimited_peak_reserved_bytes"]
    said = str(found.error)
    assert "l4-24gb (0.21 GiB left for the allocator) is too small" in said
    enough = re.search(r"which fits in 0.01 of ([\w-]+)", said)
    assert enough and gpu_lookup.memory_limit(gpu_lookup.gpu_named(enough[1])) * 0.01 >= needed
    fitting = int(re.search(r"about ([\d,]+) of its 8,192 tokens", said)[1].replace(",", ""))  # type: ignore[index]
    assert fitting < 8192 * chosen.memory_limit() / needed


@pytest.mark.slow
def test_a_setting_that_does_nothing_runs_with_a_note_and_a_collected_run_that_does_not_fit_says_what_it_needs(
    run_sweep: Run,
) -> None:
    """Forums advise a threshold without a limit; torch accepts it and never uses it."""
    forum = "max_split_size_mb:128,garbage_collection_threshold:0.8"
    small = {"device": {"name": "simulated", "gpu": "t4-16gb"}, "seq_len": 4096, "micro_batch": 512}
    collected = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"
    plain, advised, full, full_plain = run_sweep(
        allocator("max_split_128", "max_split_size_mb:128"), allocator("forum", forum),
        tiny(**small, allocator={"name": "gc", "conf": collected}), tiny(**small),
    )  # fmt: skip
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
        target("asks_for_a_value"), target("unknown_operator"), target("selects_by_value"), target("captures_a_graph"),
        *(target("documented", precision=precision) for precision in ("fp32", "bf16", "fp16")),
        target("loads_and_adapts"),
    )  # fmt: skip
    assert [row["outcome"] for row in rows] == ["invalid"] * 4 + ["ok"] * 4
    assert ".item()" in rows[0]["reason"]
    assert "register_fake" in rows[1]["reason"] and "vramsweep_tests" in rows[1]["reason"]
    assert "value" in rows[2]["reason"]
    assert "torch.cuda.CUDAGraph" in rows[3]["reason"]
    for row in rows[4:]:
        assert row["peak_parameters_bytes"] == 4 * row["parameters"] == 4 * (64 * 256 * 2 + 256 + 64)


@pytest.mark.parametrize(("function", "known"), [("by_grad", True), ("by_hand", False)])
def test_phases_are_predicted_whoever_starts_the_backward_pass(tmp_path: Path, function: str, known: bool) -> None:
    values = tiny(device=SIMULATED, runner={"name": "custom", "target": f"{TARGETS / 'backward.py'}:{function}"})
    row = predicted_row.columns(predicted(values, tmp_path)[1])
    phases = [row[f"{phase}_peak_allocated_bytes"] for phase in ("forward", "backward", "optimizer")]
    if known:
        assert max(phases) == row["peak_allocated_bytes"] and row["notes"] is None
    else:
        assert phases == [None] * 3 and "unknown" in row["notes"][0]


@pytest.mark.slow
def test_gpt2_with_the_trainer_s_defaults_of_transformers_4(tmp_path: Path) -> None:
    """A user's measurement on torch 2.9.1, transformers 4.57.3, whose Trainer left the key/value cache on, and whose
    GPT-2 had a mask of 1 MiB in each of its layers."""
    versions = {"transformers": "4.57.3"}
    device = {"name": "simulated", "gpu": "rtx3090-24gb"}
    values = tiny(seq_len=512, micro_batch=8, runner={"name": "trainer"}, versions=versions, device=device)
    values["model"] = yaml.safe_load((ROOT / "conf/model/gpt2.yaml").read_text())
    trace, details = trace_trial(values, tmp_path)
    assert set(details["differences"]) == {"gpt2_mask_buffers", "trainer_cache"}
    assert peak(trace)["allocated"] == pytest.approx(8_450_177.5 * 1024, rel=0.0002)
    assert peak(trace)["reserved"] == pytest.approx(9_154_560 * 1024, rel=0.001)


@pytest.mark.slow
@pytest.mark.parametrize(("length", "precision"), [(128, "fp32"), (512, "bf16")])
def test_against_recordings_of_a_decoder_model(tmp_path: Path, length: int, precision: str) -> None:
    name = f"snapshots/results_medium_{length}_training_memory_snapshot.pickle"
    path = ROOT.parent / "shared" / "data" / name
    if not path.is_file():
        pytest.skip("the public recordings are not here")
    recorded = recording.load(path)
    measured = replay_as_recorded(recorded, initial_state.undo(recorded))
    values = tiny(seq_len=length, micro_batch=4, precision=precision, device=SIMULATED)
    target = ROOT / "benchmarks" / "published" / "targets" / "cs336.py"
    options = {"rotary": "own", "clear": "first"}
    values["runner"] = {"name": "custom", "target": f"{target}:build", "options": options}
    trace, details = trace_trial(values, tmp_path)
    found = replay_trace.replay(trace, AllocatorConfig(), None)
    assert found.peak["allocated"] == pytest.approx(measured.peak_allocated, rel=0.005)
    assert found.peak["reserved"] == pytest.approx(measured.peak_reserved, rel=0.01)
    assert found.breakdown["parameters"] == 4 * details["parameters"]


def test_a_trace_kept_by_a_version_that_predicts_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = trial_parser.parse(tiny(device=SIMULATED))
    before = trace_cache.trace_key(chosen, A100)
    assert before == trace_cache.trace_key(chosen, A100)
    monkeypatch.setattr(trace_cache, "SIMULATION", trace_cache.SIMULATION + 1)
    assert before != trace_cache.trace_key(chosen, A100)
