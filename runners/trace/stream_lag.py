"""Blocks that another stream still uses when they are freed: how long the allocator may have to keep them.

`tensor.record_stream(s)` makes the allocator record an event on stream s when the tensor is freed. Until that event has
passed, the block is active, though no longer allocated, and cannot be reused (c10/cuda/CUDACachingAllocator.cpp,
insert_events and process_events). DeepSpeed's ZeRO-3 does so with every gathered weight and every reduced gradient.

The number of waiting blocks depends on how far the host runs ahead of the GPU, which no trace shows. Two bounds need no
clock. Lower: the GPU keeps up, and every block comes back at once. Upper: a block comes back when the host has waited
for what uses it. `Ahead` computes the upper bound from the trace's notes, by what happens before what. The host is
taken to wait for the GPU at the end of each step, as a loop does that reads its loss. A loop that never waits has no
bound but CUDA's queue of launches.

Such blocks cause no OOM: before it fails, the allocator waits for all of them (alloc_block, release_cached_blocks).
"""

import json
from collections.abc import Sequence
from pathlib import Path

# What each kind of note says of its numbers a and b.
KINDS: dict[str, str] = json.loads(Path(__file__).with_name("note_kinds.json").read_text("utf-8"))
Note = tuple[int, str, int, int]  # events of the trace before it, one of KINDS, and its two numbers
Times = dict[int, int]  # by stream: all its work from before this time is done


class Ahead:
    """A host that waits only where it must. Call `advance` and `freed` with the trace's events, in order."""

    def __init__(self, notes: Sequence[Note]) -> None:
        self._notes, self._next = notes, 0
        self._behind: dict[int, Times] = {}  # by stream: what must be done before its next command
        self._events: dict[int, Times] = {}
        self._known: Times = {}  # what the host knows to be done
        self._news = False  # whether the host has waited since the last call of `returned`
        self._users: dict[int, set[int]] = {}
        self._waiting: dict[int, Times] = {}  # freed storages, each with what must be done first

    def advance(self, index: int) -> None:
        """Process the notes of what happens before event `index`."""
        while self._next < len(self._notes) and self._notes[self._next][0] <= index:
            _, kind, a, b = self._notes[self._next]
            self._next += 1
            if kind == "use":
                self._users.setdefault(a, set()).add(b)
            elif kind == "record":
                self._events[a] = self._all_of(b)
            elif kind == "wait":
                self._behind[a] = _later(self._behind.get(a, {}), self._all_of(b))
            elif kind == "await":
                self._behind[a] = _later(self._behind.get(a, {}), self._events.get(b, {}))
            else:
                self._known = _later(self._known, self._all_of(a) if kind == "join" else self._events.get(a, {}))
                self._news = True

    def freed(self, number: int) -> bool:
        """Free a storage; return whether other streams may still use it."""
        users = self._users.pop(number, None)
        if users is None:
            return False
        self._waiting[number] = dict.fromkeys(users, self._next + 1)  # the time of the next note
        return True

    def returned(self) -> list[int]:
        """Return storages whose users are newly known to be done; the allocator looks when memory is requested."""
        if not self._news:
            return []
        self._news = False
        done = [n for n, first in self._waiting.items() if all(self._known.get(s, -1) >= t for s, t in first.items())]
        for number in done:
            del self._waiting[number]
        return done

    def _all_of(self, stream: int) -> Times:
        """Return what is done once the stream has done all its work, including what that work waits for."""
        return _later(self._behind.get(stream, {}), {stream: self._next})


def _later(one: Times, other: Times) -> Times:
    return one | {stream: max(time, one.get(stream, time)) for stream, time in other.items()}
