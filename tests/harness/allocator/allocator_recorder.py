"""Recordings made by the simulator itself, in the format of torch.cuda.memory._snapshot()."""

from typing import Any

from test_allocator_simulator import Driver, all_blocks

from vramsweep.harness.allocator.config import MIB, AllocatorConfig, parse
from vramsweep.harness.allocator.simulator import OutOfMemory, Simulator


class _NotesFrees(Simulator):
    """Also frees that a retry completes on its own are written down."""

    recorder: "Recorder"

    def free_completed(self, handle: Any) -> None:
        block = self.pending.get(handle)
        if block is not None:
            self.recorder.note("free_completed", block.addr, block.requested, block.pool.stream)
        super().free_completed(handle)


class Recorder:
    """A simulator that writes down a trace as PyTorch does."""

    def __init__(self, config: str, limit: int | None = None) -> None:
        self.simulator = _NotesFrees(parse(config), limit, lambda e: self.note(*e))
        self.simulator.recorder = self
        self.trace: list[dict[str, Any]] = []

    def note(self, action: str, addr: int, size: int, stream: int) -> None:
        key = "device_free" if action == "oom" else "addr"
        self.trace.append({"action": action, key: addr, "size": size, "stream": stream, "time_us": len(self.trace)})

    def malloc(self, handle: int, size: int, stream: int = 0) -> None:
        try:
            self.simulator.malloc(handle, size, stream)
        except OutOfMemory:
            self.note("oom", 0, size, stream)
            raise
        self.note("alloc", self.simulator.live[handle].addr, size, stream)

    def free_requested(self, handle: int) -> None:
        block = self.simulator.live[handle]
        self.note("free_requested", block.addr, block.requested, block.pool.stream)
        self.simulator.free_requested(handle)

    def free_completed(self, handle: int) -> None:
        self.simulator.free_completed(handle)

    def empty_cache(self) -> None:
        self.simulator.empty_cache()

    def snapshot(self, keep: int | None = None) -> dict[str, Any]:
        """The final state with the last `keep` events, as a ring buffer would have them."""
        live = {id(b) for b in self.simulator.live.values()}
        segments: list[dict[str, Any]] = []
        before = None
        for block in all_blocks(self.simulator):
            if not block.mapped:
                continue
            touching = before is not None and before.next is block
            if not touching:
                segments.append({
                    "device": 0, "address": block.addr, "total_size": 0, "stream": block.pool.stream, "blocks": [],
                    "segment_type": "small" if block.pool.small else "large", "segment_pool_id": (0, 0),
                    "is_expandable": block.expandable,
                })  # fmt: skip
            before = block
            state = "inactive" if block.free else "active_allocated" if id(block) in live else "active_pending_free"
            entry = {"address": block.addr, "size": block.size, "requested_size": block.requested, "state": state}
            segments[-1]["blocks"].append(entry)
            segments[-1]["total_size"] += block.size
        trace = self.trace if keep is None else self.trace[len(self.trace) - keep :]
        return {
            "segments": segments,
            "device_traces": [trace],
            "allocator_settings": settings_of(self.simulator.config),
            "external_annotations": [],
        }


def settings_of(config: AllocatorConfig) -> dict[str, Any]:
    """Return `_snapshot()["allocator_settings"]` for these settings."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.render(),
        "max_split_size": -1 if config.max_split_size_mb is None else config.max_split_size_mb * MIB,
        "garbage_collection_threshold": config.garbage_collection_threshold or 0.0,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": config.pinned_num_register_threads,
        "release_lock_on_cudamalloc": config.release_lock_on_cudamalloc,
        "pinned_use_cuda_host_register": config.pinned_use_cuda_host_register,
        "graph_capture_record_stream_reuse": config.graph_capture_record_stream_reuse,
        "roundup_power2_divisions": {str(1 << i): d for i, d in enumerate(config.roundup_power2_divisions)},
    }


def record(operations: Any, config: str = "", limit: int | None = None) -> Recorder:
    """Run drawn operations (see test_allocator_simulator) under a recorder; out of memory is noted and survived."""
    recorder = Recorder(config, limit)
    for _ in Driver(recorder).run(operations):
        pass
    return recorder
