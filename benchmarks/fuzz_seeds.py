"""Starting inputs of fuzz.py, small and valid, and the changes that the bytes of an input make to a recording.

The recordings are the last events of the shipped one with its final state, as a ring buffer keeps them, and one of
expandable segments made by hand. Stack frames are left out because no check reads them (peak_blocks.py does).
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator import safe_unpickle
from vramsweep.harness.rows import journal as journals

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted((ROOT / "tests" / "data" / "snapshots").glob("*.pickle"))
REFERENCE = ROOT / "results" / "reference" / "gpt2-cpu" / "journal.jsonl"
LAST = (0, 6, 20, 45)  # events kept
TEXTS = (
    "", "expandable_segments:True", "max_split_size_mb:128,garbage_collection_threshold:0.8",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", "backend:cudaMallocAsync", "roundup_power2_divisions:4",
    "large_segment_size_mb:64,max_non_split_rounding_mb:64",
    "per_process_memory_fraction:0.5,pinned_free_catch_all:True",
)  # fmt: skip
FORMULAS = (
    "64 * seq_len * micro_batch", "-(-seq_len // 8) * 16", "max(4, min(seq_len, 512)) + kept",
    "(3 * seq_len * seq_len + 7 * micro_batch) // 2", "seq_len >= 2 and not micro_batch == 1 or seq_len % 64 != 3",
)  # fmt: skip
SHARED: list[Any] = functools.reduce(lambda inner, _: [inner] * 10, range(30), [0])  # 10**30 values if written out
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2, 511, 512, 1 << 20, (10 << 20) + 1, 2 << 20, 20 << 20, (1 << 47) - 1, 1 << 47,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**100, 0.5, float("nan"), float("inf"), "", "small", "large",
    "inactive", "active_allocated", "active_pending_free", "alloc", "free_requested", "free_completed", "segment_alloc",
    "segment_free", "segment_map", "segment_unmap", "oom", "snapshot", "x" * 100, [], {}, (), (0, 1), (1 << 80, -1),
    [[]], {"a": 1}, SHARED, {"a": SHARED}, 10**400,
)  # fmt: skip


def recordings() -> Iterator[dict[str, Any]]:
    """Yield valid recordings of a few events each."""
    for path in SHIPPED:
        whole = safe_unpickle.load(path)
        for count in LAST:
            trace = [_bare(event) for event in whole["device_traces"][0]]
            kept = trace[len(trace) - count :] if count else trace[-1:]
            segments = [_bare(one) | {"blocks": [_bare(b) for b in one["blocks"]]} for one in whole["segments"]]
            settings = whole["allocator_settings"] if count == LAST[1] else {}
            yield {"segments": segments, "device_traces": [kept], "allocator_settings": settings}
    yield _expandable()


def _bare(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in ("frames", "time_us", "allocated_size")}


def _expandable() -> dict[str, Any]:
    """Return a recording of expandable segments: two pages mapped, a block made and freed."""
    page, at = 20 << 20, 1 << 40
    free = {"address": at, "size": 2 * page, "requested_size": 0, "state": "inactive"}
    segment = {"device": 0, "address": at, "total_size": 2 * page, "stream": 0, "segment_type": "large",
               "segment_pool_id": (0, 0), "is_expandable": True, "blocks": [free]}  # fmt: skip
    acts = [("segment_map", 2 * page), ("alloc", 30 << 20), ("free_requested", 30 << 20), ("free_completed", 30 << 20)]
    trace = [{"action": name, "addr": at, "size": size, "stream": 0, "time_us": 5} for name, size in acts]
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "expandable_segments": True}
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": settings}


def pickles() -> Iterator[bytes]:
    """Yield pickled recordings, by an old and a new protocol, and with each value in turn replaced by `SHARED`."""
    for one in recordings():
        yield from (pickle.dumps(one, protocol) for protocol in (2, 4))
    small = _expandable()
    for parent, key in list(_places(small)):
        kept, parent[key] = parent[key], SHARED
        yield pickle.dumps(small, 2)
        parent[key] = kept


def changes() -> Iterator[bytes]:
    """Yield inputs of `changed`: no change, and each kind of change alone."""
    yield b""
    for kind in range(5):
        yield bytes((kind, kind, 0, 40 * kind, 7 * kind))


def changed(valid: Sequence[bytes], data: bytes) -> Any:
    """Return a pickled recording, with a value replaced, left out, doubled, moved or copied for every four bytes."""
    which, edits = data[:1], data[1:]
    whole = pickle.loads(valid[which[0] % len(valid)] if which else valid[0])  # safe: our own, from `recordings`
    for at in range(0, len(edits) - 3, 4):
        kind, high, low, value = edits[at : at + 4]
        places = list(_places(whole))
        if not places:
            break
        parent, key = places[(high * 256 + low) % len(places)]
        _change(kind % 5, parent, key, value, places)
    return whole


def _places(value: Any, seen: set[int] | None = None) -> Iterator[tuple[Any, Any]]:
    """Yield each dict or list with each of its keys or indices; enter a shared one once."""
    seen = set() if seen is None else seen
    if isinstance(value, (dict, list)) and id(value) not in seen:
        seen.add(id(value))
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key], seen)


def _change(kind: int, parent: Any, key: Any, value: int, places: Sequence[tuple[Any, Any]]) -> None:
    other, its = places[value * 7 % len(places)]
    if kind == 0:
        parent[key] = copy.deepcopy(VALUES[value % len(VALUES)])  # a copy, with what it shares: later edits change it
    elif kind == 1:
        del parent[key]
    elif kind == 2 and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif kind == 3 and isinstance(parent, list):
        parent.insert(value % len(parent), parent.pop(key))
    else:
        taken = other[its]
        parent[key] = taken if not isinstance(taken, (dict, list)) else pickle.loads(pickle.dumps(taken))


def settings() -> Iterator[bytes]:
    """Yield texts of PYTORCH_CUDA_ALLOC_CONF."""
    yield from (text.encode() for text in TEXTS)


def formulas() -> Iterator[bytes]:
    """Yield formulas as runners write them."""
    yield from (text.encode() for text in FORMULAS)


def lines() -> Iterator[bytes]:
    """Yield rows of this version and the first, with a checksum and without; only the latter are read if changed."""
    yield journals.line({"schema_version": 2, "trial_id": "0", "terminal": True, "outcome": "ok"}).rstrip(b"\n")
    first = json.loads(REFERENCE.read_text().splitlines()[0])
    told = {name: value for name, value in first.items() if value is not None and name not in ("environment", "notes")}
    runner = {"name": "fsdp", "zero_stage": 3, "world_size": 2, "offload_param": True, "options": {"a": {"b": 1}}}
    cards = {"gpu_name": "NVIDIA H100 80GB HBM3", "precision": "bf16", "peak_flops": 1e15, "mfu": 0.5, "hfu": None}
    ran_out = {"outcome": "oom", "phase": "step 7", "zero_stage": 2, "runner": "fsdp", "optimizer": "adamw"}
    trial = {**told["trial"], "runner": runner, "optimizer": "adamw", "device": {"name": "cuda"}}
    for row in (told, {"schema_version": 1, "trial_id": "0", "trial": trial, **cards, **ran_out}):
        yield json.dumps(row, separators=(",", ":")).encode()
    yield b'{"schema_version":2,"trial_id":"0","attempt":0,"terminal":true,"outcome":"invalid","reason":"\\ud800"}'
