"""Loading recordings: what is refused, with which words, and that nothing in a file is ever run."""

import io
import os
import pickle
import random
import struct
from pathlib import Path

import pytest
from allocator_recorder import record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_allocator_simulator import OPERATIONS

from vramsweep.harness.allocator import recording, safepickle
from vramsweep.harness.allocator.config import parse
from vramsweep.harness.allocator.recording import RecordingError
from vramsweep.harness.allocator.replay import replay_as_recorded, replay_under, what_if
from vramsweep.harness.allocator.restore import undo
from vramsweep.harness.allocator.safepickle import UnsafePickle
from vramsweep.harness.errors import UserError

SMALL = Path(__file__).parents[2] / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"


@pytest.fixture
def snapshot():
    return safepickle.load(SMALL)


def write(tmp_path, data: bytes) -> Path:
    path = tmp_path / "recording.pickle"
    path.write_bytes(data)
    return path


class Runs:
    def __reduce__(self):
        return os.system, ("touch hostile-pickle-ran",)


class Gets:
    def __reduce__(self):
        return getattr, (io.BytesIO, "mro")


def memo_bomb() -> bytes:
    return pickle.PROTO + b"\x02" + pickle.EMPTY_LIST + pickle.LONG_BINPUT + struct.pack("<I", 2**31) + pickle.STOP


def nested_tuples(depth: int) -> bytes:
    return pickle.PROTO + b"\x02" + pickle.EMPTY_TUPLE + pickle.TUPLE1 * depth + pickle.STOP


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
        (memo_bomb(), "its memo jumps ahead at byte 3"),
        (nested_tuples(100_000), "a tuple of something other than integers"),
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
    with pytest.raises(UnsafePickle) as error:
        recording.load(write(tmp_path, data))
    assert message in str(error.value)
    assert not (tmp_path / "hostile-pickle-ran").exists()


def test_deep_nesting_does_no_harm(tmp_path):
    deep = pickle.PROTO + b"\x02" + pickle.EMPTY_LIST * 100_000 + pickle.APPEND * 99_999 + pickle.STOP
    with pytest.raises(RecordingError, match="is not a memory snapshot"):
        recording.load(write(tmp_path, deep))


def test_a_large_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(UnsafePickle, match=r"has 2,048\.0 MiB, more than the 1,024\.0 MiB allowed"):
        recording.load(path)


def test_the_size_limit_can_be_set(tmp_path):
    with pytest.raises(UnsafePickle, match="raise the limit with --max-file-size"):
        recording.load(SMALL, max_bytes=1000)


def test_no_such_file(tmp_path):
    with pytest.raises(UnsafePickle, match="cannot read nothing: No such file"):
        recording.load(tmp_path / "nothing")
    with pytest.raises(UnsafePickle, match="no regular file"):
        recording.load(tmp_path)


