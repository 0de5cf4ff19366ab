"""The simulator: invariants on random streams, agreement with the slow reference, PyTorch's rules, and addresses.

Addresses are compared with those that the drivers of an H100 and an H200 gave (results/reference).
"""

import itertools
import json
import pickle
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
from allocator_reference import Reference
from conftest import ROOT, parametrized, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramsweep.harness.allocator.address_space import CHUNK, FIRST, Addresses
from vramsweep.harness.allocator.blocks import Block
from vramsweep.harness.allocator.config import MIB, AllocatorConfig, parse
from vramsweep.harness.allocator.simulator import OutOfMemory, Piece, SegmentEvent, Simulator
from vramsweep.harness.allocator.snapshot import RecordingSimulator
from vramsweep.harness.messages.errors import UserError

pytestmark = pytest.mark.deterministic

COUNTERS = ("allocated", "active", "requested", "reserved", "inactive_split")
SIZES = st.one_of(
    st.integers(1, 4096),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 20 * MIB, 41 * MIB, 100 * MIB]),
    st.integers(1, 60 * MIB),
)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.sampled_from(["free", "request", "complete"]), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    min_size=25,
    max_size=100,
)
CONFIGS = st.builds(
    lambda *parts: ",".join(p for p in parts if p),
    st.sampled_from(["", "expandable_segments:True"]),
    st.sampled_from(["", "", "max_split_size_mb:20", "max_split_size_mb:40,max_non_split_rounding_mb:60"]),
    st.sampled_from(["", "", "roundup_power2_divisions:4", "roundup_power2_divisions:[4:2,16:8,>:2]"]),
    st.sampled_from(["", "", "garbage_collection_threshold:0.5"]),
    st.sampled_from(["", "", "large_segment_size_mb:12"]),
)
LIMITS = st.sampled_from([None, None, 60 * MIB, 150 * MIB, 400 * MIB])


class Driver:
    """Turns drawn operations into calls that make sense, for any number of allocators at once."""

    def __init__(self, *allocators) -> None:
        self.allocators = allocators
        self.live: list[int] = []
        self.pending: list[int] = []
        self.count = 0

    def run(self, operations) -> Iterator[bool]:
        """Yields after every operation whether a request was refused."""
        for kind, number, stream in operations:
            refused = False
            if kind == "malloc":
                self.count += 1
                outcomes = [self._try(a, number, stream) for a in self.allocators]
                assert len(set(outcomes)) == 1
                refused = not outcomes[0]
                if refused:  # the cache was given back, and with it everything that waited
                    self.pending.clear()
                else:
                    self.live.append(self.count)
            elif kind == "empty":
                for a in self.allocators:
                    a.empty_cache()
                self.pending.clear()
            elif kind == "complete" and self.pending:
                handle = self.pending.pop(number % len(self.pending))
                for a in self.allocators:
                    a.free_completed(handle)
            elif kind in ("free", "request") and self.live:
                handle = self.live.pop(number % len(self.live))
                for a in self.allocators:
                    a.free_requested(handle)
                    if kind == "free":
                        a.free_completed(handle)
                if kind == "request":
                    self.pending.append(handle)
            yield refused

    def _try(self, allocator, size: int, stream: int) -> bool:
        try:
            allocator.malloc(self.count, size, stream)
        except OutOfMemory:
            return False
        return True


def all_blocks(simulator: Simulator) -> list[Block]:
    """Every block, by following the links from those in use and in the pools, each segment in address order."""
    known = [*simulator.live.values(), *simulator.pending.values()]
    for pool in simulator._pools.values():
        known += [b for _, _, b in pool.free] + [b for _, b in pool.unmapped]
    heads: dict[int, Block] = {}
    for block in known:
        while block.prev is not None:
            block = block.prev
        heads[id(block)] = block
    found = []
    for head in sorted(heads.values(), key=lambda b: b.addr):
        block: Block | None = head
        while block is not None:
            found.append(block)
            assert block.next is None or (block.next.prev is block and block.next.addr == block.addr + block.size)
            block = block.next
    assert {id(b) for b in known} == {id(b) for b in found}
    return found


