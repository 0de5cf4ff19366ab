"""Test replays and predictions against recordings and rows of an H100 (results/reference/h100-80gb).

The recordings and rows are the GPU's own; nothing here was fitted to them.
"""

import contextlib
import functools
import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import card_page
import pytest
from conftest import ROOT, Run, parametrized

from vramsweep.harness.allocator.replay import what_if
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.loops import torch_loop
from vramsweep.runners.predict import make_trace, predicted_row

pytestmark = pytest.mark.deterministic
MIB = 1 << 20
FOLDER = ROOT / "results" / "reference" / "h100-80gb"
ROWS: list[Row] = card_page.read(FOLDER / "rows.jsonl")


def recorded(tmp_path: Path, name: str) -> tuple[Path, dict[str, Any]]:
    with zipfile.ZipFile(FOLDER / "recordings.zip") as archive:
        path = Path(archive.extract(f"{name}.pickle", tmp_path))
    run: dict[str, Any] = json.loads((FOLDER / "summary.json").read_text())["parts"]["recordings"][name]
    return path, run


@contextlib.contextmanager
def recorded_events(folder: Path, name: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the events that a recording has of the first device."""
    with zipfile.ZipFile(folder / "recordings.zip") as archive, archive.open(f"{name}.pickle") as stream:
        yield pickle.load(stream)["device_traces"][0]


def test_one_recording_tells_what_another_setting_reserves(tmp_path: Path) -> None:
    path, own = recorded(tmp_path, "default")
    _, other = recorded(tmp_path, "expandable")
    table = what_if(path, [other["conf"]])
    match = table.rows[0].match
    assert match is not None and match.exact, match
    assert table.rows[0].peak_reserved == own["peak_reserved_bytes"]
    assert table.rows[-1].peak_reserved == other["peak_reserved_bytes"] != own["peak_reserved_bytes"]
    assert table.rows[-1].peak_allocated == other["peak_allocated_bytes"] != own["peak_allocated_bytes"]


@pytest.mark.slow
def test_every_recording_is_replayed_exactly_and_tells_of_the_others() -> None:
    found = list(card_page.replays(FOLDER))
    assert len(found) == 10 + sum(map(len, card_page.CROSS.values()))
    for one, other, run, replay in found:
        assert replay.peak_reserved == run["peak_reserved_bytes"], (one, other)
        assert replay.retries == run["retries"], (one, other)
        if one == other:  # as recorded, to its end
            assert replay.match is not None and replay.match.exact, (one, replay.match)
        else:
            assert (replay.out_of_memory is not None) == run["out_of_memory"], (one, other)
            # Which of equal blocks is divided and which is given whole depends on the addresses that the driver would
            # have given to segments of sizes that were not recorded.
            near = 3.3 * MIB if (one, other) in (("default", "roundup"), ("expandable", "roundup")) else 0
            assert replay.peak_allocated == pytest.approx(run["peak_allocated_bytes"], abs=near), (one, other)


def test_cold_and_warm_trials_had_the_same_memory_but_for_what_an_import_made() -> None:
    """Four bytes of torchaudio's, whose code was imported while the model was made (build.model imports it before)."""
    ok = [row for row in ROWS if row["outcome"] == "ok" and row["device"] == "cuda"]
    both = [(a, b) for a in ok for b in ok if a["trial_id"] == b["trial_id"] and a["isolation"] < b["isolation"]]
    assert sorted(cold["sweep"] for cold, _ in both) == ["factors-cold"] * 2 + ["isolation-cold"] * 3
    for cold, warm in both:
        peaks = [name for name in cold if "_peak_" in f"_{name}" and name.endswith("_bytes") and "host" not in name]
        more = {name: cold[name] - warm[name] for name in peaks if isinstance(cold[name], int)}
        assert len(more) > 10
        if cold["sweep"] == "factors-cold":  # when templates went cold
            assert not any(more.values())
        else:
            assert more["peak_requested_bytes"] == 4
            assert set(more.values()) == {0, 4, 512, -512}  # more is allocated, and less left in its segment
    with recorded_events(FOLDER, "miss-3a0a7c8785543d2b") as events:
        first = next(event for event in events if event["action"] == "alloc")
    assert first["size"] == 4 and any(f["filename"].endswith("torchaudio/compliance/kaldi.py") for f in first["frames"])


@functools.cache
def h200() -> list[Row]:
    return card_page.read(ROOT / "results" / "reference" / "h200-141gb" / "rows.jsonl")


def test_what_was_predicted_for_two_gpus_was_measured_on_them() -> None:
    """The differences as they were found; docs/h100.md and docs/h200.md have each. Blind: before the recordings were
    looked at. FSDP1's reserved memory is between two bounds, of which the pairs take the lower."""
    blind = card_page.pairs(ROWS, card_page.read(FOLDER / "blind.jsonl"))
    now, later = card_page.pairs(ROWS), card_page.pairs(h200())
    for both, count, most in ((blind, 39, 0.002), (now, 66, 0.002), (later, 94, 0.003)):
        assert len(both) == count
        assert max(abs(card_page.off(m, p, "peak_allocated_bytes")) for m, p in both) < most
    blind, now, later = ([(m, p) for m, p in both if abs(card_page.off(m, p, "peak_reserved_bytes")) > 0.01]
                         for both in (blind, now, later))  # fmt: skip
    assert (len(blind), now, [m["sharding"] for m, _ in later]) == (4, [], ["fsdp1", "fsdp1"])
    assert all(p["peak_reserved_bytes"] < m["peak_reserved_bytes"] < p["peak_reserved_most_bytes"] for m, p in later)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["h100-80gb", "h200-141gb"])
