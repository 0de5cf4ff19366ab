"""Blocks that another stream still uses: when a host that waits only where it must has them back."""

from conftest import parametrized

from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.trace.stream_lag import Note
from vramsweep.runners.trace.trace_data import Mark, Trace

MIB = 1 << 20
USE: Note = (1, "use", 0, 1)  # before the first block is freed, stream 1 uses it


def active(*notes: Note, ahead: bool = True) -> int:
    """MiB at most, of two blocks of 10 MiB, the second asked for when the first has been freed."""
    trace = Trace(
        sizes=[10 * MIB] * 2,
        streams=[0, 0],
        categories=["temporaries"] * 2,
        events=[1, -1, 2, -2],
        marks=[Mark(4, 0, "forward")],
        notes=list(notes),
    )
    found = replay(trace, AllocatorConfig(), None, ahead).peak
    assert found["allocated"] == 10 * MIB
    return found["active"] // MIB


def test_a_block_is_back_at_once_where_nobody_else_uses_it_or_the_card_keeps_up() -> None:
    assert active() == active(USE, ahead=False) == 10
    assert active(USE) == 20


@parametrized("waits_of_streams")
def test_it_is_back_when_the_host_has_waited_for_what_uses_it(waited: list[Note], kept: int) -> None:
    assert active(USE, *waited) == kept