def test_fuzzed_bytes_give_a_recording_or_a_clear_error(tmp_path):
    """Truncations and flipped bytes; whatever still loads must replay or be refused, never crash."""
    rng = random.Random(3)
    whole = SMALL.read_bytes()
    path = tmp_path / "fuzzed.pickle"
    for round_ in range(250):
        data = bytearray(whole[: rng.randrange(len(whole))] if round_ % 4 == 0 else whole)
        for _ in range(rng.randrange(1, 20) if round_ % 4 else 0):
            # mostly near the start, where events are, and not in stack frames
            data[rng.randrange(min(len(data), rng.choice([200, 4000, len(data)])))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        try:
            what_if(path, ["expandable_segments:True"])
        except UserError as error:
            assert len(str(error)) < 600
            assert str(error).count("\n") <= 1


def mutate(path: str, value: object):
    def change(snapshot):
        *parents, last = path.split(".")
        target = snapshot
        for key in parents:
            target = target[int(key)] if key.isdecimal() else target[key]
        if value is KeyError:
            del target[last]
        else:
            target[int(last) if last.isdecimal() else last] = value
        return snapshot

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: [], "x is not a memory snapshot: a dict with segments and device_traces is expected"),
        (lambda s: s["segments"], "x is not a memory snapshot"),
        (mutate("device_traces", KeyError), "x is not a memory snapshot"),
        (mutate("device_traces", [[], []]), "x has no history, only a final state: call torch.cuda.memory._record_"),
        (mutate("device_traces", []), "x has no history"),
        (mutate("device_traces", {}), "x: device_traces is not a list"),
        (mutate("allocator_settings.PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync"), "only recordings of the nat"),
        (mutate("allocator_settings.PYTORCH_CUDA_ALLOC_CONF", "warp:9"), "made with settings that cannot be read: unk"),
        (mutate("allocator_settings", 3), "allocator_settings is not a dict"),
        (mutate("device_traces.0.5.action", "teleport"), "x: event 5 has the unknown action 'teleport'"),
        (mutate("device_traces.0.5.action", []), "x: event 5 has the unknown action a list of 0"),
        (mutate("device_traces.0.5", 7), "x: event 5 is not a dict"),
        (mutate("device_traces.0.5.addr", "0x1"), "x: event 5: addr is '0x1', expected a number from 0 to 2**64"),
        (mutate("device_traces.0.5.size", -1), "x: event 5: size is -1"),
        (mutate("device_traces.0.5.size", 1 << 50), "x: event 5: size is 1125899906842624, expected a number from 0"),
        (mutate("device_traces.0.5.size", True), "x: event 5: size is True"),
        (mutate("segments.0.total_size", 1), "x: segment 0: its blocks add up to"),
        (mutate("segments.0.segment_type", "huge"), "x: segment 0 has segment_type 'huge'"),
        (mutate("segments.0.segment_pool_id", 0), "x: segment 0 has segment_pool_id 0"),
        (mutate("segments.0.blocks", None), "x: segment 0: blocks is not a list"),
        (mutate("segments.0.blocks.0.state", "floating"), "x: segment 0 has a block that is not a dict with a known"),
        (mutate("segments.0.blocks.0.address", 5), "x: segment 0: its blocks do not follow one another"),
        (lambda s: s | {"segments": s["segments"] * 2}, "overlap"),
    ],
)
def test_malformed_snapshots_are_named(snapshot, change, message):
    with pytest.raises(RecordingError) as error:
        recording.check(change(snapshot), "x")
    assert message in str(error.value)


def test_events_that_do_not_lead_to_the_final_state(snapshot):
    del snapshot["device_traces"][0][-1]
    snapshot["device_traces"][0].append(snapshot["device_traces"][0][1] | {"action": "alloc", "addr": 123})
    with pytest.raises(RecordingError, match=r"the recording and its final state disagree"):
        undo(recording.check(snapshot, "x"))


def test_fuzzed_contents_give_a_recording_or_a_clear_error(snapshot):
    """The same for the plain data: values of the wrong kind or size anywhere but in stack frames."""
    rng = random.Random(4)
    odd = [
        None,
        -1,
        0,
        1,
        512,
        2**63,
        2**64,
        "x",
        "alloc",
        "segment_free",
        "segment_map",
        "oom",
        [],
        {},
        (1,),
        1.5,
        True,
    ]
    data = pickle.dumps(snapshot)
    for _ in range(400):
        changed = pickle.loads(data)
        places: list = []
        walk(changed, places)
        for container, key in rng.sample(places, 2):
            container[key] = rng.choice(odd)
        try:
            loaded = recording.check(changed, "x")
            start = undo(loaded)
            replay_as_recorded(loaded, start)
            replay_under(loaded, start, parse("expandable_segments:True"), 1 << 30)
        except UserError as error:
            assert len(str(error)) < 600


def walk(container, places: list) -> None:
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        if key != "frames":
            places.append((container, key))
            if isinstance(value, dict | list):
                walk(value, places)


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
        assert start.empty
