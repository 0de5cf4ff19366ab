"""Recordings that somebody made to do harm: each field with each wrong value, and files that are no recording."""

import copy
import functools
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from vramsweep.harness.allocator import recording, replay, safe_unpickle
from vramsweep.harness.allocator.initial_state import undo
from vramsweep.harness.messages.errors import UserError

AT, PAGE = 1 << 40, 20 << 20
SHARED: list[Any] = functools.reduce(lambda inner, _: [inner] * 10, range(30), [0])  # written out, 10**30 values
EVIL: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1 << 47, 1 << 63, 1 << 64, 10**300, 10**400, 10**5000, 1.5, float("nan"), float("inf"),
    -float("inf"), "", "x", "9" * 5000, "../../etc/passwd", [], {}, (), [[]], [None], {"a": 1}, (1, 2), ((), ()),
    b"bytes", "\x1b[2J", SHARED, {"a": SHARED}, (SHARED, SHARED),
)  # fmt: skip


def valid() -> dict[str, Any]:
    """A segment is made; one block stays, another is freed."""
    blocks = [
        {"address": AT, "size": 2 << 20, "requested_size": 2 << 20, "state": "active_allocated", "frames": []},
        {"address": AT + (2 << 20), "size": PAGE - (2 << 20), "requested_size": 0, "state": "inactive", "frames": []},
    ]
    segment = {
        "device": 0, "address": AT, "total_size": PAGE, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "blocks": blocks, "frames": [],
    }  # fmt: skip
    acts = [
        ("segment_alloc", AT, PAGE), ("alloc", AT, 2 << 20), ("alloc", AT + (2 << 20), 3 << 20),
        ("free_requested", AT + (2 << 20), 3 << 20), ("free_completed", AT + (2 << 20), 3 << 20),
    ]  # fmt: skip
    frame = {"filename": "model.py", "line": 1, "name": "forward"}
    trace = [
        {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 7 * at, "frames": [dict(frame)]}
        for at, (action, addr, size) in enumerate(acts)
    ]
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "garbage_collection_threshold": 0.0,
        "expandable_segments": False, "roundup_power2_divisions": {str(1 << i): 0 for i in range(16)},
    }  # fmt: skip
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": settings}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(value[key], (*path, key))


