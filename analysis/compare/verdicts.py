"""Comparison of two sets of rows: paired by equal settings, memory within a tolerance, speed by an interval.

An axis that is constant in each set but differs between them (allocator, runner, ...) is what is compared. All others
must be equal for two rows to make a pair, except the source of imported rows. Every verdict is about B as seen from A,
with its reason.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from vramsweep.analysis.compare import format_difference
from vramsweep.analysis.data.groups import ASKED, FOUND, plain_value
from vramsweep.analysis.data.load import EXTRA, Table, extras
from vramsweep.analysis.data.metrics import METRICS, MIB
from vramsweep.analysis.model.curves import Array
from vramsweep.harness.messages.errors import UserError

TOLERANCE = 0.005  # of memory, relative: less than what two runs of one setting on two machines differ by
BLOCK = 2 * MIB  # the allocator reserves in steps of it (kSmallBuffer, kRoundLarge in c10/cuda/CUDACachingAllocator)
MARGIN = 0.01  # of speed, relative
BY_HOST = "the host limits the speed, so this compares hosts, not settings or GPUs"
ALMOST = 0.95  # least share of the pairs that has the verdict over all of them
DRAWS = 4999
SEED = 20_240_917
_EXACT = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")


@dataclass(frozen=True)
class Memory:
    """A verdict on memory: EQUAL, SMALLER, LARGER or AMBIGUOUS. `a` and `b` are median bytes, null if memory ran out.

    `apart` is the most bytes between any run of one side and any of the other; 0 if all are the same.
    """

    metric: str
    verdict: str
    reason: str
    a: float | None
    b: float | None
    apart: float | None = None


@dataclass(frozen=True)
class Speed:
    """A verdict on speed: SAME, FASTER, SLOWER or AMBIGUOUS. `change` is B/A − 1 of tokens/s with its 95 % interval,
    null if unknown. `a` and `b` are geometric means of tokens/s, `error` is the standard error of ln(B/A) from
    repeats. A pair of which a side is `host_bound` is AMBIGUOUS, and no verdict over all pairs counts it."""

    verdict: str
    reason: str
    change: float | None = None
    low: float | None = None
    high: float | None = None
    a: float | None = None
    b: float | None = None
    error: float | None = None
    host_bound: bool = False


@dataclass(frozen=True)
class Pair:
    """One combination of settings that both sets measured; `settings` are those that vary."""

    settings: Mapping[str, Any]
    seq_len: int | None
    micro_batch: int | None
    memory: tuple[Memory, ...]
    speed: Speed
    trial_ids: tuple[str, ...]


@dataclass(frozen=True)
class Single:
    """A combination that only one set (`side`, "a" or "b") has: median bytes of memory, geometric mean of tokens/s.

    `memory` is empty if it ran out.
    """

    side: str
    settings: Mapping[str, Any]
    seq_len: int | None
    micro_batch: int | None
    memory: Mapping[str, float]
    tokens_per_s: float | None
    trial_ids: tuple[str, ...]


@dataclass(frozen=True)
class Extreme:
    """The pair with the least or most of something: B/A − 1, B − A (bytes or tokens/s), and its settings."""

    change: float
    difference: float
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class OverAll:
    """The verdict on one quantity over all pairs; `change` is the geometric mean of B/A, minus 1.

    `counts` are the pairs of each verdict, `apart` is the most of any pair (bytes), `least` and `most` are the pairs of
    the smallest and largest B/A.
    """

    metric: str
    verdict: str
    reason: str
    counts: Mapping[str, int]
    apart: float | None = None
    change: float | None = None
    least: Extreme | None = None
    most: Extreme | None = None


@dataclass(frozen=True)
class Comparison:
    """All pairs, the verdicts over all of them, and what could not be paired."""

    a: str
    b: str
    differs: Mapping[str, tuple[str, str]]
    tolerance: float
    pairs: tuple[Pair, ...]
    memory: tuple[OverAll, ...]
    speed: Speed
    speeds: OverAll | None
    unpaired: tuple[Single, ...]

    @property
    def only_a(self) -> int:
        """Number of combinations that only A has."""
        return sum(one.side == "a" for one in self.unpaired)

    @property
    def only_b(self) -> int:
        """Number of combinations that only B has."""
        return sum(one.side == "b" for one in self.unpaired)

    @property
    def worse(self) -> bool:
        """Return whether B needs more memory in any pair or is slower over all; a CI job should fail on that."""
        larger = any(m.verdict == "LARGER" for pair in self.pairs for m in pair.memory)
        return larger or self.speed.verdict == "SLOWER"

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "only_a": self.only_a, "only_b": self.only_b, "worse": self.worse}


@dataclass(frozen=True)
class _Side:
    """One set's part of a combination: values of its finished runs, and whether a run ran out of memory."""

    memory: Mapping[str, Array]
    logs: Array  # of tokens/s
    oom: bool
    resident: bool
    host_bound: bool
    ids: tuple[str, ...]


