"""When a block that another stream still uses comes back to the allocator: how far the host runs ahead of the card.

`tensor.record_stream(s)` makes the allocator record an event on stream s when the tensor is freed; until that event has
passed the block is active, but not allocated, and cannot be reused (c10/cuda/CUDACachingAllocator.cpp, insert_events
and process_events). DeepSpeed's ZeRO-3 does so with every weight it has gathered and every gradient it has reduced.
How many wait depends on how far the host is ahead, which `Lag` follows through the trace's notes with a clock: the host
spends `HOST_S` on each operator and `HOOK_S` on each of DeepSpeed's hooks of a module, the card the time of the
kernel's roofline at `EFFICIENCY`; the host waits where it asks for a value, where it waits for an event, and while
`QUEUE` commands of one stream are not done.

Peak allocated does not depend on any of it, and is what peak active comes down to where the card keeps up.

Not covered: collectives that wait for other ranks; NCCL's kernels slowing down those beside them; the first steps, in
which cudaMalloc waits for the card.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque

from vramsweep.harness.gpus import Gpu
from vramsweep.harness.roofline import LAUNCH_S, Work, peaks
from vramsweep.runners.trace import Trace

KINDS = {
    "kernel": "stream a runs works[b]",
    "wait": "what stream a gets from now on waits for what stream b has",
    "record": "event a is recorded on stream b",
    "await": "what stream a gets from now on waits for event b",
    "sync": "the host waits for event a",
    "join": "the host waits for stream a",
    "use": "storage a is used by stream b",
    "hook": "the host runs one of DeepSpeed's hooks",
}
# Plain assumptions, the same for every card and host. HOST_S and HOOK_S: Llama-3-8B under ZeRO-3 at length 1, which the
# host paces, took 0.67 s a step (as published); its 5,160 operators and 1,713 hooks account for 0.48 s. They and
# EFFICIENCY were chosen by time, but with that run's memory in view.
HOST_S = 10e-6
HOOK_S = 250e-6
EFFICIENCY = 0.7  # of the roofline's peaks
LINK_BYTES_S = 200e9  # of a collective
# CUDA holds some 1,024 commands of a stream before a launch blocks. That is not documented, and an operator can be more
# than one command. As counted here (launches, events recorded and waited for) the depth is what one published reading
# says: Llama-3-8B under ZeRO-3 with checkpointing at batch 12.
QUEUE = 640


class Lag:
    """Follows a trace; `advance` before each event, in order."""

    def __init__(self, trace: Trace, card: Gpu, tf32: bool) -> None:
        self._notes, self._next = trace.notes, 0
        rates = peaks(card, tf32)
        self._seconds = [_seconds(work, card, rates.get(work.kind)) for work in trace.works]
        self._launches = [max(1, work.launches) for work in trace.works]
        self._now = 0.0
        self._done: dict[int, float] = defaultdict(float)  # by stream: when all it has been given is done
        self._queues: dict[int, deque[float]] = defaultdict(deque)  # by stream: when each command is done
        self._events: dict[int, float] = {}
        self._users: dict[int, set[int]] = {}
        self._waiting: list[tuple[float, int]] = []  # a heap of freed storages, by when they are free

    def advance(self, index: int) -> None:
        """Go through what happens before event `index`."""
        notes = self._notes
        while self._next < len(notes) and notes[self._next][0] <= index:
            _, kind, a, b = notes[self._next]
            self._next += 1
            if kind == "kernel":
                self._now += HOST_S
                self._issue(a, self._seconds[b], self._launches[b])
            elif kind == "use":
                self._users.setdefault(a, set()).add(b)
            elif kind == "hook":
                self._now += HOOK_S
            elif kind == "wait":
                self._issue(b)
                self._issue(a)
                self._done[a] = max(self._done[a], self._done[b])
            elif kind == "record":
                self._issue(b)
                self._events[a] = self._done[b]
            elif kind == "await":
                self._issue(a)
                self._done[a] = max(self._done[a], self._events.get(b, 0.0))
            else:
                self._now = max(self._now, self._events.get(a, 0.0) if kind == "sync" else self._done[a])

    def freed(self, number: int) -> bool:
        """The host frees a storage: whether other streams still use it."""
        users = self._users.pop(number, None)
        if users is None:
            return False
        for stream in users:
            self._issue(stream)
        heapq.heappush(self._waiting, (max(self._done[stream] for stream in users), number))
        return True

    def returned(self) -> list[int]:
        """Storages whose users are done by now, since the last call; the allocator looks when asked for memory."""
        found = []
        while self._waiting and self._waiting[0][0] <= self._now:
            found.append(heapq.heappop(self._waiting)[1])
        return found

    def _issue(self, stream: int, seconds: float = 0.0, count: int = 1) -> None:
        """Give `count` commands of `seconds` in all to a stream; the host waits while its queue is full."""
        queue = self._queues[stream]
        for _ in range(count):
            while queue and queue[0] <= self._now:
                queue.popleft()
            if len(queue) >= QUEUE:
                self._now = queue.popleft()
            self._done[stream] = max(self._done[stream], self._now) + seconds / count
            queue.append(self._done[stream])


def _seconds(work: Work, card: Gpu, peak: float | None) -> float:
    """How long a kernel takes; what has an unknown peak takes as long as its memory traffic."""
    if work.kind == "link":
        return work.nbytes / LINK_BYTES_S
    arithmetic = work.flops / peak if peak else 0.0
    return max(arithmetic / EFFICIENCY, work.nbytes / card.bandwidth / EFFICIENCY, work.launches * LAUNCH_S)
