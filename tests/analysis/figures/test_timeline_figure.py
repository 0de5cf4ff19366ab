"""The figure of a step's timeline, its table, the verb that makes it, and its place in a report."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import Cli, Run, refusal, tiny

from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.timeline import PARTS, holders, of_timeline
from vramsweep.analysis.report.page import draw
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions import trace_query
from vramsweep.harness.verbs import timeline

MIB = 1 << 20


def record(unit: int = MIB, **over: Any) -> dict[str, Any]:
    """A step of five events whose peak, 60 units, is after the third; 80 are reserved."""
    parts: dict[str, list[int]] = {name: [0] * 6 for name in PARTS}
    parts |= {
        "parameters": [20 * unit] * 6,
        "activations": [0, 10 * unit, 20 * unit, 30 * unit, 10 * unit, 0],
        "temporaries": [0, 0, 5 * unit, 9 * unit, 0, 0],
        "rounding": [0, 0, 0, unit, 0, 0],
    }
    allocated = [sum(values) for values in zip(*parts.values(), strict=True)]
    storages = [
        {"bytes": size * unit, "category": category, "module": module, "operator": "aten.mm", "line": "model.py:88",
         "step": step, "phase": at}
        for size, category, module, step, at in (
            (20, "parameters", "embed.weight", None, "load"),
            (15, "activations", "layers.0.up", 2, "forward"),
            (15, "activations", "layers.1.up", 2, "forward"),
        )
    ]  # fmt: skip
    several = storages[1] | {"module": "layers.*.up"}
    peak = {
        "event": 3, "phase": "backward", "allocated": 60 * unit, "largest": storages, "rest": 9 * unit, "rest_count": 4,
        "rounding": unit, "alike": [{"held": storages[0], "count": 1}, {"held": several, "count": 2}],
    }  # fmt: skip
    ends = (("forward", 0, 2), ("backward", 2, 4), ("optimizer", 4, 5))
    data = {
        "step": 2, "events": 5, "event": list(range(6)), "allocated": allocated, "active": allocated,
        "reserved": [60 * unit] * 3 + [80 * unit] * 3, "parts": parts, "peak": peak, "peak_reserved": 80 * unit,
        "phases": [{"phase": phase, "begin": begin, "end": end} for phase, begin, end in ends],
        "limit": 100 * unit, "failure": None, **over,
    }  # fmt: skip
    about = {
        "model": "small <b>", "seq_len": 1024, "micro_batch": 2, "precision": "bf16", "runner": "torch",
        "sharding": "none", "world_size": 1, "allocator": "default", "gpu": "t4-16gb",
    }  # fmt: skip
    return {"trial_id": "abc", "about": about, "timeline": data}


def annotations(figure: plots.Figure) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for one in figure.plot.layout.annotations:
        found.setdefault(one.name, []).append(one)
    return found


def test_the_areas_sum_to_what_is_allocated_and_the_peak_is_named() -> None:
    figure = of_timeline(record())
    traces = {trace.name: trace for trace in figure.plot.data}
    areas = [trace for trace in figure.plot.data if trace.stackgroup]
    assert [area.name for area in areas] == ["parameters", "activations", "temporaries", "rounding"]
    assert np.allclose(sum(np.array(area.y) for area in areas), np.array(traces["allocated"].y))
    assert max(traces["allocated"].y) == 60 and max(traces["reserved"].y) == 80
    assert len(set(PARTS.values())) == len(PARTS)
    said = annotations(figure)
    assert said["peak"][0].text == "<b>peak 60.0 MiB</b> in backward"
    assert (said["peak"][0].x, said["peak"][0].y) == (3, 60)
    assert [one.text for one in said["phase"]] == ["forward", "backward", "optimizer"]
    assert said["limit"][0].text == "limit 100.0 MiB"
    assert said[plots.WORLD][0].text == "predicted"
    assert figure.title.endswith("(predicted)") and "1,024 tokens × 2 samples" in figure.title
    assert list(figure.data["allocated"]) == record()["timeline"]["allocated"]


def test_the_table_holds_every_byte_of_the_peak() -> None:
    table = holders(record(1 << 30))
    assert [float(cell) for cell in table["GiB in all"]] == [20, 30, 9, 1]
    assert list(table["storages"]) == ["1", "2 × 15.0 GiB", "4 others", "rounding"]
    assert list(table["module"][:2]) == ["embed.weight", "layers.*.up"]
    assert list(table["made in"][:2]) == ["load", "step 3, forward"]


def test_a_limit_far_away_is_said_and_not_drawn() -> None:
    far = of_timeline(record(limit=24 << 30))
    assert "limit" not in annotations(far) and "24.0 GiB" in far.caption
    assert max(far.plot.layout.yaxis.range) < 120


def test_where_memory_runs_out_is_marked() -> None:
    full = of_timeline(record(limit=70 * MIB, failure={"event": 3, "phase": "backward", "request": 9 * MIB}))
    mark = next(trace for trace in full.plot.data if trace.name == "out of memory")
    assert (mark.x[0], mark.y[0]) == (3, 70)
    assert "runs out in backward, at a request of 9.0 MiB" in full.caption


def test_loading_and_many_phases_can_be_drawn() -> None:
    phases = [{"phase": ("forward", "backward")[i % 2], "begin": i, "end": i + 1} for i in range(12)]
    figure = of_timeline(record(step=None, phases=phases, events=12))
    assert [one.text for one in annotations(figure)["phase"]] == ["forward", "backward"]
    assert "loading" in figure.title


def test_names_of_phases_do_not_overlap() -> None:
    narrow = [("forward", 0, 2), ("backward", 2, 3), ("optimizer", 3, 100)]
    phases = [{"phase": name, "begin": begin, "end": end} for name, begin, end in narrow]
    lines = [one.yshift for one in annotations(of_timeline(record(phases=phases, events=100)))["phase"]]
    assert lines[0] != lines[1]


def test_a_page_of_timelines_escapes_names(tmp_path: Path) -> None:
    data, out = tmp_path / "data.json", tmp_path / "page.html"
    data.write_text(json.dumps([record()]))
    draw(data, out)
    page = out.read_text()
    assert "small &lt;b&gt;, 1,024 tokens" in page and "<b>," not in page
    assert "Largest allocations at the peak" in page and "layers.*.up" in page
    assert "cannot write" in refusal(UserError, draw, data, data / "page.html")
    data.write_text('{"rows": 1}')
    assert "is not the output of" in refusal(UserError, draw, data, out)
    assert "cannot read" in refusal(UserError, draw, tmp_path / "nothing.json", out)


@pytest.mark.slow
def test_the_page_in_chromium(tmp_path: Path, chromium: Any) -> None:
    data, out = tmp_path / "data.json", tmp_path / "page.html"
    data.write_text(json.dumps([record()]))
    draw(data, out)
    problems: list[str] = []
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"file://{out}")
    page.wait_for_selector("#figure-0 .main-svg")
    box = page.locator("#figure-0 .nsewdrag").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.7 * box["height"])
    page.wait_for_selector("#figure-0 .hoverlayer .legend")
    hover = str(page.locator("#figure-0 .hoverlayer").text_content())
    assert "activations : 30.00 MiB" in hover and "allocated : 60.00 MiB" in hover
    assert "reserved : 80.00 MiB" in hover
    page.set_viewport_size({"width": 390, "height": 800})
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert problems == []


def rows(*kinds: tuple[str, str, str, int]) -> list[dict[str, Any]]:
    return [
        {"trial_id": str(i), "device": "simulated", "trial": {}, "model": model, "runner": runner, "outcome": outcome,
         ("peak_reserved_bytes" if outcome == "ok" else "unlimited_peak_reserved_bytes"): size}
        for i, (model, runner, outcome, size) in enumerate(kinds)
    ]  # fmt: skip


def test_the_largest_that_fits_and_the_smallest_that_does_not_are_chosen() -> None:
    found = trace_query.chosen(
        rows(("a", "torch", "ok", 5), ("a", "torch", "ok", 7), ("a", "torch", "oom", 9), ("a", "torch", "oom", 8),
             ("b", "torch", "ok", 3), ("b", "trainer", "oom", 4), ("c", "torch", "ok", 1))
    )  # fmt: skip
    assert [row["trial_id"] for row in found] == ["1", "3", "4", "5"]


@pytest.mark.slow
def test_a_sweep_s_timelines_are_in_its_report_and_kept(
    run_sweep: Run, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tiny(device={"name": "simulated", "gpu": "t4-16gb"}, protocol={"warmup_steps": 1, "measured_steps": 1})
    rows = run_sweep(small, {**small, "seq_len": 64}, isolation="warm")
    folder = tmp_path / "t"
    cli.run("report", folder, "--images", "none")
    page = (folder / "report.html").read_text()
    assert f'id="timeline_{rows[1]["trial_id"]}"' in page
    assert f'id="timeline_{rows[0]["trial_id"]}"' not in page
    assert "Largest tensors at the peak" in page
    assert [file.stem for file in (folder / "trials" / "timelines").iterdir()] == [rows[1]["trial_id"]]
    monkeypatch.setattr(trace_query, "ask", Mock(side_effect=AssertionError("what is kept is asked for again")))
    (found,) = cli.json("timeline", folder)
    assert found["trial_id"] == rows[1]["trial_id"]
    assert found["timeline"]["peak"]["allocated"] == rows[1]["step_peak_allocated_bytes"][-1]
    assert found["timeline"]["peak_reserved"] == rows[1]["step_peak_reserved_bytes"][-1]
    assert "asked for again" in refusal(AssertionError, timeline.main, [str(folder), rows[0]["trial_id"], "--json"])
    assert "no finished trial nothing" in refusal(UserError, timeline.main, [str(folder), "nothing"])


@pytest.mark.slow
def test_one_trial_by_its_settings(tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "step.html"
    words = ("model=tiny", "seq_len=32", "device=simulated", "device.gpu=t4-16gb", "precision=fp32")
    assert cli.run("timeline", *words, "--out", out).out == f"{out}\n"
    assert "tiny, 32 tokens" in out.read_text()