@dataclass(frozen=True)
class _Cell:
    settings: Mapping[str, Any]
    seq_len: int | None
    micro_batch: int | None
    a: _Side
    b: _Side

    @property
    def paired(self) -> bool:
        return bool(self.a.ids and self.b.ids)


def compare(a: Table, b: Table, names: tuple[str, str] = ("A", "B"), tolerance: float = TOLERANCE) -> Comparison:
    """Pair and judge. Memory that differs by at most `tolerance` of A's (reserved: or a block of 2 MiB) is EQUAL.

    With tolerance 0, one byte makes a difference. Raises UserError if nothing can be paired, or if measured rows would
    be compared with predicted ones.
    """
    cells, differs = _cells(a, b, names)
    pool, freedom = _run_noise(cells)
    random = np.random.default_rng(SEED)
    pairs, shifts = [], np.zeros(DRAWS)  # the sum over pairs
    for cell in (cell for cell in cells if cell.paired):
        speed, shift = _speed(cell.a, cell.b, pool, freedom, random)
        if cell.a.host_bound or cell.b.host_bound:
            speed = replace(speed, verdict="AMBIGUOUS", reason=f"{speed.reason}; {BY_HOST}", host_bound=True)
        elif shift is not None:
            shifts += shift
        known = _memory_metrics(cell.a, cell.b)
        memory = tuple(_memory(metric, cell.a, cell.b, differs, tolerance) for metric in known)
        pairs.append(Pair(cell.settings, cell.seq_len, cell.micro_batch, memory, speed, cell.a.ids + cell.b.ids))
    return Comparison(
        *names,
        differs=differs,
        tolerance=tolerance,
        pairs=tuple(pairs),
        memory=tuple(_memory_over_all(m, pairs) for m in _EXACT if any(_memory_of_pair(p, m) for p in pairs)),
        speed=_speed_over_all([p.speed for p in pairs], shifts, random),
        speeds=_speeds(pairs),
        unpaired=tuple(_single(cell) for cell in cells if not cell.paired),
    )


def allowed(metric: str, a: float, tolerance: float) -> float:
    """Return the bytes by which B may differ from A's `a` and still count as EQUAL."""
    return max(tolerance * a, BLOCK if metric == "peak_reserved_bytes" and tolerance > 0 else 0)


def _cells(a: Table, b: Table, names: tuple[str, str]) -> tuple[list[_Cell], dict[str, tuple[str, str]]]:
    """Return every combination of settings with each set's part of it, in order, and what differs between the sets."""
    both = pd.concat([a.frame[_needed(a)].assign(_set="a"), b.frame[_needed(b)].assign(_set="b")], ignore_index=True)
    both = both[both["outcome"].isin(["ok", "oom"])].reset_index(drop=True)
    predicted = [set((rows["device"] == "simulated").fillna(False)) for _, rows in both.groupby("_set")]
    if len(predicted) == 2 and predicted[0] != predicted[1]:
        raise UserError(
            "compare cannot mix a predicted set (device=simulated) with a measured one; see the figure "
            "predicted_against_measured of the report"
        )
    own = extras(both)
    differs, axes = _axes(both, [*ASKED, *own])
    differs |= _axes(both, list(FOUND))[0]
    differs = {k: sides for k, sides in differs.items() if k not in own or sides != differs.get(k.removeprefix(EXTRA))}
    keys = [*(axis for axis in axes if axis != "foreign"), "seq_len"]
    filled = pd.DataFrame({key: both[key].astype("string").fillna("") for key in keys})
    in_a = both["_set"].eq("a").to_numpy(bool)
    apart = [key for key in keys if set(filled.loc[in_a, key]).isdisjoint(filled.loc[~in_a, key])]
    varying = _apart(filled)
    shown = {key: both[key].to_numpy(object) for key in {*varying, "seq_len", "micro_batch"}}
    read = _reader(both)
    cells = []
    for rows in filled.groupby(keys, sort=False, observed=True).indices.values():
        first = {key: plain_value(values[rows[0]]) for key, values in shown.items()}
        settings = {key: first[key] for key in varying}
        sides = read(rows[in_a[rows]]), read(rows[~in_a[rows]])
        cells.append(_Cell(settings, first["seq_len"], first["micro_batch"], *sides))
    if not any(cell.paired for cell in cells):
        why = f"they share no {' and no '.join(apart)}" if apart else "no combination of settings is in both"
        raise UserError(f"nothing to compare between {names[0]} and {names[1]}, because {why}")
    return sorted(cells, key=lambda cell: [_order(value) for value in cell.settings.values()]), differs