def test_a_gpu_s_page_is_what_its_folder_makes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the page names the folder as it was given
    page = ROOT / "docs" / f"{folder.partition('-')[0]}.md"
    assert card_page.page(Path("results/reference") / folder) == page.read_text()


LARGE = 1 << 20


def asked_for(events: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the large blocks that a recording's run requested and freed, in order, in bytes rounded as the allocator
    does."""
    sizes: dict[int, int] = {}
    found = []
    for event in events:
        if event["action"] == "alloc":
            sizes[event["addr"]] = -(-event["size"] // 512) * 512
            found.append(("alloc", sizes[event["addr"]]))
        elif event["action"] == "free_completed" and event["addr"] in sizes:
            found.append(("free", sizes.pop(event["addr"])))
    return [one for one in found if one[1] >= LARGE]


def traced(trace: Any, first: int, end: int) -> list[tuple[str, int]]:
    """Return the large blocks that a trace requests and frees between two of its events, in the form of `asked_for`."""
    sizes = [-(-size // 512) * 512 for size in trace.sizes]
    kinds = [("alloc" if event > 0 else "free", sizes[abs(event) - 1]) for event in trace.events[first:end]]
    return [one for one in kinds if one[1] >= LARGE]


@pytest.mark.slow
def test_the_trace_asks_for_blocks_in_the_order_in_which_a_card_was_asked(tmp_path: Path) -> None:
    """GPT-2 with stored scores, bf16, loading and one step: all requests and frees of a MiB and more."""
    (row,) = [one for one in ROWS if one["trial_id"] == "3a0a7c8785543d2b" and one["sweep"] == "factors"]
    values = row["trial"] | {"device": {"name": "simulated", "gpu": "h100-80gb"}, "versions": {"torch": "2.11.0"}}
    trial = Trial.model_validate(values)
    trace, _ = make_trace.trace_trial(trial, gpu_lookup.gpu_named("h100-80gb"), tmp_path, torch_loop)
    step = next(mark.end for mark in trace.marks if (mark.step, mark.phase) == (0, "optimizer"))
    found = traced(trace, 0, step)
    with recorded_events(FOLDER, "miss-3a0a7c8785543d2b") as events:
        assert found == asked_for(events)[: len(found)]
    assert len(found) > 2000


@pytest.mark.slow
@parametrized("settings_of_measured_gpus", ids=lambda over: "-".join([over["runner"]["name"], over["precision"]]))
def test_this_version_predicts_what_the_card_measured(run_sweep: Run, over: dict[str, Any]) -> None:
    """Other versions of torch and transformers than the card's, so that what they changed counts in as well."""
    (measured,) = [
        row
        for row in ROWS
        if row["device"] == "cuda" and row["sweep"] == "factors" and row["trial"]["model"]["name"] == "gpt2"
        and all(row["trial"][axis] == value for axis, value in over.items() if axis != "runner")
        and row["trial"]["runner"]["name"] == over["runner"]["name"]
        and all(row["trial"][axis] == "none" for axis in ("adapter", "checkpointing"))
        and row["trial"]["attention"] == "sdpa" and row["trial"]["optimizer"] == "default"
        and row["trial"]["sharding"] == over.get("sharding", "none")
    ]  # fmt: skip
    values = {name: value for name, value in measured["trial"].items() if name not in ("repeat", "fingerprints")}
    (row,) = run_sweep(values | {"device": {"name": "simulated", "gpu": "h100-80gb"}}, timeout_s=300)
    assert row["outcome"] == "ok", row["reason"]
    assert row["peak_allocated_bytes"] == pytest.approx(measured["peak_allocated_bytes"], rel=0.002)
    assert row["peak_reserved_bytes"] == pytest.approx(measured["peak_reserved_bytes"], rel=0.01)


def predicted_as(row: Row, folder: Path) -> dict[str, Any]:
    """The prediction of a trial that the H200 measured, with its torch, made now."""
    values = row["trial"] | {"device": {"name": "simulated", "gpu": "h200-141gb"}, "versions": {"torch": "2.11.0"}}
    trial = Trial.model_validate(values)
    trace, details = make_trace.trace_trial(trial, gpu_lookup.gpu_named("h200-141gb"), folder, torch_loop)
    return predicted_row.predict(trial, trace, details).columns


@pytest.mark.slow
@parametrized("scratch_on_a_gpu")
def test_scratch_of_sums_and_of_compiled_optimizers_is_what_an_h200_reserved(
    model: str, optimizer: str, tmp_path: Path
) -> None:
    """Peaks of four trials of the card, two of which were never recorded (docs/h200.md)."""
    (row,) = [one for one in h200() if (one["model"], one["optimizer"], one["device"]) == (model, optimizer, "cuda")]
    found = predicted_as(row, tmp_path)
    assert found["peak_reserved_bytes"] == row["peak_reserved_bytes"]
    assert found["peak_allocated_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.0005)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "qwen0.5b"])
def test_what_fsdp1_s_streams_kept_is_between_the_bounds(model: str, tmp_path: Path) -> None:
    (row,) = [one for one in h200() if (one["model"], one["sharding"], one["device"]) == (model, "fsdp1", "cuda")]
    found = predicted_as(row, tmp_path)
    assert found["peak_allocated_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.002)
    for counter in ("active", "reserved"):
        least, most = found[f"peak_{counter}_bytes"], found[f"peak_{counter}_most_bytes"]
        assert least < row[f"peak_{counter}_bytes"] < most < 1.2 * row[f"peak_{counter}_bytes"], counter


def once(asked: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Without what is asked for again and again, as a kernel that is timed asks."""
    left = list(asked)
    for length in range(2, 13, 2):
        at = 0
        while at + 2 * length <= len(left):
            if left[at : at + length] == left[at + length : at + 2 * length]:
                del left[at : at + length]
            else:
                at += 1
    return left


@pytest.mark.slow
def test_a_compiled_optimizer_asks_for_what_a_card_was_asked_while_its_kernels_were_timed(tmp_path: Path) -> None:
    """torchao's AdamW in 4 bits in its first step, the largest parameter: large blocks, in order, until those of the
    first moment are free."""
    (row,) = [one for one in h200() if one["trial_id"] == "62253bc0214d1bb1" and one["device"] == "cuda"]
    trial = Trial.model_validate(row["trial"] | {"device": {"name": "simulated", "gpu": "h200-141gb"}})
    trace, _ = make_trace.trace_trial(trial, gpu_lookup.gpu_named("h200-141gb"), tmp_path, torch_loop)
    begin, end = (next(m.end for m in trace.marks if (m.step, m.phase) == (0, p)) for p in ("backward", "optimizer"))
    found = once(traced(trace, begin, end))
    with recorded_events(ROOT / "results" / "reference" / "h200-141gb", f"miss-{row['trial_id']}") as events:
        made = [any("torchao/optim" in f["filename"] for f in e.get("frames", ())) for e in events]
        card = once(asked_for(events[made.index(True) :]))
    until = found.index(("free", 4 * 50257 * 768 * 2)) + 1
    assert found[:until] == card[:until]
    copies = [("alloc", 4 * 50257 * 768)] * 2
    assert until == 24 and found[6:8] == found[11:13] == copies
