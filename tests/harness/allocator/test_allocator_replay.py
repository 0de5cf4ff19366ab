"""Replay: exact on real recordings and on those the simulator made; the what-if table; the blocks of a peak."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_allocator_simulator import OPERATIONS, record

from vramsweep.harness.allocator import recording, replay
from vramsweep.harness.allocator.config import MIB, parse
from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.allocator.peak_blocks import at_peak, innermost_frame
from vramsweep.harness.allocator.recording import SEGMENT_ACTIONS, check
from vramsweep.harness.allocator.replay import TIMELINE_POINTS, Timeline, grid, rank, replay_under, what_if
from vramsweep.harness.allocator.simulator import Simulator

pytestmark = pytest.mark.deterministic

TESTS = ROOT / "tests"
SHARED = TESTS.parents[1] / "shared" / "data" / "snapshots"
SMALL = TESTS / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"
PEAK_MIB = {file: int(peak) for file, peak in cases("recorded_peaks")}


def check_exact(path: Path) -> None:
    loaded = recording.load(path)
    row = replay.replay_as_recorded(loaded, undo(loaded))
    assert row.match is not None
    assert row.match.first_difference is None
    assert row.match.exact
    assert row.match.segment_events == sum(e[0] in SEGMENT_ACTIONS for e in loaded.events)
    assert row.match.blocks == sum(e[0] == "alloc" for e in loaded.events)
    assert row.peak_reserved == PEAK_MIB[path.name] * MIB


def test_the_shipped_recording_is_replayed_exactly():
    check_exact(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PEAK_MIB))
def test_every_shared_recording_is_replayed_exactly(name):
    if not (SHARED / name).is_file():
        pytest.skip("shared/data/snapshots is not beside this clone")
    check_exact(SHARED / name)


# device: segment events (map and unmap), blocks, MiB mapped at most and at the end
EXPANDABLE = {0: (175, 2434, 8146), 1: (46, 199, 80302), 2: (78, 392, 20870)}


@pytest.mark.parametrize("device", EXPANDABLE)
def test_three_devices_with_expandable_segments_are_replayed_exactly(device):
    path = SHARED / "expandable_three_devices.pickle"
    if not path.is_file():
        pytest.skip("shared/data/snapshots is not beside this clone")
    loaded = recording.load(path, device=device)
    row = replay.replay_as_recorded(loaded, undo(loaded))
    events, blocks, mapped = EXPANDABLE[device]
    assert row.match is not None and row.match.exact, row.match
    assert (row.match.segment_events, row.match.blocks, row.peak_reserved) == (events, blocks, mapped * MIB)
    if device == 1:  # ran out of memory: what is given back first, and that it does not help, follow from a limit
        limited = replay.replay_as_recorded(loaded, undo(loaded), (mapped + 500) * MIB)
        assert limited.match is not None and limited.match.exact, limited.match
        assert limited.stats is not None and limited.stats.num_alloc_retries == 2
        for other, said in ((mapped, "the replay runs out of memory"), (90_000, "the recording runs out of memory")):
            wrong = replay.replay_as_recorded(loaded, undo(loaded), other * MIB)
            assert wrong.match is not None and said in str(wrong.match.first_difference)


def test_the_shipped_recording_is_exact_without_being_told_addresses():
    loaded = recording.load(SMALL)
    made = []
    simulator = Simulator(parse(""), None, lambda e: made.append((e[0], e[2])))
    for action, addr, size, stream in loaded.events:
        if action == "alloc":
            simulator.malloc(addr, size, stream)
        elif action == "free_requested":
            simulator.free_requested(addr)
        elif action == "free_completed":
            simulator.free_completed(addr)
    assert made == [(e[0], e[2]) for e in loaded.events if e[0] in SEGMENT_ACTIONS]


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    OPERATIONS,
    st.sampled_from(
        ["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:[4:2,16:8,>:2]"],
    ),
    st.floats(0.05, 1),
)
def test_own_recordings_replay_exactly_however_much_the_ring_buffer_dropped(operations, config, share):
    recorder = record(operations, config)
    keep = max(2, int(len(recorder.trace) * share))  # one event is no history
    if len(recorder.trace) < 2:
        return
    loaded = check(recorder.snapshot(keep), "own")
    row = replay.replay_as_recorded(loaded, undo(loaded))
    assert row.match is not None
    assert row.match.exact, row.match
    if keep == len(recorder.trace):
        assert row.stats == recorder.simulator.stats()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from(["malloc", "malloc", "free"]), st.integers(1, 50 * MIB), st.just(0)), max_size=80
    )
)
def test_own_recordings_with_retries_and_errors_replay_exactly_when_the_limit_is_known(operations):
    limit = 200 * MIB
    for config in ("", "garbage_collection_threshold:0.6"):
        recorder = record(operations, config, limit)
        if len(recorder.trace) > 1:
            loaded = check(recorder.snapshot(), "own")
            row = replay.replay_as_recorded(loaded, undo(loaded), limit)
            assert row.match is not None
            assert row.match.exact, row.match
            assert row.retries == recorder.simulator.num_alloc_retries
            assert row.match.out_of_memory_events == recorder.simulator.num_ooms


def test_releases_for_an_unknown_reason_are_reported_and_followed():
    recorder = record([("malloc", 30 * MIB, 0), ("malloc", 40 * MIB, 0), ("free", 0, 0), ("free", 0, 0)])
    recorder.simulator.release_segment(next(iter(recorder.simulator.releasable()))[1])  # only one of the two
    recorder.malloc(99, 50 * MIB)
    loaded = check(recorder.snapshot(), "own")
    match = replay.replay_as_recorded(loaded, undo(loaded)).match
    assert match is not None
    assert not match.exact
    assert (match.unexplained_releases, match.segment_events, match.matched, match.extra) == (1, 4, 3, 0)
    assert "has a reason that the replay does not know" in str(match.first_difference)


def test_empty_cache_in_a_recording_is_repeated_under_other_settings():
    recorder = record([("malloc", 30 * MIB, 0), ("free", 0, 0), ("empty", 0, 0), ("malloc", 40 * MIB, 0)])
    loaded = check(recorder.snapshot(), "own")
    start = undo(loaded)
    assert replay.replay_as_recorded(loaded, start).match.releases_before_growth == 1
    for config in ("", "expandable_segments:True"):
        row = replay_under(loaded, start, parse(config), None)
        assert row.stats.num_device_free == 1
        assert row.peak_reserved == 40 * MIB


def test_private_pools_keep_to_themselves():
    recorder = record([])
    recorder.simulator.malloc(1, 2 * MIB, 0, private=1)
    recorder.malloc(2, 2 * MIB)
    snapshot = recorder.snapshot()
    private = recorder.simulator.live[1].addr
    for segment in snapshot["segments"]:
        segment["segment_pool_id"] = (0, 1) if segment["address"] == private else (0, 0)
    loaded = check(snapshot, "own")
    start = undo(loaded)
    assert replay.replay_as_recorded(loaded, start).match.exact
    assert replay_under(loaded, start, parse(""), None).device_allocs == 2


def test_the_table_has_the_recorded_row_first_and_ends_at_out_of_memory():
    table = what_if(SMALL, ["expandable_segments:True", "garbage_collection_threshold:0.8"], memory_limit=2 << 30)
    assert [(r.settings, r.start) for r in table.rows] == [
        ("", "recorded"),
        ("", "rebuilt"),
        ("expandable_segments:True", "rebuilt"),
        ("garbage_collection_threshold:0.8", "rebuilt"),
    ]
    assert table.rows[0].match.exact
    assert table.rows[0].out_of_memory is None
    assert table.rows[1].out_of_memory.startswith("event ")
    assert table.rows[1].stats.num_ooms == 1
    assert table.rows[1].peak_reserved <= 2 << 30
    data = json.loads(table.to_json())
    assert data["rows"][0]["peak_reserved"] == 3606 * MIB
    assert max(p["reserved"] for p in data["rows"][0]["timeline"]) == 3606 * MIB
    assert "timeline" not in json.loads(table.to_json(timelines=False))["rows"][0]


def test_a_start_that_does_not_fit_is_said():
    recorder = record([("malloc", 30 * MIB, 0), ("malloc", 30 * MIB, 0), ("malloc", 512, 0)])
    loaded = check(recorder.snapshot(keep=1), "own")
    row = replay_under(loaded, undo(loaded), parse(""), 40 * MIB)
    assert str(row.out_of_memory).startswith("rebuilding the starting state: ")


def test_a_recording_made_under_a_memory_fraction():
    recorder = record([("malloc", 30 * MIB, 0), ("free", 0, 0), ("malloc", 40 * MIB, 0)], limit=60 * MIB)
    snapshot = recorder.snapshot()
    snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "per_process_memory_fraction:0.5"
    loaded = check(snapshot, "own")
    start = undo(loaded)
    assert replay.replay_as_recorded(loaded, start).match.exact  # the retry's releases look like empty_cache
    known = replay.replay_as_recorded(loaded, start, 60 * MIB)
    assert known.match.exact
    assert (known.retries, known.settings) == (1, "per_process_memory_fraction:0.5")


def test_a_long_timeline_stays_short_and_keeps_its_peaks():
    simulator = Simulator(parse(""))
    timeline = Timeline(simulator, None)
    events = 50_000
    for stretch in timeline.stretches(range(events), events):
        for number in stretch:
            simulator.malloc(number, 70 * MIB if number == 31_234 else 2 * MIB)
            simulator.free(number)
    assert len(timeline.points) <= TIMELINE_POINTS + 2
    assert timeline.points[-1].event == timeline.events == events
    assert max(p.allocated for p in timeline.points) == timeline.peak_allocated == 70 * MIB
    assert max(p.reserved for p in timeline.points) == simulator.peak_reserved


def test_search_ranks_by_fit_then_reserved_then_cudamallocs():
    table = what_if(SMALL, grid(limited=False), memory_limit=3600 * MIB)
    ranked = rank(table.rows[1:])
    keys = [(r.out_of_memory is not None, r.peak_reserved, r.device_allocs) for r in ranked]
    assert keys == sorted(keys)
    assert len(ranked) == len(grid(False)) + 1
    assert set(grid(True)) > set(grid(False))


pytestmark = pytest.mark.deterministic


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


def test_the_innermost_line_that_is_not_torch_s():
    stack = [
        frame("CUDACachingAllocator.cpp", 0, "malloc"),
        frame("/env/lib/python3.12/site-packages/torch/nn/functional.py", 9, "linear"),
        frame("/env/lib/python3.12/site-packages/torch/nn/modules/linear.py", 125, "forward"),
        frame("/env/lib/python3.12/site-packages/torch/nn/modules/module.py", 1784, "_call_impl"),
        frame("/home/me/project/net/model.py", 12, "Block.forward"),
        frame("/home/me/train.py", 3, "<module>"),
    ]
    assert innermost_frame(stack) == "project/net/model.py:12 Block.forward (torch.nn.modules.linear)"
    assert innermost_frame([frame("C:\\env\\Lib\\site-packages\\torch\\functional.py", 1, "einsum")]) is None
    windows = frame("C:\\me\\model.py", 4, "forward")
    assert innermost_frame([windows]) == "C:/me/model.py:4 forward"


def test_a_backward_pass_without_python_is_its_node():
    stack = [frame("??", 0, "at::_ops::mm::call"), frame("??", 0, "torch::autograd::generated::MmBackward0::apply(x)")]
    assert innermost_frame(stack) == "MmBackward0 (backward)"


@pytest.mark.parametrize("stack", [None, [], "text", [None, {"filename": 1}], [frame("??", 0, "unwind")]])
def test_what_is_no_stack_says_nothing(stack):
    assert innermost_frame(stack) is None


def check_holders(path):
    loaded = recording.load(path)
    start = undo(loaded)
    peak = replay.replay_as_recorded(loaded, start).holders
    assert peak is not None
    live = {p.addr: p.requested for s in start.segments for p in s.pieces if p.state == "live"}
    for action, addr, size, _ in loaded.events[start.first : peak.event]:
        if action == "alloc":
            live[addr] = size
        elif action == "free_requested":
            del live[addr]
    assert [size for one in peak.largest for size in [one.bytes] * one.count][:10] == sorted(live.values())[::-1][:10]
    assert sum(one.bytes * one.count for one in peak.largest) + peak.rest == sum(live.values())
    assert sum(one.count for one in peak.largest) + peak.rest_count == len(live)
    assert 0 <= peak.rounding == peak.allocated - sum(live.values()) < peak.allocated / 10
    assert 0 <= peak.unknown <= sum(live.values())
    return loaded, start, peak


def test_the_blocks_of_the_shipped_recording():
    loaded, start, peak = check_holders(SMALL)
    assert peak.allocated <= PEAK_MIB[SMALL.name] * MIB
    assert ("DivBackward0 (backward)", 4, 512 * MIB) in {(one.where, one.count, one.bytes) for one in peak.largest}
    assert any("cs336_systems/trace_peak_memory.py" in str(one.where) for one in peak.largest)
    nothing = at_peak(loaded, start, start.first, 0)
    assert nothing.largest == () and nothing.rest == nothing.unknown == 0


@pytest.mark.parametrize("name", sorted(PEAK_MIB))
def test_the_blocks_of_every_shared_recording(name):
    if not (SHARED / name).is_file():
        pytest.skip("shared/data/snapshots is not beside this clone")
    check_holders(SHARED / name)


@pytest.mark.slow
def test_the_verb_says_who_and_what_is_unknown(tmp_path, cli):
    out = tmp_path / "replay.html"
    said = cli.run("replay", SMALL, "--figure", out).out
    assert "Blocks of the recorded peak: " in said and "trace_peak_memory.py" in said
    page = out.read_text()
    assert "trace_peak_memory.py" in page and "so allocated memory has one colour" in page
    first, second = cli.json("replay", SMALL)["rows"]
    assert first["holders"]["largest"] and second["holders"] is None
