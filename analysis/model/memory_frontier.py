"""Maximum sequence length per batch, and batch per length, that fit in a GPU: from rows first, then from fits.

A size is a GPU's nominal memory, such as 80 GiB. Its limit is what PyTorch's allocator may use of the smallest listed
GPU of that size (harness/hardware/gpu_lookup.py). The CUDA context and the driver take the rest. A size that no listed
GPU has is used as it is.

Measured rows come first and are never contradicted. A fit adds the safe value, up to which a new run fits with 97.5 %.
A value beyond the measured range is marked as extrapolated. Beyond four times the longest measured value there is none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import Group, groups
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import GIB, METRICS
from vramsweep.analysis.model.curves import Array
from vramsweep.analysis.model.fit import Fit, Prediction, fit_points
from vramsweep.analysis.model.observations import UNITS, Mask, allocator_limits, along, members, observations
from vramsweep.analysis.model.predictors import Knows, Wholes
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES, GPUS, lowest_limit_gpu, memory_limit
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.search.fit_knowledge import Bracket, find_bracket

SIZES = tuple(sorted({gpu.memory_gib for gpu in GPUS}))
REACH = 4  # a fit is evaluated up to this multiple of the longest measured value
ALL = "all that the model has positions for"
FEW = "fewer than three different values, so no curve"
EDGE = "vramsweep predict --largest finds the maximum"
_TORN = "results from {:,} to {:,} contradict each other"
_LIMITING = ("device_used_bytes", "peak_reserved_bytes")


@dataclass(frozen=True)
class Limit:
    """The largest `axis` value (tokens or samples) that fits in `gib` for one group, `usable_gib` of it usable.

    `value` comes from the fit. It is null if nothing fits, or if the limit is beyond the fit (see `remark`). `low` and
    `high` are its 95 % interval for a new run: up to `low` a run is safe, beyond `high` it hardly fits. They are null
    where the fit has no such end. `largest_ok` and `smallest_too_large` are measured rows that prove the limit, and no
    number contradicts them. The `remark` `ALL` means that the model takes no more, `multiples_of` that the limit is of
    such values only, `predicted` that no row is measured.
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
    multiples_of: int | None = None
    rests_on: str = ""
    group: str = ""
    predicted: bool = False

    @property
    def proven(self) -> bool:
        """Return whether rows alone prove the limit: the next value is too large, or there is none."""
        return self.value is not None and self.value == self.low == self.high == self.largest_ok


@dataclass(frozen=True)
class _Part:
    """Rows of one alignment class, or all, and the fit at whole x. These end at `REACH` times the range, or at the
    `longest` that the model takes."""

    frame: pd.DataFrame
    multiples_of: int | None
    curves: Prediction | None
    longest: int | None = None


@dataclass(frozen=True)
class _Ends:
    """Fields of one `Limit` that are given next to the rows that prove it."""

    value: int | None = None
    low: int | None = None
    high: int | None = None
    remark: str = ""
    extrapolated: bool = False


def frontier(
    table: Table,
    sizes: Sequence[float] = SIZES,
    axis: str = "seq_len",
    most: int = 24,
    fits: Sequence[Fit] = (),
    found: Sequence[Group] | None = None,
) -> list[Limit]:
    """Return the limits of every group for every memory size, at most `most` groups, largest first.

    `fits` (against `axis`) and `found` (the groups) are used if they are known already.
    """
    limits = []
    wholes = Wholes(table)
    for group in (groups(table, axis) if found is None else found)[:most]:
        if group.resident or group.varies:  # CPU memory tells nothing about a GPU, nor a cut about a length
            continue
        frame = group.frame
        for name in _LIMITING:
            points = observations(frame, METRICS[name], axis=axis)
            if not len(points.x):
                continue
            known = (f for f in fits if f.group == group.id and f.metric.column == name and f.axis == axis)
            try:
                fit = next(known, None) or fit_points(points, METRICS[name], group, axis, Knows(wholes.of(group)))
            except np.linalg.LinAlgError:  # numbers too far apart
                fit = None
            for part in _parts(frame, axis, fit, group.positions if axis == "seq_len" else None):
                limits += [_limit(part, group, axis, size, fit, name) for size in sizes]
            break
    return limits


