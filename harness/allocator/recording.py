"""A recording of the CUDA allocator (`torch.cuda.memory._dump_snapshot`), checked and made compact.

Source of the format: `torch::cuda::_memory_snapshot_pickled`. Sizes and addresses are in bytes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator import safe_unpickle
from vramsweep.harness.allocator.config import AllocatorConfig, AllocatorConfigError, from_settings
from vramsweep.harness.allocator.simulator import Piece
from vramsweep.harness.messages.errors import UserError, describe

Event = tuple[str, int, int, int]  # action, address, size, stream; for alloc and free, the requested size
SEGMENT_ACTIONS = frozenset(("segment_alloc", "segment_free", "segment_map", "segment_unmap"))
_ACTIONS = {a: a for a in (*SEGMENT_ACTIONS, "alloc", "free_requested", "free_completed", "oom", "snapshot")}
_STATES = {
    "active_allocated": "live",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",  # its name in older releases
    "inactive": "free",
}
_MAX_NUMBER = 1 << 64
_MAX_SIZE = 1 << 47  # what a process can address
SIMULATED = "vramsweep wrote this file: it is predicted or replayed, not measured."
HOW_TO_RECORD = "call torch.cuda.memory._record_memory_history() before the steps to record and _dump_snapshot() after"


class RecordingError(UserError):
    """A file that is not a usable recording. The message says what is wrong and, if there is one, the way out."""


@dataclass(frozen=True)
class Segment:
    """One segment of the final state (a run of mapped pages when expandable), with its blocks in address order."""

    addr: int
    size: int
    stream: int
    small: bool
    private: int
    expandable: bool
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Recording:
    """The events of one device's allocator, and its final state.

    `times` are microseconds of wall time for each event, None if the recording has none. `stacks` are the frames of
    requests by event, `held` those of the final state's blocks by address. Both are unchecked, as in the file.
    `simulated` says that vramsweep wrote it (snapshot.py), so nothing in it is measured.
    """

    name: str
    device: int
    settings: AllocatorConfig
    events: list[Event]
    times: list[int] | None
    segments: tuple[Segment, ...]
    stacks: Mapping[int, Any]
    held: Mapping[int, Any]
    simulated: bool = False


def load(path: Path, device: int | None = None, max_bytes: int = safe_unpickle.DEFAULT_MAX_BYTES) -> Recording:
    """Read and check a recording; `device` is needed only if several devices have events.

    Raises RecordingError or UnsafePickle, both UserError, naming what is wrong.
    """
    return check(safe_unpickle.load(path, max_bytes), path.name, device)


def check(snapshot: Any, name: str, device: int | None = None) -> Recording:
    """Return the recording in an unpickled snapshot. Raises RecordingError on anything malformed."""
    return _of_device(snapshot, name, _device(_traces(snapshot, name), name, device))


def check_every(snapshot: Any, name: str) -> list[Recording]:
    """Return the recording of each device, also of those that have a final state only. Raises RecordingError."""
    return [_of_device(snapshot, name, device) for device in range(len(_traces(snapshot, name)))]


def _traces(snapshot: Any, name: str) -> list[Any]:
    if not isinstance(snapshot, dict) or not {"segments", "device_traces"} <= snapshot.keys():
        raise RecordingError(
            f"{name} is not a memory snapshot: a dict with segments and device_traces is expected ({HOW_TO_RECORD})"
        )
    return _list(snapshot["device_traces"], f"{name}: device_traces")


def _of_device(snapshot: Any, name: str, device: int) -> Recording:
    settings = _settings(snapshot.get("allocator_settings", {}), name)
    entries = _list(snapshot["device_traces"][device], f"{name}: device_traces[{device}]")
    events = [_event(entry, i, name) for i, entry in enumerate(entries)]
    times = [entry.get("time_us") for entry in entries]
    kept = [i for i, event in enumerate(events) if event[0] != "snapshot"]
    segments = _list(snapshot["segments"], f"{name}: segments")
    return Recording(
        name=name,
        device=device,
        settings=settings,
        events=[events[i] for i in kept],
        times=[times[i] for i in kept] if all(type(t) is int for t in times) else None,
        segments=_segments(segments, device, name),
        stacks={i: entries[old].get("frames") for i, old in enumerate(kept) if events[old][0] in ("alloc", "oom")},
        held=_frames_of_blocks(segments, device),
        simulated="vramsweep" in snapshot,
    )


def _settings(settings: Any, name: str) -> AllocatorConfig:
    if not isinstance(settings, dict):
        raise RecordingError(f"{name}: allocator_settings is not a dict")
    try:
        config = from_settings(settings)
    except AllocatorConfigError as error:
        raise RecordingError(f"{name} was made with settings that cannot be read: {error}") from None
    if config.backend != "native":
        raise RecordingError(
            f"{name} was made with backend:{config.backend}; only recordings of the native allocator can be replayed"
        )
    return config


def _device(traces: Sequence[Any], name: str, device: int | None) -> int:
    with_events = [i for i, trace in enumerate(traces) if trace]
    if not with_events:
        raise RecordingError(f"{name} has no history, only a final state: {HOW_TO_RECORD}")
    if device is None:
        if len(with_events) > 1:
            listed = ", ".join(map(str, with_events))
            raise RecordingError(f"{name} has events of devices {listed}: choose one with --device")
        return with_events[0]
    if device not in with_events:
        raise RecordingError(f"{name} has no events of device {device}, only of {', '.join(map(str, with_events))}")
    return device


def _event(entry: Any, index: int, name: str) -> Event:
    where = f"{name}: event {index}"
    if not isinstance(entry, dict):
        raise RecordingError(f"{where} is not a dict")
    action = entry.get("action")
    known = _ACTIONS.get(action) if isinstance(action, str) else None
    if known is None:
        raise RecordingError(f"{where} has the unknown action {describe(action)}: this version cannot replay it")
    addr = _read_whole(entry, "device_free" if known == "oom" else "addr", where)
    return known, addr, _read_whole(entry, "size", where), _read_whole(entry, "stream", where)


def _segments(raw: Sequence[Any], device: int, name: str) -> tuple[Segment, ...]:
    private_pools: dict[tuple[int, int], int] = {(0, 0): 0}
    segments: list[Segment] = []
    blocks = [id(one["blocks"]) for one in raw if isinstance(one, dict) and isinstance(one.get("blocks"), list)]
    if len(set(blocks)) < len(blocks):  # else a small file could stand for any number of blocks
        raise RecordingError(f"{name}: segments overlap, because two of them have the same list of blocks")
    for index, entry in enumerate(raw):
        where = f"{name}: segment {index}"
        if not isinstance(entry, dict):
            raise RecordingError(f"{where} is not a dict")
        if _read_whole(entry, "device", where) == device:
            segments.append(_segment(entry, where, private_pools))
    segments.sort(key=lambda s: s.addr)
    for left, right in itertools.pairwise(segments):
        if left.addr + left.size > right.addr:
            raise RecordingError(f"{name}: segments at {left.addr:#x} and {right.addr:#x} overlap")
    return tuple(segments)


def _segment(entry: Mapping[str, Any], where: str, private_pools: dict[tuple[int, int], int]) -> Segment:
    addr, size = _read_whole(entry, "address", where), _read_whole(entry, "total_size", where)
    kind = entry.get("segment_type")
    if kind not in ("small", "large"):
        raise RecordingError(f"{where} has segment_type {describe(kind)}, expected small or large")
    pool = entry.get("segment_pool_id", (0, 0))
    if not isinstance(pool, tuple) or [type(part) for part in pool] != [int, int]:
        raise RecordingError(f"{where} has segment_pool_id {describe(pool)}, expected two numbers")
    pieces: list[Piece] = []
    at = addr
    for raw in _list(entry.get("blocks"), f"{where}: blocks"):
        known = raw.get("state") if isinstance(raw, dict) else None
        state = _STATES.get(known) if isinstance(known, str) else None
        if state is None:
            raise RecordingError(f"{where} has a block that is not a dict with a known state")
        length = _read_whole(raw, "size", where)
        if length == 0 or raw.get("address", at) != at:
            raise RecordingError(f"{where}: its blocks are not contiguous")
        in_use = state != "free"
        requested = _read_whole(raw, "requested_size", where) if in_use and "requested_size" in raw else length
        pieces.append(Piece(at, length, state, at if in_use else None, requested if in_use else 0))  # type: ignore[arg-type]
        at += length
    if at != addr + size:
        raise RecordingError(f"{where}: its blocks add up to {at - addr} bytes, but its size is {size}")
    stream, private = _read_whole(entry, "stream", where), private_pools.setdefault(pool, len(private_pools))
    expandable = entry.get("is_expandable") is True
    return Segment(addr, size, stream, kind == "small", private, expandable, tuple(pieces))


def _frames_of_blocks(segments: Sequence[Any], device: int) -> dict[int, Any]:
    """Return the frames of all blocks of checked segments, by address."""
    found: dict[int, Any] = {}
    for segment in segments:
        if segment["device"] == device:
            at = segment["address"]
            for block in segment["blocks"]:
                found[at] = block.get("frames")
                at += block["size"]
    return found


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordingError(f"{what} is not a list")
    return value


def _read_whole(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    largest = _MAX_SIZE if key.endswith("size") else _MAX_NUMBER
    if type(value) is not int or not 0 <= value < largest:
        raise RecordingError(
            f"{where}: {key} is {describe(value)}, expected a number from 0 to 2**{largest.bit_length() - 1}"
        )
    return value