def check_invariants(simulator: Simulator) -> None:
    blocks = all_blocks(simulator)
    for left, right in itertools.pairwise(blocks):
        assert left.addr + left.size <= right.addr, "blocks overlap"
        touching = left.next is right
        assert not (touching and left.free and right.free and left.mapped == right.mapped), "merging is not complete"
    mapped = [b for b in blocks if b.mapped]
    live, pending = simulator.live.values(), simulator.pending.values()
    assert simulator.reserved == sum(b.size for b in mapped)
    assert simulator.allocated == sum(b.size for b in live)
    assert simulator.active == sum(b.size for b in (*live, *pending))
    assert simulator.requested == sum(b.requested for b in (*live, *pending))
    assert simulator.inactive_split == sum(b.size for b in mapped if b.free and b.split and not b.expandable)
    assert simulator.reserved >= simulator.active >= simulator.allocated
    assert all(b.size >= b.requested for b in (*live, *pending))
    for pool in simulator._pools.values():
        assert [(s, a) for s, a, _ in pool.free] == sorted((b.size, b.addr) for _, _, b in pool.free)
        assert all(b.free and b.mapped for _, _, b in pool.free)
    for name in COUNTERS:
        assert getattr(simulator, f"peak_{name}") >= getattr(simulator, name)
    if simulator.limit is not None and not simulator._expandable:
        assert simulator.reserved <= simulator.limit


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS, CONFIGS, LIMITS)
def test_invariants_hold_and_everything_returns(operations, config, limit):
    simulator = Simulator(parse(config), limit)
    driver = Driver(simulator)
    for _ in driver.run(operations):
        check_invariants(simulator)
    for handle in list(simulator.live):
        simulator.free(handle)
    simulator.empty_cache()
    check_invariants(simulator)
    assert [getattr(simulator, name) for name in COUNTERS] == [0] * 5
    assert simulator.segments == 0
    assert all_blocks(simulator) == []


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS, CONFIGS, LIMITS)
def test_agrees_with_the_slow_reference(operations, config, limit):
    events: list[SegmentEvent] = []
    fast, slow = Simulator(parse(config), limit, events.append), Reference(parse(config), limit)
    driver = Driver(fast, slow)
    for _ in driver.run(operations):
        assert events == slow.events
        assert {name: getattr(fast, name) for name in COUNTERS} == slow.counts()
        assert {h: b.addr for h, b in fast.live.items()} == {c.handle: c.addr for _, c in slow.cells("live")}
        assert (fast.num_alloc_retries, fast.num_ooms) == (slow.retries, slow.ooms)
    assert {name: getattr(fast, f"peak_{name}") for name in COUNTERS} == slow.peaks


@settings(max_examples=40, deadline=None)
@given(OPERATIONS, CONFIGS, LIMITS)
def test_releasable_foretells_empty_cache(operations, config, limit):
    events: list[SegmentEvent] = []
    simulator = Simulator(parse(config), limit, events.append)
    for _ in Driver(simulator).run(operations):
        pass
    for handle in list(simulator.pending):
        simulator.free_completed(handle)
    foretold = simulator.releasable()
    events.clear()
    simulator.empty_cache()
    assert events == foretold


def made(config: str, *sizes: int, limit: int | None = None) -> tuple[Simulator, list[SegmentEvent]]:
    events: list[SegmentEvent] = []
    simulator = Simulator(parse(config), limit, events.append)
    for handle, size in enumerate(sizes):
        simulator.malloc(handle, size)
    return simulator, events


