"""A snapshot of a simulated allocator, in the format of `torch.cuda.memory._dump_snapshot`, for viewers of recordings.

Nothing in it is measured, so each event and stack says what made it. Times are unknown, so `time_us` counts events.
"""

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator.blocks import Block, round_request
from vramsweep.harness.allocator.config import AllocatorConfig, to_settings
from vramsweep.harness.allocator.simulator import OutOfMemory, Simulator
from vramsweep.harness.files import outputs

PROTOCOL = 4  # the newest that torch's viewer (MemoryViz.js) reads
Snapshot = dict[str, Any]


class RecordingSimulator(Simulator):
    """A simulator that keeps its events. `origin` returns where a handle's request comes from, as a number.

    A free has the origin of its request, a segment event that of the request in progress, if any.
    Raises UserError for settings that cannot be simulated.
    """

    __slots__ = ("_current", "_origin", "_origins", "events")

    def __init__(
        self, config: AllocatorConfig, memory_limit: int | None, origin: Callable[[Any], int], **options: Any
    ) -> None:
        super().__init__(config, memory_limit, lambda e: self._note(e[0], e[2], e[3], addr=e[1]), **options)
        self.events: list[dict[str, Any]] = []
        self._origin = origin
        self._origins: dict[Hashable, int] = {}
        self._current: int | None = None

    def malloc(self, handle: Hashable, size: int, stream: int = 0, private: int = 0) -> None:
        """Allocate as `Simulator.malloc` does, and keep the event."""
        self._origins[handle] = self._current = self._origin(handle)
        try:
            super().malloc(handle, size, stream, private)
        except OutOfMemory:
            free = (self.limit or 0) - self.reserved
            self._note("oom", round_request(size, self.config.roundup_power2_divisions), stream, device_free=free)
            raise
        if size:  # else torch records nothing
            self._note("alloc", size, stream, addr=self.live[handle].addr)
        self._current = None

    def free_requested(self, handle: Hashable) -> None:
        """Free as `Simulator.free_requested` does, and keep the event."""
        super().free_requested(handle)
        self._note_free("free_requested", handle)

    def free_completed(self, handle: Hashable) -> None:
        """Return a block as `Simulator.free_completed` does, and keep the event."""
        self._note_free("free_completed", handle)  # before its address changes, if it is merged
        super().free_completed(handle)

    def free(self, handle: Hashable) -> None:
        """Free a block that no other stream uses, and keep both events. Raises ValueError if it is not live."""
        self.free_requested(handle)
        self.free_completed(handle)

    def snapshot(self, device: int = 0) -> Snapshot:
        """Return the snapshot after the last event, in bytes, with an `origin` where torch has frames."""
        used: dict[Block, tuple[str, Any]] = {block: ("active_allocated", key) for key, block in self.live.items()}
        used |= {block: ("active_pending_free", key) for key, block in self.pending.items()}
        every = [*used, *(block for pool in self._pools.values() for _, _, block in pool.free)]
        firsts = [b for b in every if b.size and (b.prev is None or not b.prev.mapped)]
        segments = [self._segment(block, device, used) for block in sorted(firsts, key=lambda b: b.addr)]
        traces = [*([] for _ in range(device)), self.events]
        return {"segments": segments, "device_traces": traces, "allocator_settings": to_settings(self.config)}

    def _segment(self, first: Block, device: int, used: Mapping[Block, tuple[str, Any]]) -> dict[str, Any]:
        """Return the segment, or the run of mapped pages, that begins with this block."""
        blocks: list[dict[str, Any]] = []
        block: Block | None = first
        while block is not None and block.mapped:
            state, key = used.get(block, ("inactive", None))
            about = {"address": block.addr, "size": block.size, "state": state, "origin": self._origins.get(key)}
            blocks.append({**about, "requested_size": block.requested if key is not None else block.size})
            block = block.next

        def total(state: str, size: str = "size") -> int:
            return sum(one[size] for one in blocks if one["state"].startswith(state))

        pool = first.pool
        place = {"device": device, "address": first.addr, "stream": pool.stream, "is_expandable": first.expandable}
        kind = {"segment_type": "small" if pool.small else "large", "segment_pool_id": (0, pool.private)}
        sizes = {"total_size": total(""), "allocated_size": total("active_allocated"), "active_size": total("active")}
        sizes["requested_size"] = total("active", "requested_size")
        return {**place, **kind, **sizes, "origin": None, "blocks": blocks}

    def _note_free(self, action: str, handle: Hashable) -> None:
        block = self.pending.get(handle)
        if block is not None and block.size:
            self._note(action, block.requested, block.pool.stream, addr=block.addr, origin=self._origins[handle])

    def _note(self, action: str, size: int, stream: int, **about: Any) -> None:
        event = {"action": action, "size": size, "stream": stream, "origin": self._current, **about}
        self.events.append({**event, "time_us": len(self.events) + 1})


def write_snapshot(
    path: Path, snapshot: Snapshot, origins: Callable[[int], tuple[Any, str | None]], made: str, **about: Any
) -> None:
    """Write a snapshot that is `made` in this way, with more `about` it. `origins` returns frames and a category.

    Viewers color by category, if it is not None. Raises UserError if the file cannot be written.
    """
    found: dict[int | None, tuple[Any, str | None]] = {None: ([], None)}
    marked: dict[int, list[Any]] = {}  # by id of the frames, because requests share them
    mark = {"filename": "vramsweep", "line": 0, "name": made}
    for entry in (
        *(one for segment in snapshot["segments"] for one in (segment, *segment["blocks"])),
        *(event for trace in snapshot["device_traces"] for event in trace),
    ):
        if (origin := entry.pop("origin")) not in found:
            found[origin] = origins(origin)
        frames, category = found[origin]
        stack = frames if isinstance(frames, list) else []
        entry["frames"] = marked.get(id(frames)) or marked.setdefault(id(frames), [*stack, mark])
        if "action" in entry:
            entry["user_metadata"] = made
            if category is not None:  # torch's viewer fails unless an event has "unknown", and segments have none
                entry["category"] = "unknown" if entry["action"].startswith("segment") else category
        elif "blocks" in entry:
            entry["segment_pool_id"] = tuple(entry["segment_pool_id"])  # a list after JSON
    content = pickle.dumps(snapshot | {"external_annotations": [], "vramsweep": {"made": made, **about}}, PROTOCOL)
    outputs.write(path, lambda place: place.write_bytes(content))


def frames_of(maker: Sequence[str]) -> list[dict[str, Any]]:
    """Return a trace's maker (module, operator, source line if known) as frames: the operator, then its modules."""
    module, operator, *more = maker
    file, _, line = (more[0] if more else "").rpartition(":")
    parts = list(accumulate(filter(None, module.split(".")), "{}.{}".format))
    modules = [{"filename": "module", "line": 0, "name": part} for part in reversed(parts)]
    return [{"filename": file or "operator", "line": int(line) if line.isdigit() else 0, "name": operator}, *modules]
