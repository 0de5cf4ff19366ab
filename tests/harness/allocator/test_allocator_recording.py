"""Loading recordings: what is refused, with which words, and that nothing in a file is ever run."""

import io
import json
import os
import pickle
import struct

import pytest
from conftest import ROOT, cases, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_allocator_simulator import OPERATIONS, record

from vramsweep.harness.allocator import recording, safe_unpickle
from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.allocator.recording import RecordingError
from vramsweep.harness.allocator.safe_unpickle import UnsafePickle

SMALL = ROOT / "tests" / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"


@pytest.fixture
def snapshot():
    return safe_unpickle.load(SMALL)


class Runs:
    def __reduce__(self):
        return os.system, ("touch hostile-pickle-ran",)


class Gets:
    def __reduce__(self):
        return getattr, (io.BytesIO, "mro")


MEMO_BOMB = pickle.PROTO + b"\x02" + pickle.EMPTY_LIST + pickle.LONG_BINPUT + struct.pack("<I", 2**31) + pickle.STOP
NESTED_TUPLES = pickle.PROTO + b"\x02" + pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000 + pickle.STOP


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(Runs()), "is refused: pickle opcode"),
        (pickle.dumps(Gets()), "is refused: pickle opcode"),
        (pickle.dumps(Runs(), protocol=0), "is not a pickle"),
        (b"cos\nsystem\n(S'true'\ntR.", "is not a pickle"),
        (b"\x80\x02cos\nsystem\n.", "pickle opcode GLOBAL at byte 2; a recording is made of plain containers only"),
        (b"\x80\x04\x82\x01.", "pickle opcode EXT1"),
        (b"\x80\x04\x96" + struct.pack("<Q", 1 << 40) + b".", "pickle opcode BYTEARRAY8"),
        (MEMO_BOMB, "its memo jumps ahead at byte 3"),
        (NESTED_TUPLES, "a tuple of something other than integers"),
        (pickle.dumps([1, 2, 3])[:-1], "it is truncated"),
        (b"", "it is truncated"),
        (b"PK\x03\x04 a zip file", "is not a pickle"),
        (b"\x80\x04X\xff\xff\xff\x7fshort.", "it is truncated"),
        (b"\x80\x04u.", "is damaged or not a pickle"),
        (b"\x80\x04}]]s.", "is damaged or not a pickle: TypeError"),
    ],
)
def test_hostile_and_damaged_pickles_are_refused(tmp_path, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recording.pickle").write_bytes(data)
    assert message in refusal(UnsafePickle, recording.load, tmp_path / "recording.pickle")
    assert not (tmp_path / "hostile-pickle-ran").exists()


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(2 << 30)
    assert "has 2,048.0 MiB, more than the 1,024.0 MiB allowed" in refusal(UnsafePickle, recording.load, path)
    assert "not a regular file" in refusal(UnsafePickle, recording.load, tmp_path)


@pytest.mark.parametrize(("place", "value", "message"), cases("malformed_snapshots"))
def test_malformed_snapshots_are_named(snapshot, place, value, message):
    *parents, last = [int(key) if key.isdecimal() else key for key in place.split(".")]
    target = snapshot
    for key in parents:
        target = target[key]
    if value == "missing":
        del target[last]
    else:
        target[last] = json.loads(value)
    assert message in refusal(RecordingError, recording.check, snapshot, "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [], "x is not a memory snapshot: a dict with segments and device_traces is expected"),
        (lambda s: s["segments"], "x is not a memory snapshot"),
        (lambda s: s | {"segments": s["segments"] * 2}, "overlap"),
    ],
)
def test_what_is_no_snapshot_is_named(snapshot, change, message):
    assert message in refusal(RecordingError, recording.check, change(snapshot), "x")


def test_events_that_do_not_lead_to_the_final_state(snapshot):
    del snapshot["device_traces"][0][-1]
    snapshot["device_traces"][0].append(snapshot["device_traces"][0][1] | {"action": "alloc", "addr": 123})
    assert "Events and final state disagree" in refusal(RecordingError, undo, recording.check(snapshot, "x"))


def test_several_devices_are_chosen_by_number(snapshot):
    snapshot["device_traces"].append(snapshot["device_traces"][0][:1])
    with pytest.raises(RecordingError, match="x has events of devices 0, 1: choose one with --device"):
        recording.check(snapshot, "x")
    assert len(recording.check(snapshot, "x", device=0).events) == 97
    with pytest.raises(RecordingError, match="x has no events of device 2, only of 0, 1"):
        recording.check(snapshot, "x", device=2)


def test_older_recordings_without_settings_times_or_pools(snapshot):
    del snapshot["allocator_settings"]
    for event in snapshot["device_traces"][0]:
        del event["time_us"]
    for segment in snapshot["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"]
    loaded = recording.check(snapshot, "x")
    assert loaded.times is None
    assert loaded.settings.render() == ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS, st.integers(1, 5))
def test_undoing_everything_leads_back_to_nothing(operations, _seed):
    recorder = record(operations)
    if recorder.trace:
        start = undo(recording.check(recorder.snapshot(), "x"))
        assert not start.segments
