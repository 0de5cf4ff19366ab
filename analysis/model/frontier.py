"""The largest sequence length per batch, and batch per length, that fits in a GPU: from fits, and from real rows.

A size is a card's nominal one, such as 80 GiB; what fits is asked of what PyTorch's allocator can have of such a card
(harness/gpus.py), of several cards of that size the smallest. A size that no listed card has is taken as it is.

A limit from a fit lies inside the measured range, or it is marked as extrapolated; beyond four times the longest
measured value none is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import GIB, METRICS
from vramsweep.analysis.model.curves import Array
from vramsweep.analysis.model.fit import Fit, fit_points
from vramsweep.analysis.model.observe import allocator_limits, observations
from vramsweep.harness.gpus import CONTEXT_BYTES, GPUS, memory_limit, smallest

SIZES = tuple(sorted({gpu.memory_gib for gpu in GPUS}))
REACH = 4  # how far beyond the measured range a fit may be asked, as a multiple of the longest value
_LIMITING = ("device_used_bytes", "peak_reserved_bytes")


@dataclass(frozen=True)
class Limit:
    """The largest `axis` value (tokens or samples) that fits in `gib` for one group, `usable_gib` of it usable.

    `value` comes from the fit (null: nothing fits, or more than the fit can say, see `remark`), `low` and `high` from
    its 95 % interval for a new run. `largest_ok` and `smallest_too_large` are measured rows that prove it.
    """

    label: str
    settings: Mapping[str, Any]
    axis: str
    gib: float
    usable_gib: float
    value: int | None
    low: int | None
    high: int | None
    extrapolated: bool
    largest_ok: int | None
    smallest_too_large: int | None
    basis: str
    remark: str
    trial_ids: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def frontier(
    table: Table,
    sizes: Sequence[float] = SIZES,
    axis: str = "seq_len",
    most: int = 24,
    fits: Sequence[Fit] = (),
    found: Sequence[Group] | None = None,
) -> list[Limit]:
    """Limits of every group for every memory size, largest groups first, at most `most` groups.

    `fits` and `found` are fits against `axis` and the groups, where they are known already.
    """
    limits = []
    for group in (groups(table, axis) if found is None else found)[:most]:
        if group.resident:  # what a process on a CPU holds says nothing about a GPU
            continue
        fit = None
        basis = ""
        frame = group.take(
            "outcome", "seq_len", "micro_batch", "trial_id", "device_total_bytes", "memory_limit_bytes", *_LIMITING
        )
        for name in _LIMITING:
            points = observations(frame, METRICS[name], axis=axis)
            if len(points.x):
                basis = METRICS[name].label
                known = (f for f in fits if f.label == group.label and f.metric.column == name)
                fit = next(known, None) or fit_points(points, METRICS[name], group)
                break
        if not basis:
            continue
        curves = _curves(fit) if fit else None
        for size in sizes:
            limits.append(_limit(frame, group.label, group.settings, axis, size, fit, curves, basis, name))
    return limits


def _curves(fit: Fit) -> tuple[Array, Array, Array, Array]:
    """The chosen model on every whole x up to REACH times the range (thinned), and its interval for a new run."""
    low, high = fit.range
    x = np.unique(np.round(np.linspace(max(low, 1), REACH * high, 600)))
    predicted = fit.predict(x)
    return x, predicted.value, predicted.new_low, predicted.new_high


def _crossing(x: Array, y: Array, limit: float) -> tuple[int | None, bool]:
    """The largest whole x before y first exceeds the limit, and whether it never does."""
    over = np.flatnonzero(y > limit)
    if not len(over):
        return None, True
    at = int(over[0])
    if at == 0:
        return None, False
    share = (limit - y[at - 1]) / (y[at] - y[at - 1])
    return int(np.floor(x[at - 1] + share * (x[at] - x[at - 1]))), False


def _limit(
    frame: pd.DataFrame,
    label: str,
    settings: Mapping[str, Any],
    axis: str,
    gib: float,
    fit: Fit | None,
    curves: tuple[Array, Array, Array, Array] | None,
    basis: str,
    metric: str,
) -> Limit:
    card = smallest(gib)
    usable = gib * GIB if card is None else memory_limit(card)
    limit = usable + (CONTEXT_BYTES if metric == "device_used_bytes" else 0)  # which counts the context too
    largest_ok, smallest_over, ids = _proof(frame, axis, usable, limit, metric)
    value = low = high = None
    extrapolated = False
    remark = "fewer than three different values, so no curve" if fit is None else ""
    if fit is not None and curves is not None:
        x, middle, below, above = curves
        value, endless = _crossing(x, middle, limit)
        low, _ = _crossing(x, above, limit)
        high, _ = _crossing(x, below, limit)
        if value is not None:
            extrapolated = value > fit.range[1] and (smallest_over is None or value > smallest_over)
            remark = "extrapolated beyond the measured range" if extrapolated else ""
            if smallest_over is not None and value >= smallest_over:
                remark = f"the curve is too low: {smallest_over:,} did not fit"
        else:
            shortest, longest = fit.range
            remark = f"more than {REACH * longest:,.0f}" if endless else f"not even {shortest:,.0f} fits"
            extrapolated = endless
    return Limit(
        label,
        settings,
        axis,
        gib,
        usable / GIB,
        value,
        low,
        high,
        extrapolated,
        largest_ok,
        smallest_over,
        basis,
        remark,
        ids,
    )


def _proof(
    frame: pd.DataFrame, axis: str, usable: float, limit: float, metric: str
) -> tuple[int | None, int | None, tuple[str, ...]]:
    """Measured rows on both sides: the largest that stayed within the limit, the smallest that needed more.

    A row that ran out of memory proves something only for devices whose allocator has as much as its own or less.
    """
    known = frame[frame[axis].notna()]
    values = known[metric].to_numpy(float, na_value=np.nan)
    ok = (known["outcome"] == "ok").to_numpy(bool, na_value=False) & (values <= limit)
    oom = (known["outcome"] == "oom").to_numpy(bool, na_value=False) & (allocator_limits(known) >= usable)
    over = oom | (values > limit)
    x = known[axis].to_numpy(float)
    ids = known["trial_id"].to_numpy()
    at_ok = int(np.argmax(np.where(ok, x, -np.inf))) if ok.any() else None
    at_over = int(np.argmin(np.where(over, x, np.inf))) if over.any() else None
    return (
        int(x[at_ok]) if at_ok is not None else None,
        int(x[at_over]) if at_over is not None else None,
        tuple(str(ids[at]) for at in (at_ok, at_over) if at is not None),
    )


def as_frame(limits: Sequence[Limit]) -> pd.DataFrame:
    """One row per limit, for CSV and figures."""
    rows = [{**asdict(limit), "settings": None, "trial_ids": " ".join(limit.trial_ids)} for limit in limits]
    return pd.DataFrame(rows).drop(columns="settings") if rows else pd.DataFrame()


def text(limits: Sequence[Limit]) -> str:
    """For a terminal: a line per group and size."""
    unit = {"seq_len": "tokens", "micro_batch": "samples"}
    lines = []
    for limit in limits:
        found = f"{limit.value:,} {unit[limit.axis]}" if limit.value is not None else limit.remark
        if limit.value is not None and limit.low is not None and limit.high is not None:
            found += f" (95 % interval {limit.low:,} to {limit.high:,})"
        if limit.value is not None and limit.remark:
            found += f", {limit.remark}"
        proof = f"largest that fitted {limit.largest_ok:,}" if limit.largest_ok is not None else "none measured within"
        if limit.smallest_too_large is not None:
            proof += f", smallest that did not {limit.smallest_too_large:,}"
        size = f"{limit.gib:g} GiB" + (f" ({limit.usable_gib:.1f} usable)" if limit.usable_gib != limit.gib else "")
        lines.append(f"{limit.label}, {size}: {found}; {proof} ({limit.basis})")
    return "\n".join(lines)