def _apart(filled: pd.DataFrame) -> list[str]:
    """Return the columns that vary, without those that only repeat one before them."""
    found: dict[bytes | str, str] = {}
    for key in map(str, filled.columns[filled.nunique() > 1]):
        same = key if key in ("seq_len", "micro_batch") else pd.factorize(filled[key])[0].tobytes()
        found.setdefault(same, key)
    return list(found.values())


def _needed(table: Table) -> list[str]:
    return [*ASKED, *FOUND, *extras(table.frame), *_EXACT, "seq_len", "tokens_per_s", "bound_by", "outcome", "trial_id"]


def _reader(both: pd.DataFrame) -> Callable[[Any], _Side]:
    """Return a function from positions of rows to what they hold."""
    ok, oom = (both["outcome"].eq(outcome).to_numpy(bool) for outcome in ("ok", "oom"))
    memory = {name: both[name].to_numpy(float, na_value=np.nan) for name in _EXACT}
    speeds = both["tokens_per_s"].to_numpy(float, na_value=np.nan)
    resident = both["memory_source"].eq("cpu_tensors_and_rss").fillna(False).to_numpy(bool)
    limited = both["bound_by"].eq("host").fillna(False).to_numpy(bool)
    ids = both["trial_id"].astype(str).to_numpy(object)

    def read(rows: Any) -> _Side:
        done = rows[ok[rows]]
        known = {name: values[done][~np.isnan(values[done])] for name, values in memory.items()}
        logs = np.log(speeds[done][speeds[done] > 0])
        any_oom, any_resident, any_limited = (bool(what[rows].any()) for what in (oom, resident, limited))
        return _Side(known, logs, any_oom, any_resident, any_limited, tuple(ids[rows]))

    return read


