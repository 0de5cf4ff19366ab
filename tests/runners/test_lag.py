"""Blocks that another stream still uses: when they come back."""

from __future__ import annotations

from vramsweep.harness import gpus
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.roofline import Work
from vramsweep.runners.lag import QUEUE, Lag
from vramsweep.runners.predict import replay
from vramsweep.runners.trace import Mark, Note, Trace

A100 = gpus.named("a100-80gb")
MIB = 1 << 20
SLOW = Work("half", 10**15, 0, 1)  # seconds on any card


def peaks(notes: list[Note], works: list[Work]) -> dict[str, int]:
    """Two blocks of 10 MiB, the second asked for when the first has been freed."""
    size = 10 * MIB
    trace = Trace(
        sizes=[size, size],
        streams=[0, 0],
        categories=["temporaries"] * 2,
        events=[1, -1, 2, -2],
        marks=[Mark(4, 0, "forward")],
        notes=notes,
        works=works,
    )
    return replay(trace, AllocatorConfig(), None, Lag(trace, A100, tf32=False)).peak


def test_a_block_waits_for_the_stream_that_uses_it() -> None:
    used: list[Note] = [(1, "use", 0, 1), (1, "kernel", 1, 0)]
    assert peaks([], [SLOW])["active"] == 10 * MIB
    assert peaks([(1, "kernel", 1, 0)], [SLOW])["active"] == 10 * MIB  # busy, but with something else
    found = peaks(used, [SLOW])
    assert (found["active"], found["allocated"], found["reserved"]) == (20 * MIB, 10 * MIB, 20 * MIB)


def test_the_block_is_back_when_the_host_has_waited() -> None:
    used: list[Note] = [(1, "use", 0, 1), (1, "kernel", 1, 0)]
    assert peaks([*used, (2, "join", 1, 0)], [SLOW])["active"] == 10 * MIB
    assert peaks([*used, (2, "join", 2, 0)], [SLOW])["active"] == 20 * MIB
    assert peaks([*used, (2, "wait", 2, 1), (2, "join", 2, 0)], [SLOW])["active"] == 10 * MIB
    assert peaks([*used, (1, "record", 7, 1), (2, "sync", 7, 0)], [SLOW])["active"] == 10 * MIB


def test_a_host_gets_no_further_ahead_than_the_queue_is_deep() -> None:
    used: list[Note] = [(1, "use", 0, 1), (1, "kernel", 1, 0)]
    behind: list[Note] = [(2, "kernel", 1, 1)] * (QUEUE + 10)
    assert peaks([*used, *behind], [SLOW, Work("", 0, 1, 1)])["active"] == 10 * MIB
    assert peaks([*used, *behind[:-20]], [SLOW, Work("", 0, 1, 1)])["active"] == 20 * MIB