def put(whole: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(whole)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def replayed(snapshot: Any) -> str | None:
    """Return what a user is told; None if it is a recording that replays."""
    try:
        known = recording.check(snapshot, "evil")
        start = undo(known)
        replay.replay_as_recorded(known, start)
        replay.replay_under(known, start, known.settings, 1 << 26)
    except UserError as error:
        return str(error)
    return None


def test_the_recording_that_the_others_are_made_of_is_one() -> None:
    assert replayed(valid()) is None
    assert len(list(places(valid()))) > 100


@pytest.mark.timeout(120)
def test_every_value_of_every_field_gives_a_replay_or_two_lines() -> None:
    refused = 0
    for path in places(valid()):
        for value in EVIL:
            said = replayed(put(valid(), path, value))
            refused += said is not None
            assert said is None or (len(said) < 700 and said.count("\n") <= 1), (path, value)
    assert refused > 500


@pytest.mark.parametrize("path", [("device_traces", 0, 1, "size"), ("segments", 0, "total_size")])
@pytest.mark.parametrize("value", [-1, 1 << 47, 1.0, float("nan"), "1", None, True])
def test_a_size_that_is_none_is_named(path: tuple[Any, ...], value: Any) -> None:
    said = replayed(put(valid(), path, value))
    assert said is not None and f"{path[-1]} is {value!r}" in said


@pytest.mark.timeout(20)
@pytest.mark.parametrize("path", [
    ("device_traces", 0, 1, "action"), ("device_traces", 0, 1, "size"), ("segments", 0, "segment_type"),
    ("segments", 0, "segment_pool_id"), ("allocator_settings", "max_split_size"),
])  # fmt: skip
def test_a_small_file_that_stands_for_more_than_memory_holds_is_refused_by_type_and_length(path: Any) -> None:
    whole = put(valid(), path, SHARED)
    del whole["allocator_settings"]["roundup_power2_divisions"]
    data = pickle.dumps(whole, 2)
    assert len(data) < 2000
    said = replayed(safe_unpickle.loads(data, "evil"))
    assert said is not None and f"{path[-1].replace('action', 'unknown action')} " in said and "a list of 10" in said


@pytest.mark.timeout(20)
def test_what_many_share_is_looked_at_once() -> None:
    """Segments that hold the same blocks, requests with the same frames, keys with the same hash: a file of n bytes
    would be n**2 of work."""
    count, whole = 3000, valid()
    segment = {
        **whole["segments"][0], "total_size": 512 * count, "blocks": [{"size": 512, "state": "inactive"}] * count,
    }  # fmt: skip
    segments = [{**segment, "address": AT + 512 * count * number} for number in range(count)]
    assert "have the same list of blocks" in (replayed(whole | {"segments": segments}) or "")
    frames, at = [{"filename": "x", "line": 1, "name": "x"}] * count, range(AT, AT + 512 * 2 * count, 512)
    block = {"size": 512, "requested_size": 512, "state": "active_allocated", "frames": frames}
    segment = {**segment, "total_size": 512 * len(at), "blocks": [block] * len(at)}
    made = [{"action": "alloc", "addr": one, "size": 512, "stream": 0, "frames": frames} for one in at]
    assert replayed(whole | {"segments": [segment], "device_traces": [made]}) is None
    for key in ([n * ((1 << 61) - 1) for n in range(2000)], [(n * ((1 << 61) - 1), 0) for n in range(2000)]):
        with pytest.raises(UserError, match=r"number of 10 bytes|tuple of something"):
            safe_unpickle.loads(pickle.dumps(dict.fromkeys(key), 2), "evil")


@pytest.mark.parametrize("of", ["segments", "device_traces"])
def test_what_holds_itself_is_refused_in_no_time(of: str) -> None:
    """No pickle of a tuple that holds itself passes the scan; lists and dicts may."""
    whole = valid()
    whole[of].append(whole[of])
    whole["allocator_settings"]["self"] = whole
    data = pickle.dumps(whole, 2)
    began = time.monotonic()
    try:
        said = replayed(safe_unpickle.loads(data, "evil"))
    except UserError as error:
        said = str(error)
    assert time.monotonic() - began < 5
    assert of == "device_traces" or said is not None


def test_a_file_is_read_or_refused_whatever_it_is(tmp_path: Path, cli: Cli) -> None:
    """No byte of it runs; a pipe or a device is not waited for."""
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "count").write_bytes(b"\x80\x02\x8d" + (1 << 62).to_bytes(8, "little") + b"x.")
    (tmp_path / "frame").write_bytes(b"\x80\x04\x95" + (1 << 63).to_bytes(8, "little") + b"}.")
    (tmp_path / "global").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    (tmp_path / "persistent").write_bytes(b"\x80\x02Pid\n.")
    (tmp_path / "deep").write_bytes(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    (tmp_path / "stack").write_bytes(b"\x80\x02aaaa.")
    (tmp_path / "torn").write_bytes(pickle.dumps(valid())[:-40])
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in (*sorted(path.name for path in tmp_path.iterdir()), "/dev/zero", "/dev/tty", "a\0b"):
        told = cli.refuse("replay", tmp_path / name)
        assert told.startswith("vramsweep: ") and told.count("\n") <= 2 and "Traceback" not in told, (name, told)
    assert not (tmp_path / "ran").exists()


def test_frames_that_are_none_say_nothing(tmp_path: Path, cli: Cli) -> None:
    whole = valid()
    for value in ([{"filename": "a.py\x1b[2J\n\n", "line": -(10**15), "name": "x" * 10**6}], [[]], "text", 7, [{}]):
        for at in (1, 2):
            whole["device_traces"][0][at]["frames"] = value
        whole["segments"][0]["blocks"][0]["frames"] = value
        (tmp_path / "frames.pickle").write_bytes(pickle.dumps(whole))
        assert "\x1b" not in cli.run("replay", tmp_path / "frames.pickle").out
