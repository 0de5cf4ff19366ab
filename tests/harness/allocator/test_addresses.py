"""The model of cudaMalloc's addresses beside those that an H100's and an H200's driver gave to trials (their recordings
from the first allocation on; results/reference)."""

import json
import pickle
import zipfile

import pytest
from conftest import ROOT

from vramsweep.harness.allocator.addresses import CHUNK, FIRST, Addresses
from vramsweep.harness.allocator.config import MIB, AllocatorConfig
from vramsweep.harness.allocator.simulator import Simulator

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