def _axes(both: pd.DataFrame, names: Iterable[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return what is compared (constant in each set, different between them), and the axes that must be equal."""
    differs: dict[str, tuple[str, str]] = {}
    equal = []
    for name in names:
        sides = [set(rows[name].astype("string").dropna()) for _, rows in both.groupby("_set")]
        if len(sides) == 2 and all(len(side) <= 1 for side in sides) and sides[0] != sides[1]:
            differs[name] = (next(iter(sides[0]), "none"), next(iter(sides[1]), "none"))
        elif any(sides):
            equal.append(name)
    return differs, equal


def _order(value: Any) -> tuple[int, str]:
    return len(text := "" if value is None else str(value)), text


def _single(cell: _Cell) -> Single:
    name, side = ("a", cell.a) if cell.a.ids else ("b", cell.b)
    memory = {metric: float(np.median(values)) for metric, values in side.memory.items() if len(values)}
    speed = float(np.exp(side.logs.mean())) if len(side.logs) else None
    return Single(name, cell.settings, cell.seq_len, cell.micro_batch, memory, speed, side.ids)


def _memory_of_pair(pair: Pair, metric: str) -> Memory | None:
    return next((m for m in pair.memory if m.metric == metric), None)


def _memory_metrics(a: _Side, b: _Side) -> list[str]:
    """Return the counters that both sides know and that repeat exactly; the resident set of a CPU process does not."""
    return [
        name
        for name in _EXACT
        if not ((a.resident or b.resident) and name == "peak_reserved_bytes")
        and all(len(side.memory[name]) or side.oom for side in (a, b))
        and (len(a.memory[name]) or len(b.memory[name]))
    ]


def _memory(metric: str, a: _Side, b: _Side, differs: Mapping[str, Any], tolerance: float) -> Memory:
    values_a, values_b = a.memory[metric], b.memory[metric]
    middle_a, middle_b = (float(np.median(v)) if len(v) else None for v in (values_a, values_b))

    def found(verdict: str, reason: str, apart: float | None = None) -> Memory:
        return Memory(metric, verdict, reason, middle_a, middle_b, apart)

    if "memory_source" in differs:
        return found("AMBIGUOUS", "the two sides count memory differently (memory_source)")
    if a.oom != b.oom and not (len(values_a) and len(values_b)):
        verdict, who = ("LARGER", "B") if b.oom else ("SMALLER", "A")
        return found(verdict, f"{who} ran out of memory, the other did not")
    if middle_a is None or middle_b is None:
        return found("AMBIGUOUS", "not measured on both sides")
    change = _change(middle_a, middle_b)
    apart = float(max(values_b.max() - values_a.min(), values_a.max() - values_b.min()))
    least = allowed(metric, middle_a, tolerance)
    if apart == 0:
        return found("EQUAL", f"{METRICS[metric].show(middle_a)} in every run", apart)
    if apart <= least:
        most = format_difference.in_bytes(apart, signed=False)[0]
        return found("EQUAL", f"{change}; runs of A and B differ by at most {most}", apart)
    overlap = float(min(values_a.max(), values_b.max()) - max(values_a.min(), values_b.min()))
    if overlap < 0 and abs(middle_b - middle_a) > least:
        return found("SMALLER" if middle_b < middle_a else "LARGER", change, apart)
    size = format_difference.in_bytes(abs(overlap), signed=False)[0]
    why = f"overlap by {size}" if overlap >= 0 else f"are {size} apart"
    return found("AMBIGUOUS", f"runs of A and B {why}; medians: {change}", apart)


def _change(a: float, b: float) -> str:
    """Return `3.20 GiB to 3.10 GiB (-0.10 GiB, -3.12 %)`."""
    share, apart = format_difference.size(b / a - 1 if a else 0.0), format_difference.in_bytes(b - a)[0]
    return f"{' to '.join(format_difference.in_bytes(a, b, signed=False))} ({apart}, {share})"


def _memory_over_all(metric: str, pairs: Sequence[Pair]) -> OverAll:
    """Return the verdict of nearly all pairs; else, or if memory ran out in some, that of all that are not EQUAL."""
    mine = [(pair, m) for pair in pairs if (m := _memory_of_pair(pair, metric)) is not None]
    counts = _counts([m.verdict for _, m in mine], ("EQUAL", "SMALLER", "LARGER", "AMBIGUOUS"))
    most = max(counts, key=lambda verdict: counts[verdict])
    strict = [verdict for verdict in counts if verdict != "EQUAL"]
    fitted = all(m.a is not None and m.b is not None for _, m in mine)
    if fitted and counts[most] >= ALMOST * len(mine):
        verdict = most
    else:
        verdict = "EQUAL" if not strict else strict[0] if len(strict) == 1 else "AMBIGUOUS"
    changes = [(m.b / m.a - 1, m.b - m.a, pair) for pair, m in mine if m.a and m.b]
    apart = max((m.apart for _, m in mine if m.apart is not None), default=None)
    return replace(_over_all(metric, verdict, counts, len(mine), changes), apart=apart)


def _counts(verdicts: Sequence[str], order: Sequence[str]) -> dict[str, int]:
    return {verdict: verdicts.count(verdict) for verdict in order if verdict in verdicts}


def _logs(changes: Sequence[float]) -> Array:
    """Return ln(B/A) of each B/A - 1, finite even if that rounds to -1."""
    return np.log1p(np.maximum(changes, -1 + np.finfo(float).epsneg))


def _over_all(
    metric: str, verdict: str, counts: Mapping[str, int], pairs: int, changes: Sequence[tuple[float, float, Pair]]
) -> OverAll:
    """Return the verdict with sizes: the geometric mean of B/A, and the pairs of the smallest and the largest."""
    reason = ", ".join(f"{v.lower()} in {n:,}" for v, n in counts.items()) + f" of {pairs:,} pair{'s' * (pairs != 1)}"
    if not changes:
        return OverAll(metric, verdict, reason, counts)
    mean = float(np.expm1(np.mean(_logs([change for change, *_ in changes]))))
    least, most = (
        Extreme(change, difference, pair.settings)
        for change, difference, pair in (pick(changes, key=lambda c: c[0]) for pick in (min, max))
    )
    show = format_difference.speed if metric == "tokens_per_s" else format_difference.size
    return OverAll(metric, verdict, f"{reason}; geometric mean {show(mean)}", counts, None, mean, least, most)


def _speeds(pairs: Sequence[Pair]) -> OverAll | None:
    """Return how many pairs have which verdict on speed, with sizes; None if no pair knows its speed."""
    changes = [(p.speed.b / p.speed.a - 1, p.speed.b - p.speed.a, p) for p in pairs if p.speed.a and p.speed.b]
    if not changes:
        return None
    counts = _counts([p.speed.verdict for *_, p in changes], ("SAME", "FASTER", "SLOWER", "AMBIGUOUS"))
    return _over_all("tokens_per_s", max(counts, key=lambda v: counts[v]), counts, len(changes), changes)


def _run_noise(cells: Sequence[_Cell]) -> tuple[Array, int]:
    """Return deviations of repeats' log tokens/s from their mean, over all settings, and the degrees of freedom."""
    found: list[Array] = [np.empty(0)]
    freedom = 0
    for cell in cells:
        for logs in (cell.a.logs, cell.b.logs):
            if len(logs) > 1:
                found.append((logs - logs.mean()) * np.sqrt(len(logs) / (len(logs) - 1)))
                freedom += len(logs) - 1
    return np.concatenate(found), freedom


def _speed(
    a: _Side, b: _Side, pool: Array, freedom: int, random: np.random.Generator
) -> tuple[Speed, Array | float | None]:
    """Return the verdict of one pair, and its bootstrap draws of log(B/A), with run-to-run noise from all repeats."""
    known: dict[str, Any] = {n: float(np.exp(s.logs.mean())) for n, s in (("a", a), ("b", b)) if len(s.logs)}
    if len(known) < 2:
        return Speed("AMBIGUOUS", _no_speed(a, b), **known), None
    shift = float(b.logs.mean() - a.logs.mean())
    if freedom == 0:
        change = float(np.expm1(shift))
        reason = f"{format_difference.speed(change)}, but one run each, so the run-to-run spread is unknown"
        return Speed("AMBIGUOUS", f"{reason}; measure repeats (repeat=0,1,2)", change, **known), shift
    noise_a, noise_b = (random.choice(pool, (DRAWS, len(logs))).mean(axis=1) for logs in (a.logs, b.logs))
    draws = shift + (noise_b - noise_a) * _student(freedom)
    known["error"] = float(pool.std() * _student(freedom) * np.sqrt(1 / len(a.logs) + 1 / len(b.logs)))
    return _judge(shift, draws, f"{len(a.logs)} and {len(b.logs)} runs", **known), draws


def _no_speed(a: _Side, b: _Side) -> str:
    failed = [side.oom and not len(side.logs) for side in (a, b)]
    if all(failed):
        return "both ran out of memory"
    return f"{'A' if failed[0] else 'B'} ran out of memory" if any(failed) else "no speed measured on both sides"


@lru_cache(maxsize=64)
def _student(freedom: int) -> float:
    """Return how much wider an interval must be because the spread itself comes from few runs."""
    return float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))