@pytest.mark.parametrize(
    ("size", "segment"), [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_segment_sizes(size, segment):
    _, events = made("", size)
    assert [(kind, length) for kind, _, length, _ in events] == [("segment_alloc", segment * MIB)]


def test_a_large_remainder_of_a_mebibyte_is_not_split_off():
    simulator, _ = made("", 19 * MIB)  # a 20 MiB segment
    assert (simulator.allocated, simulator.inactive_split) == (20 * MIB, 0)
    simulator, _ = made("", 5 * MIB)
    assert (simulator.allocated, simulator.inactive_split) == (5 * MIB, 15 * MIB)


def test_best_fit_prefers_the_lowest_address_among_equals():
    simulator, _ = made("", 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB, 2 * MIB)
    places = [simulator.live[h].addr for h in range(5)]
    simulator.free(3)
    simulator.free(1)
    simulator.malloc("again", 2 * MIB)
    assert simulator.live["again"].addr == places[1]


def test_streams_do_not_share_blocks():
    simulator, events = made("", 2 * MIB)
    simulator.free(0)
    simulator.malloc(1, 2 * MIB, stream=7)
    assert len(events) == 2


def test_a_pending_free_is_active_but_not_allocated_and_not_reused():
    simulator, events = made("", 2 * MIB)
    simulator.free_requested(0)
    assert (simulator.allocated, simulator.active, simulator.requested) == (0, 2 * MIB, 2 * MIB)
    for handle in range(1, 11):
        simulator.malloc(handle, 2 * MIB)
    assert len(events) == 2
    simulator.free_completed(0)
    assert simulator.active == simulator.allocated


def test_retry_then_out_of_memory_are_counted():
    simulator, events = made("", 30 * MIB, limit=50 * MIB)
    simulator.free(0)
    simulator.malloc(1, 40 * MIB)
    assert [kind for kind, *_ in events] == ["segment_alloc", "segment_free", "segment_alloc"]
    assert (simulator.num_alloc_retries, simulator.num_ooms) == (1, 0)
    with pytest.raises(OutOfMemory):
        simulator.malloc(2, 40 * MIB)
    assert (simulator.num_alloc_retries, simulator.num_ooms) == (2, 1)
    assert 2 not in simulator.live


def test_max_split_frees_just_enough_before_a_retry():
    simulator, events = made("max_split_size_mb:20", 30 * MIB, 60 * MIB, 24 * MIB, limit=130 * MIB)
    for handle in range(3):
        simulator.free(handle)
    simulator.malloc("large", 100 * MIB)
    assert [length for kind, _, length, _ in events if kind == "segment_free"] == [60 * MIB, 30 * MIB, 24 * MIB]
    assert simulator.num_alloc_retries == 0


@pytest.mark.parametrize(("request_", "reused"), [(19 * MIB, False), (40 * MIB, False), (41 * MIB, True)])
def test_an_oversize_block_serves_only_what_nearly_fills_it(request_, reused):
    """Not less than max_split_size, and not 20 MiB or more below the block's size (max_non_split_rounding)."""
    simulator, events = made("max_split_size_mb:20", 60 * MIB)
    simulator.free(0)
    simulator.malloc("next", request_)
    assert (len(events) == 1) is reused
    assert simulator.allocated == (60 * MIB if reused else 20 * MIB if request_ < 20 * MIB else request_)


def test_garbage_collection_needs_a_limit_and_frees_the_oldest():
    sizes = (30 * MIB, 40 * MIB, 50 * MIB)
    simulator, events = made("garbage_collection_threshold:0.5", *sizes, limit=200 * MIB)
    for handle in range(3):
        simulator.free(handle)
        simulator.malloc(f"small {handle}", 2 * MIB)  # its own segment: time passes for the others
    simulator.malloc("large", 60 * MIB)
    assert [length for kind, _, length, _ in events if kind == "segment_free"]
    unlimited, events = made("garbage_collection_threshold:0.5", *sizes)
    for handle in range(3):
        unlimited.free(handle)
    unlimited.malloc("large", 60 * MIB)
    assert not [e for e in events if e[0] == "segment_free"]


def test_expandable_maps_pages_and_reuses_a_grown_range():
    simulator, events = made("expandable_segments:True", 30 * MIB)
    assert [(kind, length) for kind, _, length, _ in events] == [("segment_map", 40 * MIB)]
    simulator.free(0)
    simulator.malloc(1, 50 * MIB)  # the 40 MiB there and one page more
    assert events[-1][2] == 20 * MIB
    assert (simulator.segments, simulator.inactive_split, simulator.reserved) == (0, 0, 60 * MIB)
    simulator.free(1)
    simulator.empty_cache()
    assert events[-1] == ("segment_unmap", events[0][1], 60 * MIB, 0)


def test_with_the_setting_off_expandable_blocks_are_left_alone():
    simulator, events = made("")
    simulator.adopt(0, 0, False, True, [Piece(1 << 56, 40 * MIB, "free"), Piece((1 << 56) + 40 * MIB, MIB, "unmapped")])
    simulator.malloc("new", 30 * MIB)
    assert [kind for kind, *_ in events] == ["segment_alloc"]


def test_reserved_but_unallocated_is_taken_at_one_moment():
    simulator, _ = made("", 40 * MIB, 30 * MIB)
    simulator.free(0)
    simulator.malloc("again", 20 * MIB)
    stats = simulator.stats()
    assert stats.peak_reserved - stats.allocated_at_peak == 0  # at 70 MiB everything was in use
    assert stats.peak_allocated == 70 * MIB


@parametrized("allocators_not_simulated")
def test_what_cannot_be_simulated_is_refused(config, message):
    with pytest.raises(UserError, match=message):
        Simulator(parse(config))


def test_memory_fraction_scales_the_limit():
    assert Simulator(parse("per_process_memory_fraction:0.5"), 100 * MIB).limit == 50 * MIB


def test_handles_are_checked():
    simulator, _ = made("", 512)
    assert "already allocated" in refusal(ValueError, simulator.malloc, 0, 512)
    assert "not allocated" in refusal(ValueError, simulator.free, 1)


def test_nothing_is_no_block() -> None:
    simulator, events = made("", 2 * MIB)
    before = simulator.stats()
    simulator.malloc("empty", 0)
    simulator.free("empty")
    simulator.malloc("pending", 0)
    simulator.free_requested("pending")
    simulator.free_completed("pending")
    assert simulator.stats() == before and len(events) == 1


class Recorder(RecordingSimulator):
    """A simulator that writes down a trace as PyTorch does; `simulator` and `trace` are what tests read."""

    def __init__(self, config: str, limit: int | None = None) -> None:
        super().__init__(parse(config), limit, lambda _handle: 0)
        self.simulator, self.trace = self, self.events

    def snapshot(self, keep: int | None = None) -> dict[str, Any]:
        """The final state with the last `keep` events, as a ring buffer would have them."""
        found = super().snapshot()
        return found | {"device_traces": [self.trace if keep is None else self.trace[len(self.trace) - keep :]]}


def record(operations: Any, config: str = "", limit: int | None = None) -> Recorder:
    """Run drawn operations (see test_allocator_simulator) under a recorder; out of memory is noted and survived."""
    recorder = Recorder(config, limit)
    for _ in Driver(recorder).run(operations):
        pass
    return recorder


pytestmark = pytest.mark.deterministic

FOLDERS = [ROOT / "results" / "reference" / name for name in ("h100-80gb", "h200-141gb")]
LARGE = 2 * MIB  # segments above it are the large pool's, whose blocks stand for one another


def trials() -> list[tuple[str, str]]:
    found = []
    for folder in FOLDERS:
        misses = json.loads((folder / "summary.json").read_text())["parts"]["misses"]
        found += [(folder.name, name) for name, one in misses.items() if isinstance(one, dict)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("card", "name"), trials())
def test_which_of_two_segments_is_the_lower_is_as_the_driver_had_it(card: str, name: str) -> None:
    """This holds for nearly all pairs of one pool; the driver decides what lies between them."""
    with zipfile.ZipFile(ROOT / "results" / "reference" / card / "recordings.zip") as archive:
        events = pickle.loads(archive.read(f"miss-{name}.pickle"))["device_traces"][0]
    model = Addresses()
    both: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for event in events:
        if event["action"] == "segment_alloc":
            both[event["size"] > LARGE].append((event["addr"], model.take(event["size"])))
    pairs = [(a, b) for pool in both.values() for n, a in enumerate(pool) for b in pool[:n]]
    alike = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    assert len(pairs) > 3000 and alike / len(pairs) > 0.96


def test_a_chunk_is_filled_from_its_lowest_place_before_the_next_is_begun() -> None:
    model = Addresses()
    first = model.take(20 * MIB)
    assert first == FIRST - CHUNK
    assert model.take(12 * MIB) == first + 20 * MIB
    assert model.take(74 * MIB) == first - 96 * MIB
    assert model.take(1 * MIB) == first - 22 * MIB  # in steps of 2 MiB
    assert model.take(20 * MIB) == first - 20 * MIB


def test_a_place_that_is_given_back_is_taken_again_with_its_neighbours() -> None:
    model = Addresses()
    places = [model.take(8 * MIB) for _ in range(4)]
    assert places == [FIRST - CHUNK + n * 8 * MIB for n in range(4)]
    for n in (0, 2, 1):
        model.give(places[n], 8 * MIB)
    assert model.take(24 * MIB) == places[0]
    assert model.take(2 * MIB) == places[0] - CHUNK


def test_what_was_there_before_is_left_alone() -> None:
    model = Addresses()
    model.taken(FIRST - 100 * MIB)
    assert model.take(32 * MIB) == FIRST - 132 * MIB


def test_a_place_that_was_supplied_is_not_given_to_another() -> None:
    """The driver may put a later segment there, whose address is supplied too."""
    supplied = [FIRST - 300 * MIB, None, FIRST - 300 * MIB]
    simulator = Simulator(AllocatorConfig(), next_address=lambda kind, size: supplied.pop(0))
    simulator.malloc("given", 20 * MIB)
    simulator.free("given")
    simulator.empty_cache()
    simulator.malloc("ours", 20 * MIB)
    simulator.malloc("given again", 20 * MIB)
    assert simulator.live["ours"].addr < FIRST - 300 * MIB == simulator.live["given again"].addr
