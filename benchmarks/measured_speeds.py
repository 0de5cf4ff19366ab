"""Speeds of a machine, from the readings of a look at its GPU (speed_readings.py).

A reading has the `kind` of a call, what it was of (`what`), and `seconds`, a list: those of a call in each batch.
`flops` (in arithmetic of `precision`), `nbytes` and `launches` are its cost by the rules of traced steps. `weight` says
how much it matters in traced sweeps.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median, stdev
from typing import Any

from vramsweep.harness.hardware.gpu_lookup import Gpu, peak_of
from vramsweep.harness.hardware.step_time import Speeds, pooled

KERNEL, HOST = "kernel", "host "  # other kinds than those of factors: a tiny kernel; calls that only the host limits


def make_speeds(readings: Iterable[Mapping[str, Any]], gpu: Gpu, source: str) -> tuple[Speeds, list[str]]:
    """Return the speeds that readings show, and the names of those without a reading, which keep the pooled value.

    A kind's value is the weighted median of its readings, without the least time of their kernels. The interval of the
    host's time is never narrower than the pooled one, and as wide as its readings vary.
    """
    pool, found, spread, readings = pooled(), defaultdict(list), [pooled().spread["host"]], list(readings)
    tiny = [(median(one["seconds"]) / one["launches"], one["weight"]) for one in readings if one["kind"] == KERNEL]
    kernel_s = _weighted_median(tiny) if tiny else pool.kernel_s
    for one in readings:
        kernel = one["kind"] in pool.factors
        if unit := _bound_seconds(one, gpu) if kernel else one["launches"]:
            seconds = max(0.0, median(one["seconds"]) - kernel * one["launches"] * kernel_s)
            found[one["kind"]].append((seconds / unit, one["weight"]))
        if one["kind"] == f"{HOST}plain" and len(one["seconds"]) > 1:
            spread.append(1.96 * stdev(map(math.log, one["seconds"])))
    known = {kind: _weighted_median(each) for kind, each in found.items()}
    factors = {kind: known.get(kind, factor) for kind, factor in pool.factors.items()}
    host = {name: known.get(HOST + name, seconds) for name, seconds in pool.host_s.items()}
    both = {**pool.spread, "host": max(spread)}
    names = [*factors, KERNEL, *(HOST + name for name in host)]
    speeds = Speeds(gpu.product or gpu.name, source, factors, kernel_s, host, both)
    return speeds, [name for name in names if name not in known]


def _bound_seconds(reading: Mapping[str, Any], gpu: Gpu) -> float:
    """Return the longer of the FLOPs at the peak and the bytes at the bandwidth; 0 if that peak is unknown."""
    peak = peak_of(gpu, reading["precision"]) if reading["flops"] else math.inf
    return max(reading["flops"] / peak, reading["nbytes"] / gpu.bandwidth) if peak else 0.0


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Return the least value up to which there is half of the weight; `values` are pairs of value and weight."""
    ordered = sorted(values)
    left = sum(weight for _, weight in ordered) / 2
    return next(value for value, weight in ordered if (left := left - weight) <= 0)