def _parts(frame: pd.DataFrame, axis: str, fit: Fit | None, positions: int | None) -> list[_Part]:
    if fit is None:
        return [_Part(frame, None, None, positions)]
    modulus = fit.modulus
    low, high = fit.range
    longest = positions if positions is not None and positions <= REACH * high else None
    everywhere = np.unique(np.round(np.linspace(max(low, 1), longest or REACH * high, 600)))
    if modulus is None:
        return [_Part(frame, None, fit.predict(everywhere), longest)]
    aligned = np.unique(np.maximum(everywhere // modulus, 1) * modulus)
    at: Mask = members(along(frame, axis), modulus)[True]
    others = everywhere[members(everywhere, modulus)[False]]
    multiple = longest and longest // modulus * modulus
    rest = _Part(frame, None, fit.predict(others), longest)
    return [rest, _Part(frame[at], modulus, fit.predict(aligned), multiple)]


def _crossing(x: Array, y: Array, limit: float) -> tuple[float | None, bool]:
    """Return the x where y first exceeds the limit, and whether it never does; None if never or from the start."""
    if not len(over := np.flatnonzero(y > limit)):
        return None, True
    if (at := int(over[0])) == 0:
        return None, False
    if not np.isfinite(y[at]):
        return float(x[at - 1]), False
    share = (limit - y[at - 1]) / (y[at] - y[at - 1])
    return float(x[at - 1] + share * (x[at] - x[at - 1])), False


def _limit(part: _Part, group: Group, axis: str, gib: float, fit: Fit | None, metric: str) -> Limit:
    card = lowest_limit_gpu(gib)
    usable = gib * GIB if card is None else memory_limit(card)
    limit = usable + (CONTEXT_BYTES if metric == "device_used_bytes" else 0)  # this counts the context too
    rows, trial_ids = _read_bracket(part.frame, axis, usable, limit, metric)
    predicted = bool(group.take("device")["device"].eq("simulated").any())
    ends = _predicted_ends(part, rows) if predicted else _ends(part, rows, limit, fit)
    return Limit(
        **asdict(ends), label=group.label, settings=group.settings, axis=axis, gib=gib,
        usable_gib=usable / GIB, largest_ok=rows.largest, smallest_too_large=rows.smallest,
        basis=METRICS[metric].label, trial_ids=trial_ids, multiples_of=part.multiples_of,
        rests_on=fit.basis if fit else "", group=group.id,
        predicted=predicted,
    )  # fmt: skip


def _predicted_ends(part: _Part, rows: Bracket) -> _Ends:
    """Return the ends that predicted rows show; no curve through them knows more than the predictor does."""
    ok, over, step = rows.largest, rows.smallest, part.multiples_of or 1
    if ok is None or rows.either_way:
        return _Ends(remark=_TORN.format(*rows.either_way) if rows.either_way else "")
    if ok == part.longest:
        return _Ends(ok, ok, ok, ALL)
    high = None if over is None else over - step
    told = "" if high == ok else "the largest that was predicted" if high is None else EDGE
    return _Ends(ok, ok, high, told)


def _ends(part: _Part, rows: Bracket, limit: float, fit: Fit | None) -> _Ends:
    """Return the curve's value and the ends of its interval, where no row contradicts them."""
    step = part.multiples_of or 1
    proven, over = rows.proven, rows.smallest
    if proven is not None and (over == proven + step or proven == part.longest):
        return _Ends(proven, proven, proven, ALL if proven == part.longest else "")
    if fit is None or part.curves is None:
        return _Ends(remark=FEW)

    def whole(x: float | None, most: int | None) -> int | None:
        """Round x down to a multiple of `step`, within what the rows prove."""
        if x is None:
            return None
        at = int(np.floor(x / step + 1e-9)) * step
        at = at if most is None else min(at, most)
        return max(at, proven) if proven is not None else at if at > 0 else None

    one = part.curves
    short = None if over is None else over - step
    most = rows.largest if rows.either_way else short
    crossing, endless = _crossing(one.x, one.value, limit)
    value = whole(crossing, most)
    safe, all_safe = _crossing(one.x, one.new_high, limit)
    low = whole(safe, short)
    high = None if fit.one_sided else whole(_crossing(one.x, one.new_low, limit)[0], most)
    if endless and over is None:
        if low is None:
            low = int(one.x[-1]) if all_safe and np.isfinite(one.new_high).all() else rows.largest
        if part.longest is not None:
            return _Ends(part.longest, low, part.longest, ALL, part.longest > fit.range[1])
        return _Ends(None, low, high, f"more than {REACH * fit.range[1]:,.0f}", extrapolated=True)
    if endless:
        value = low = proven
    elif value is None:
        value = proven
    high = part.longest if high is None and value is not None and over is None else high
    extrapolated = value is not None and value > fit.range[1] and (over is None or value > over)
    return _Ends(value, low, high, _remark(rows, crossing, endless, value, extrapolated, fit.range[0]), extrapolated)


def _remark(
    rows: Bracket, crossing: float | None, endless: bool, value: int | None, extrapolated: bool, shortest: float
) -> str:
    """Return where rows contradict the curve or each other, or that it is extrapolated; "" otherwise."""
    proven, over = rows.proven, rows.smallest
    if rows.either_way:
        return _TORN.format(*rows.either_way)
    if value is None and not endless:
        return f"not even {shortest:,.0f} fits"
    if proven is not None and not endless and (crossing is None or crossing < proven):
        return f"the curve is too high: {proven:,} fitted"
    if over is not None and (endless or (crossing is not None and crossing >= over)):
        return f"the curve is too low: {over:,} did not fit"
    return "extrapolated beyond the measured range" if extrapolated else ""


def _read_bracket(
    frame: pd.DataFrame, axis: str, usable: float, limit: float, metric: str
) -> tuple[Bracket, tuple[str, ...]]:
    """Return what measured rows prove of a limit, with trial ids of the largest within it and the smallest beyond.

    A row that ran out of memory is proof only for devices whose allocator has at most as much.
    """
    known = frame[np.isfinite(along(frame, axis))]
    values = known[metric].to_numpy(float, na_value=np.nan)
    ok = (known["outcome"] == "ok").to_numpy(bool, na_value=False) & (values <= limit)
    oom = (known["outcome"] == "oom").to_numpy(bool, na_value=False) & (allocator_limits(known) >= usable)
    over = oom | (values > limit)
    x = along(known, axis)
    ids = known["trial_id"].to_numpy()
    ends = [int(np.argmax(np.where(ok, x, -np.inf)))] if ok.any() else []
    ends += [int(np.argmin(np.where(over, x, np.inf)))] if over.any() else []
    return find_bracket(np.sort(x[ok]), np.sort(x[over])), tuple(str(ids[at]) for at in ends)


def as_frame(limits: Sequence[Limit]) -> pd.DataFrame:
    """Return one row per limit, for CSV and figures."""
    rows = [{**asdict(limit), "settings": None, "trial_ids": " ".join(limit.trial_ids)} for limit in limits]
    return pd.DataFrame(rows).drop(columns="settings") if rows else pd.DataFrame()


def text(limits: Sequence[Limit]) -> str:
    """Return a line per group and size for a terminal, proven values first."""
    return "\n".join([*map(_line, limits), *filter(None, [room(limits)])])


def _line(limit: Limit) -> str:
    unit = UNITS[limit.axis]
    one = unit.removesuffix("s") if limit.largest_ok == 1 else unit
    how, ran, not_ = ("predicted", "predicted to fit", "not") if limit.predicted else ("measured", "fitted", "did not")
    parts = [f"{limit.largest_ok:,} {one} {ran}" if limit.largest_ok is not None else f"none that was {how} fits"]
    if limit.smallest_too_large is not None:
        parts.append(f"{limit.smallest_too_large:,} {not_}")
    beyond = f" (beyond what was {how})" if limit.extrapolated else ""
    known_safe = limit.low is not None and (limit.largest_ok is None or limit.low > limit.largest_ok)
    safe = f"safe up to {limit.low:,}" if known_safe else ""
    if limit.proven or limit.predicted:
        parts += filter(None, [limit.remark])
    elif limit.value is None:
        parts += [limit.remark, *([safe] if safe and limit.extrapolated else [])]
    else:
        most = "" if limit.high is None or limit.high <= limit.value else f", {limit.high:,} at most"
        known = "no more, by the curve" if limit.value == limit.largest_ok else f"{limit.value:,} {unit} by the curve"
        parts.append(f"{safe + ', ' if safe else ''}{known}{most}{beyond}")
        if limit.remark == ALL or (limit.remark and not limit.extrapolated):
            parts.append(limit.remark)
    size = f"{limit.gib:g} GiB" + (f" ({limit.usable_gib:.1f} usable)" if limit.usable_gib != limit.gib else "")
    of = f", multiples of {limit.multiples_of}" if limit.multiples_of else ""
    return f"{limit.label}, {size}{of}: {'; '.join(parts)} ({limit.basis})"


def room(limits: Sequence[Limit]) -> str:
    """Explain what CUDA leaves usable, and what safe means; empty if every size is used as it is."""
    if all(limit.usable_gib == limit.gib for limit in limits):
        return ""
    return (
        "usable: what PyTorch can use of the smallest GPU of that size, its memory less the driver's share and "
        f"{format_size(CONTEXT_BYTES)} for the CUDA context; safe: a new run fits with a probability of 97.5 %"
    )