def _judge(shift: float, draws: Array, basis: str, **known: Any) -> Speed:
    low, high = (float(np.expm1(v)) for v in np.percentile(draws, [2.5, 97.5]))
    change = float(np.expm1(shift))
    most_likely, least, most = (format_difference.speed(value) for value in (change, low, high))
    text = f"{most_likely}, 95 % interval {least} to {most} from {basis}"
    if low > MARGIN or high < -MARGIN:
        return Speed("FASTER" if low > MARGIN else "SLOWER", text, change, low, high, **known)
    if low >= -MARGIN and high <= MARGIN:
        return Speed("SAME", f"{text}, within the margin of 1 %", change, low, high, **known)
    return Speed("AMBIGUOUS", f"{text}; the interval crosses the margin of 1 %", change, low, high, **known)


def _speed_over_all(speeds: Sequence[Speed], shifts: Array, random: np.random.Generator) -> Speed:
    """Judge the geometric mean over pairs: by run-to-run noise if there were repeats, else by the spread over pairs."""
    if left_out := [s for s in speeds if s.host_bound]:
        found = _speed_over_all([s for s in speeds if not s.host_bound], shifts, random)
        without = f"without {len(left_out):,} of {len(speeds):,} pairs: {BY_HOST}"
        return replace(found, reason=f"{found.reason}; {without}" if len(left_out) < len(speeds) else BY_HOST)
    centres = _logs([s.change for s in speeds if s.change is not None])
    if not (n := len(centres)):
        return Speed("AMBIGUOUS", "no speed measured on both sides")
    if any(s.low is not None for s in speeds):
        return _judge(float(centres.mean()), shifts / n, f"repeats of {n:,} pairs")
    if n < 5:
        mean = float(np.expm1(centres.mean()))
        reason = f"{format_difference.speed(mean)}, but one run each and fewer than 5 pairs"
        return Speed("AMBIGUOUS", f"{reason}; measure repeats (repeat=0,1,2)", mean)
    pool = (centres - centres.mean()) * np.sqrt(n / (n - 1)) * _student(n - 1)
    draws = centres.mean() + random.choice(pool, (DRAWS, n)).mean(axis=1)
    return _judge(float(centres.mean()), draws, f"the spread over {n:,} pairs of single runs")
