"""Test which blocks make up a recording's peak, by comparison with the recording itself."""

import pytest
from test_allocator_replay import PEAK_MIB, SHARED, SMALL

from vramsweep.harness.allocator import recording
from vramsweep.harness.allocator.config import MIB
from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.allocator.peak_blocks import at_peak, innermost_frame
from vramsweep.harness.allocator.replay import replay_as_recorded

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


def check(path):
    loaded = recording.load(path)
    start = undo(loaded)
    peak = replay_as_recorded(loaded, start).holders
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


def test_the_shipped_recording():
    loaded, start, peak = check(SMALL)
    assert peak.allocated <= PEAK_MIB[SMALL.name] * MIB
    assert ("DivBackward0 (backward)", 4, 512 * MIB) in {(one.where, one.count, one.bytes) for one in peak.largest}
    assert any("cs336_systems/trace_peak_memory.py" in str(one.where) for one in peak.largest)
    nothing = at_peak(loaded, start, start.first, 0)
    assert nothing.largest == () and nothing.rest == nothing.unknown == 0


@pytest.mark.parametrize("name", sorted(PEAK_MIB))
def test_every_shared_recording(name):
    if not (SHARED / name).is_file():
        pytest.skip("shared/data/snapshots is not beside this clone")
    check(SHARED / name)


@pytest.mark.slow
def test_the_verb_says_who_and_what_is_unknown(tmp_path, cli):
    out = tmp_path / "replay.html"
    said = cli.run("replay", SMALL, "--figure", out).out
    assert "Blocks of the recorded peak: " in said and "trace_peak_memory.py" in said
    page = out.read_text()
    assert "trace_peak_memory.py" in page and "so allocated memory has one colour" in page
    first, second = cli.json("replay", SMALL)["rows"]
    assert first["holders"]["largest"] and second["holders"] is None
