"""Snapshots of replays: our own reader replays them exactly, and torch's own tools agree about their bytes."""

import pickle
from collections import Counter
from itertools import pairwise

import pytest
from conftest import ROOT
from traces import traced

from vramsweep.harness.allocator import peak_blocks, recording, snapshot
from vramsweep.harness.allocator.config import from_settings, parse, to_settings
from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.allocator.replay import replay_as_recorded, what_if
from vramsweep.harness.verbs import why
from vramsweep.runners.predict import memory_timeline
from vramsweep.runners.predict.replay_trace import replay

MIB = 1 << 20
SMALL = ROOT / "tests" / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4")


def check_snapshot(path, reserved):
    """What torch's tools and our reader find in the file; return the recording."""
    from torch.cuda import _memory_viz as viz

    data = pickle.loads(path.read_bytes())
    total = sum(segment["total_size"] for segment in data["segments"])
    for draw in (viz.memory, viz.segments):
        lines = draw(data, format_flamegraph=str).splitlines()
        assert sum(int(line.rpartition(" ")[2]) for line in lines) == total
    assert viz.compare(data["segments"], data["segments"], format_flamegraph=str) == ""
    assert f"total_reserved: {viz.Bytes(total)}" in viz.segsum(data)
    assert "predicted" in str(data["vramsweep"]) or "replayed" in str(data["vramsweep"])
    assert all("not measured" in event["user_metadata"] for event in data["device_traces"][0])
    viz.trace_plot(data), viz.segment_plot(data), viz.trace(data)
    read = recording.load(path)
    row = replay_as_recorded(read, undo(read))
    assert row.match is not None and row.match.exact and row.peak_reserved == reserved
    assert read.simulated and read.times is not None and all(a < b for a, b in pairwise(read.times))
    return read


def list_requests(read):
    return Counter((read.events[i][2], peak_blocks.innermost_frame(stack)) for i, stack in read.stacks.items())


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_replay_is_written_with_the_recorded_stacks(settings, tmp_path):
    out = tmp_path / "out.pickle"
    found = what_if(SMALL, [settings], snapshot=out)
    read = check_snapshot(out, found.rows[-1].peak_reserved)
    assert read.settings == parse(settings)
    assert list_requests(read) == list_requests(recording.load(SMALL))


def test_a_replay_that_runs_out_of_memory_ends_with_that_request(tmp_path):
    what_if(SMALL, [""], memory_limit=1024 * MIB, snapshot=tmp_path / "out.pickle")
    *events, last = pickle.loads((tmp_path / "out.pickle").read_bytes())["device_traces"][0]
    held = sum(e["size"] * {"segment_alloc": 1, "segment_free": -1}.get(e["action"], 0) for e in events)
    assert (last["action"], last["size"], last["device_free"] + held) == ("oom", 512 * MIB, 1024 * MIB)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_predicted_step_is_written_with_its_modules(settings, tmp_path):
    trace, config = traced(tmp_path, seq_len=512, micro_batch=8), parse(settings)
    found = memory_timeline.snapshot(trace, config, None)
    origins = [(snapshot.frames_of(maker), category) for maker, category in found.pop("makers")]
    snapshot.write_snapshot(tmp_path / "out.pickle", found, origins.__getitem__, "predicted, not measured")
    predicted = replay(trace, config, None)
    check_snapshot(tmp_path / "out.pickle", predicted.peak["reserved"])
    record, lines = why.explain_snapshot(tmp_path / "out.pickle", None)
    assert record["simulated"] and "not measured" in lines[1]
    assert abs(record["categories"]["parameters"] - predicted.breakdown["parameters"]) < 1 * MIB  # rounded blocks
    held, most, at_most = Counter(), 0, {}
    for event in pickle.loads((tmp_path / "out.pickle").read_bytes())["device_traces"][0]:
        held[event["category"]] += event["size"] * {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        if (total := held.total()) > most:
            most, at_most = total, dict(held)
    assert most == predicted.peak["requested"]
    assert at_most["parameters"] == predicted.breakdown["parameters"]
    assert at_most["activations"] == predicted.breakdown["activations"]


def test_frames_name_the_line_the_operator_and_the_modules():
    line, *modules = snapshot.frames_of(("model.layers.0", "aten.mm", "model.py:88"))
    assert line == {"filename": "model.py", "line": 88, "name": "aten.mm"}
    assert [frame["name"] for frame in modules] == ["model.layers.0", "model.layers", "model"]
    assert peak_blocks.innermost_frame([line, *modules]) == "model.py:88 aten.mm"


@pytest.mark.parametrize("text", ["garbage_collection_threshold:0.5", "max_split_size_mb:64,large_segment_size_mb:40"])
def test_settings_are_written_as_torch_reports_them(text):
    assert from_settings(to_settings(parse(text))) == parse(text)
    reported = pickle.loads(SMALL.read_bytes())["allocator_settings"]
    assert reported.items() <= to_settings(parse("")).items()


def test_mistakes(tmp_path, cli):
    for words, reason in (
        (["--allocator", "", "--allocator", "backend:native"], "--snapshot writes one replay"),
        (["--search"], "--snapshot writes one replay"),
    ):
        assert reason in cli.refuse("replay", SMALL, *words, "--snapshot", tmp_path / "x.pickle")
    own = tmp_path / "own.pickle"
    own.write_bytes(SMALL.read_bytes())
    assert "would be overwritten" in cli.refuse("replay", own, "--allocator", "", "--snapshot", own)
    assert own.read_bytes() == SMALL.read_bytes()
