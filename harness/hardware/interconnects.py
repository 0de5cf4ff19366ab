"""Links between GPUs, and an estimate of how long collectives take over them: published rates, a formula with a source.

A collective of S bytes among n ranks takes latency + c S / B, with c the share that each rank has to send. That is
2 (n-1)/n of an all-reduce, (n-1)/n of an all-gather, a reduce-scatter and an all-to-all, 1 of a broadcast and a reduce
(NVIDIA/nccl-tests, doc/PERFORMANCE.md). B is what one GPU sends at most in one direction. If all ranks are in one node,
its link sets B, else the slower of link and network, with a network port for each GPU. Real collectives reach less.

Latencies are NCCL's own for its low-latency protocol (NVIDIA/nccl at 01afd20, src/graph/tuning.cc: baseLat and hwLat of
Ring and Tree, ncclTopoTuneModel). A ring takes n-1 steps, twice as many for an all-reduce, which may be a tree.
Broadcast and reduce, which NCCL computes from how its rings lie, are taken for n-1 steps too.

Not covered: reductions within NVSwitch (NVLS), which can halve an all-reduce; several rings in one direction; links
shared by several GPUs; host memory (offload).
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

GB = 1e9
US = 1e-6


@dataclass(frozen=True)
class Link:
    """A link. `bandwidth` is one GPU's in one direction, in bytes/s; `ring_s` and `tree_s` are a step's latency."""

    name: str
    meaning: str
    bandwidth: float
    ring_s: float
    tree_s: float
    between_nodes: bool
    source: str


# Latencies of a ring's step and a tree's, in microseconds.
_LATENCIES = {"nvlink": (0.47, 0.52), "pcie": (1.0, 1.0), "network": (2.7, 5.0)}
# Bytes/s in one direction of one of a unit, as data sheets give it.
_UNITS = {"gigabytes_per_s_both_ways": GB / 2, "gigabytes_per_s": GB, "gigabits_per_s": GB / 8}


def _read(entry: dict[str, Any]) -> Link:
    """Return the link of an entry of links.json."""
    ring, tree = _LATENCIES[entry["kind"]]
    (rate,) = (entry[unit] * size for unit, size in _UNITS.items() if unit in entry)
    between = entry["kind"] == "network"
    return Link(entry["name"], entry["meaning"], rate, ring * US, tree * US, between, entry["source"])


LINKS = tuple(map(_read, json.loads(Path(__file__).with_name("links.json").read_text("utf-8"))))
_BY_NAME = {link.name: link for link in LINKS}

BASE_RING_S, BASE_TREE_S = 3.6 * US, 4.4 * US  # baseLat of the low-latency protocol
MORE_BETWEEN_NODES = 1.8  # factor on a step within a node, if there are several nodes


class Collective(NamedTuple):
    """One call. `kind` is as in `SHARES`; `nbytes` is S: all that is gathered, scattered or reduced."""

    kind: str
    nbytes: int


# Share of S that each of n ranks sends.
SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all"), lambda n: (n - 1) / n),
    **dict.fromkeys(("broadcast", "reduce"), lambda n: 1.0),
}


@dataclass(frozen=True)
class Communication:
    """All collectives of a step, one after the other. `seconds` is None if a link that they need is not known, `nbytes`
    is what one rank sends, `calls` is how many there are."""

    seconds: float | None
    nbytes: int
    calls: int


def link_named(name: str) -> Link:
    """Return the link of this name. Raises KeyError if there is none."""
    return _BY_NAME[name]


def link_names(between_nodes: bool) -> list[str]:
    """Return the names of the links within a node, or of those between nodes."""
    return [link.name for link in LINKS if link.between_nodes is between_nodes]


def communication(
    collectives: Iterable[tuple[Collective, int]], ranks: int, per_node: int, link: Link | None, network: Link | None
) -> Communication | None:
    """Return what the collectives, each with its number of calls, take; None if there is no formula for one of them."""
    found = list(collectives)
    if ranks == 1:
        return Communication(0.0, 0, 0)
    nodes = math.ceil(ranks / per_node)
    needed = [link] if nodes == 1 else [network] if per_node == 1 else [link, network]
    known = [one for one in needed if one is not None]
    if any(one.kind not in SHARES for one, _ in found):
        return None
    sent = {one: SHARES[one.kind](ranks) * one.nbytes for one, _ in found}
    seconds = None
    if len(known) == len(needed):
        rate = min(one.bandwidth for one in known)
        seconds = sum(count * (_latency_s(one.kind, ranks, nodes, known) + sent[one] / rate) for one, count in found)
    nbytes = round(sum(count * sent[one] for one, count in found))
    return Communication(seconds, nbytes, sum(count for _, count in found))


def _latency_s(kind: str, ranks: int, nodes: int, known: list[Link]) -> float:
    """Return NCCL's estimate for few bytes. `known`: the link within a node and the network, each if it is used."""
    twice = 2 if kind == "all_reduce" else 1
    inner, outer = known[0], known[-1]
    within = inner.ring_s * (1 if nodes == 1 else MORE_BETWEEN_NODES)
    across = twice * (nodes - 1)
    ring = BASE_RING_S + (twice * (ranks - 1) - across) * within + across * outer.ring_s
    if kind != "all_reduce":
        return ring
    within = inner.tree_s * (1 if nodes == 1 else MORE_BETWEEN_NODES)
    tree = BASE_TREE_S + 2 * ((ranks / nodes - 1) * within + math.log2(nodes) * outer.tree_s)
    return min(ring, tree)
