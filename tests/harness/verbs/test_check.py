"""Test the check for publication: on made-up rows whose truth is known, folders with real journals, and by command."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Cli, cases, parametrized, tiny

from vramsweep.harness.rows import journal
from vramsweep.harness.rows.quality_flags import flags
from vramsweep.harness.rows.schema import Row, complete_row, system_of
from vramsweep.harness.spec.trial_identity import ID_VERSION
from vramsweep.harness.sweep import plan, publication_check
from vramsweep.harness.sweep.sweep_status import Status

LENGTHS = (128, 256, 512)


def made(length: int, repeat: int, random: np.random.Generator, **over: Any) -> Row:
    """A row of a card that nothing disturbs: ten steps with noise of 1 %."""
    times = (length * 1e-4 * (1 + 0.01 * random.normal(size=10))).tolist()
    values = {
        "trial_id": f"s{length}r{repeat}", "attempt": 1, "terminal": True, "outcome": "ok", "device": "cuda",
        "seq_len": length, "repeat": repeat, "runner": "torch", "attention": "sdpa", "attention_effective": "sdpa",
        "optimizer": "default", "optimizer_effective": "AdamW", "allocator_conf": "", "allocator_conf_effective": "",
        "world_size": 1, "trial": {"seq_len": length, "repeat": repeat, "world_size": 1},
        "memory_source": "cuda_allocator", "peak_allocated_bytes": 4096 * length, "peak_reserved_bytes": 2**21 * length,
        "plateau": True, "step_growth_bytes": 0, "alloc_retries": 0, "skipped_steps": 0, "foreign_processes": [],
        "node_trials": [], "device_baseline_bytes": 2**29, "host_load": 0.1, "throttle_reasons": ["sw_power_cap"],
        "gpu_sm_clock_before_mhz": 1980, "gpu_sm_clock_mhz": 1965, "gpu_sm_clock_max_mhz": 1980,
        "measured_steps": 10, "step_times_s": times, "elapsed_s": sum(times), "host_elapsed_s": sum(times) + 1e-4,
        "tokens_per_s": 10 * length / sum(times), "gpu_name": "NVIDIA H100", "driver_version": "580.1",
        "cuda_version": "13.0", "torch_version": "2.13.0", "transformers_version": "5.23.0", "cpu_name": "AMD EPYC",
        "git_commit": "0123456789ab", "vramsweep_version": "0.3", "started_at": "2026-01-01T00:00:00+00:00",
    } | over  # fmt: skip
    return complete_row(values)


def sweep(lengths: Any = LENGTHS, repeats: int = 3, seed: int = 4, **over: Any) -> list[Row]:
    random = np.random.default_rng(seed)
    return [made(length, repeat, random, **over) for repeat in range(repeats) for length in lengths]


def done(total: int | None = 9, **over: Any) -> Status:
    values: dict[str, Any] = {
        "folder": "results/x", "state": "finished", "done": 9, "ok": 9, "oom": 0, "invalid": 0, "failed": 0,
        "stopped": 0, "last_row_at": None, "unreadable": 0,
    }  # fmt: skip
    return Status(total=total, **(values | over))


def test_rows_that_nothing_speaks_against_may_be_published() -> None:
    rows = sweep()
    assert not any(flags(row) for row in rows)  # else the rows here are not what they are meant to be
    (said,) = publication_check.findings(rows, done())
    assert said.forbids == () and said.kind == "intervals"


@pytest.mark.parametrize(("which", "over", "kind", "forbids", "count"), cases("publication_findings"))
def test_what_speaks_against_them(which: str, over: str, kind: str, forbids: str, count: str) -> None:
    """An installed package says its version in place of a commit; out of memory is an answer."""
    rows = sweep(**({} if which == "the fifth" else json.loads(over)))
    if which == "the fifth":
        rows[4] |= json.loads(over)
    found = [one for one in publication_check.findings(rows, done()) if one.kind != "intervals"]
    expected = [(kind, "" if forbids == "-" else forbids, int(count))] * (kind != "-")
    assert [(one.kind, " ".join(one.forbids), one.count) for one in found] == expected


def test_rows_of_two_cards_are_two_systems() -> None:
    found = publication_check.findings([*sweep(), *sweep(gpu_name="another")], done())
    assert [(one.kind, one.forbids, one.count) for one in found if one.kind != "intervals"] == [("systems", (), 2)]


def test_clocks_that_fall_forbid_speed_and_leave_memory_alone() -> None:
    """A card that slows down by 8 % over the steps of every row, with what its driver would say of it."""
    rows = sweep()
    for row in rows:
        times = [time * (1 + 0.08 * at / 9) for at, time in enumerate(row["step_times_s"])]
        row |= {"step_times_s": times, "elapsed_s": sum(times), "host_elapsed_s": sum(times)}
        row |= {"gpu_sm_clock_mhz": 1830, "throttle_reasons": ["sw_thermal_slowdown"]}
    kinds = {one.kind: one for one in publication_check.findings(rows, done())}
    assert kinds["not_settled"].forbids == kinds["throttled"].forbids == ("speed",)
    assert kinds["not_settled"].count >= 7 and kinds["throttled"].count == 9
    assert not any("memory" in one.forbids for one in kinds.values())


def test_false_alarms_of_many_rows_are_taken_for_what_they_are() -> None:
    """600 undisturbed rows: some are flagged by chance, and nothing is forbidden; four times as many are no chance."""
    rows = sweep(range(1, 201), seed=20267)
    for row in rows:  # noise of 5 %: whatever drifts by chance drifts by enough
        times = [row["seq_len"] * (1 + 5 * (t / row["seq_len"] / 1e-4 - 1)) * 1e-4 for t in row["step_times_s"]]
        row |= {"step_times_s": times, "elapsed_s": sum(times), "host_elapsed_s": sum(times)}
    flagged = [row for row in rows if "not_settled" in flags(row)]
    assert flagged
    found = {one.kind: one for one in publication_check.findings(rows, done())}
    assert found["not_settled"].forbids == () and "chance alone" in found["not_settled"].text
    drifting = [row for row in rows if row not in flagged][: 3 * len(flagged) + 10]
    for row in drifting:
        times = sorted(row["step_times_s"])
        row |= {"step_times_s": times, "elapsed_s": sum(times)}
    found = {one.kind: one for one in publication_check.findings(rows, done())}
    assert found["not_settled"].forbids == ("speed",)


def test_what_is_only_predicted_is_said_to_be() -> None:
    rows = [
        complete_row({
            "trial_id": f"p{n}", "terminal": True, "outcome": "ok", "device": "simulated", "peak_allocated_bytes": n,
            "simulated_gpu": "l4-24gb", "torch_version": "2.13.0", "vramsweep_version": "0.3", "git_commit": "01",
            "unproven": ["optimizer=lion_8bit"] * (n > 1),
            "not_covered": ["evaluation"] * (n > 2), "trial": {"seq_len": n}, "estimated_tokens_per_s": 5.0,
        })
        for n in (1, 2, 3)
    ]  # fmt: skip
    found = publication_check.findings(rows, done(3, done=3))
    kinds = {one.kind: (one.forbids, one.count) for one in found}
    assert kinds == {"predicted": ((), 3), "not_covered": ((), 1), "unproven": ((), 2)}
    assert publication_check.evidence(rows, None).claims == ("memory",)  # an estimated speed is none
    (mixed,) = [one for one in publication_check.findings([*rows, *sweep()], done()) if one.kind == "predicted"]
    assert mixed.text == "3 rows predicted, not measured"


@parametrized("states_of_plans")
def test_the_plan_and_the_journal(total: int | None, over: Any, kind: str | None, forbids: tuple[str, ...]) -> None:
    status = done(total, **over)
    found = [one for one in publication_check.findings(sweep(), status) if one.kind != "intervals"]
    assert [(one.kind, one.forbids) for one in found] == [(kind, forbids)] * (kind is not None)


def folder(at: Path, rows: list[Row]) -> Path:
    """A results folder with these rows in a journal and no plan."""
    with journal.Journal(at) as own:
        own.extend(rows)
    return at


def test_the_verb_says_in_one_line_that_all_is_well(tmp_path: Path, cli: Cli) -> None:
    first, *rest = cli.run("check", folder(tmp_path / "well", sweep())).out.splitlines()
    assert first.endswith("well, 9 rows, measured: memory and speed may be published")
    assert [line.strip().split(":")[0] for line in rest] == ["mention"]  # the interval that belongs to the speed


def test_claims_are_told_apart(tmp_path: Path, cli: Cli) -> None:
    place = folder(tmp_path / "once", sweep(repeats=1))
    out = cli.run("check", place, status=1).out
    assert "memory may be published, speed may not" in out
    assert "forbids speed: 3 configurations of 3 measured in only one process" in out
    cli.run("check", place, "--claim", "memory")
    cli.run("check", place, "--claim", "speed", status=1)
    (found,) = cli.json("check", place, status=1)
    assert found["claims"] == {"memory": True, "speed": False}
    assert [one["kind"] for one in found["findings"]] == ["processes"]


def test_a_planned_trial_without_an_answer_is_known_from_the_folder(tmp_path: Path) -> None:
    planned = plan.order_trials(plan.expand_trials([tiny(seq_len=n) for n in (8, 16)], 1))
    rows = sweep((8,), 1, device="cpu", memory_source="cpu_tensors_and_rss", gpu_name=None)
    rows[0]["trial_id"] = planned[0].trial_id
    place = folder(tmp_path, rows)
    (place / journal.PLAN).write_text(json.dumps({
        "id_version": ID_VERSION, "trials": [p.trial_id for p in planned], "systems": [system_of(rows[0])],
        "system": [0, 0], "any_system": False,
    }))  # fmt: skip
    kinds = {one.kind: one.text for one in publication_check.judge_folder(place).findings}
    assert kinds["unanswered"] == "1 of 2 planned trials have not finished; run the same command again"


def test_a_line_that_was_changed_is_found(tmp_path: Path) -> None:
    place = folder(tmp_path, sweep())
    file = place / journal.NAME
    file.write_text(file.read_text().replace('"seq_len":512', '"seq_len":513', 1))
    assert "damaged" in {one.kind for one in publication_check.judge_folder(place).findings}


def test_everything_wrong_at_once_is_one_screen(tmp_path: Path, cli: Cli) -> None:
    wrong = {
        "git_commit": "01+dirty", "driver_version": None, "cuda_version": None, "foreign_processes": [1],
        "device_baseline_bytes": 2**33, "throttle_reasons": ["hw_slowdown"], "gpu_sm_clock_mhz": 300, "host_load": 9.0,
        "plateau": False, "step_growth_bytes": 512, "alloc_retries": 2, "skipped_steps": 3, "node_trials": ["a"],
        "optimizer_effective": "SGD", "measured_steps": 3, "elapsed_s": 1.0, "flags": ["corrected_since"],
    }  # fmt: skip
    rows = [row | {"peak_reserved_bytes": n} for n, row in enumerate(sweep(repeats=2, **wrong))]
    rows += [row | {"trial_id": f"x{row['trial_id']}"} for row in sweep(outcome="crash")]
    lines = cli.run("check", folder(tmp_path, rows), status=1).out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines[1:])) <= 110
    assert lines[1].startswith("  forbids memory and speed")
    assert lines[-1].strip().startswith("… and ") and lines[-1].endswith("more; --json lists all")


def test_a_folder_without_a_journal_is_a_mistake(tmp_path: Path, cli: Cli) -> None:
    assert "there is no file or folder" in cli.refuse("check", tmp_path / "nowhere")


def test_nothing_finished_is_nothing_to_publish(tmp_path: Path, cli: Cli) -> None:
    out = cli.run("check", folder(tmp_path, sweep(repeats=1, terminal=False)), status=1).out
    assert "there is nothing to publish" in out and "no trial has finished" in out
