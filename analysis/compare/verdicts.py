"""Two sets of rows against each other: paired by equal settings, memory exactly, speed by a bootstrap interval.

An axis that is constant in each set but not the same in both (allocator, runner, ...) is what is compared; all others
must be equal for two rows to make a pair. Every verdict is about B as seen from A, with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from vramsweep.analysis.data.groups import ASKED, FOUND, label
from vramsweep.analysis.data.load import EXTRA, Table
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.model.curves import Array
from vramsweep.harness.errors import UserError

MARGIN = 0.01
DRAWS = 4999
SEED = 20_240_917
_FEW = "one run each and fewer than 5 pairs; measure repeats (repeat=0,1,2)"
_EXACT = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")


@dataclass(frozen=True)
class Memory:
    """EQUAL, SMALLER, LARGER or AMBIGUOUS; `a` and `b` in bytes, null where it ran out of memory."""

    metric: str
    verdict: str
    reason: str
    a: float | None
    b: float | None


@dataclass(frozen=True)
class Speed:
    """SAME, FASTER, SLOWER or AMBIGUOUS; `change` is B/A − 1 of tokens/s with its 95 % interval, null if unknown."""

    verdict: str
    reason: str
    change: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Pair:
    """One combination of settings that both sets measured."""

    settings: Mapping[str, Any]
    memory: tuple[Memory, ...]
    speed: Speed
    trial_ids: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """All pairs, the verdicts over all of them, and what could not be paired."""

    a: str
    b: str
    differs: Mapping[str, tuple[str, str]]
    pairs: tuple[Pair, ...]
    memory: tuple[Memory, ...]
    speed: Speed
    only_a: int
    only_b: int

    @property
    def worse(self) -> bool:
        """Whether B needs more memory in any pair or is slower over all: what a CI job should fail on."""
        larger = any(m.verdict == "LARGER" for pair in self.pairs for m in pair.memory)
        return larger or self.speed.verdict == "SLOWER"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "worse": self.worse}


def compare(a: Table, b: Table, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Pair and judge. Raises UserError when nothing can be paired, or measured rows stand against predicted ones."""
    sides = [_needed(table.frame).assign(_set=name) for table, name in ((a, "a"), (b, "b"))]
    both = pd.concat(sides, ignore_index=True)
    both = both[both["outcome"].isin(["ok", "oom"])].reset_index(drop=True)
    predicted = [set((rows["device"] == "simulated").fillna(False)) for _, rows in both.groupby("_set")]
    if len(predicted) == 2 and predicted[0] != predicted[1]:
        raise UserError(
            "one set is predicted (device=simulated), the other measured; they are not compared, see the figure "
            "predicted_against_measured of the report"
        )
    extras = [str(name) for name in both.columns if str(name).startswith(EXTRA)]
    differs, axes = _axes(both, [*ASKED, *extras])
    differs |= _axes(both, list(FOUND))[0]
    keys = [*axes, "seq_len"]
    filled = both.assign(**{key: both[key].astype("string").fillna("") for key in keys})
    cells = [
        (rows.iloc[0], rows[rows["_set"] == "a"], rows[rows["_set"] == "b"])
        for _, rows in filled.groupby(keys, sort=False, observed=True)
    ]
    paired = [cell for cell in cells if len(cell[1]) and len(cell[2])]
    if not paired:
        apart = [key for key in keys if set(filled.loc[filled["_set"] == "a", key]).isdisjoint(
            filled.loc[filled["_set"] == "b", key])]  # fmt: skip
        why = f"they share no {' and no '.join(apart)}" if apart else "no combination of settings is in both"
        raise UserError(f"nothing to compare between {names[0]} and {names[1]}: {why}")
    varying = [key for key in keys if filled[key].nunique() > 1]
    pool, freedom = _run_noise(cells)
    random = np.random.default_rng(SEED)
    pairs = []
    shifts: list[Array] = []
    for first, rows_a, rows_b in sorted(paired, key=lambda cell: _order(cell[0], varying)):
        speed, shift = _speed(rows_a, rows_b, pool, freedom, random)
        if shift is not None:
            shifts.append(shift)
        pairs.append(
            Pair(
                settings={key: _readable(both[key].iloc[int(str(first.name))]) for key in varying},
                memory=tuple(_memory(metric, rows_a, rows_b, differs) for metric in _memory_metrics(rows_a, rows_b)),
                speed=speed,
                trial_ids=tuple(str(i) for i in [*rows_a["trial_id"], *rows_b["trial_id"]]),
            )
        )
    return Comparison(
        *names,
        differs=differs,
        pairs=tuple(pairs),
        memory=tuple(_memory_over_all(metric, pairs) for metric in _EXACT if any(_has(p, metric) for p in pairs)),
        speed=_speed_over_all([p.speed for p in pairs], shifts, random),
        only_a=sum(len(rows_b) == 0 for _, _, rows_b in cells),
        only_b=sum(len(rows_a) == 0 for _, rows_a, _ in cells),
    )


def _needed(frame: pd.DataFrame) -> pd.DataFrame:
    extras = [name for name in frame.columns if str(name).startswith(EXTRA)]
    return frame[[*ASKED, *FOUND, *extras, *_EXACT, "seq_len", "tokens_per_s", "outcome", "trial_id"]]


def split(table: Table, axis: str, values: Sequence[str]) -> tuple[Table, Table]:
    """The rows of one table with `axis` at the first and at the second value. Raises UserError."""
    if axis not in table.frame or len(values) != 2:
        raise UserError(
            f"--by takes AXIS=VALUE,VALUE with a column of the rows, as in allocator=default,expandable; not {axis}"
        )
    column = table.frame[axis].astype("string")
    for value in values:
        if not (column == value).any():
            raise UserError(
                f"no row has {axis}={value}; there are {', '.join(map(str, column.dropna().unique()[:12]))}"
            )
    return table.where((column == values[0]).fillna(False)), table.where((column == values[1]).fillna(False))


def _axes(both: pd.DataFrame, names: Iterable[str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """What is compared (constant in each set, different between them), and the axes that must be equal."""
    differs: dict[str, tuple[str, str]] = {}
    equal = []
    for name in names:
        sides = [set(rows[name].astype("string").dropna()) for _, rows in both.groupby("_set")]
        if len(sides) == 2 and all(len(side) <= 1 for side in sides) and sides[0] != sides[1]:
            differs[name] = (next(iter(sides[0]), "none"), next(iter(sides[1]), "none"))
        elif any(sides):
            equal.append(name)
    return differs, equal


def _order(row: pd.Series[Any], varying: Sequence[str]) -> tuple[Any, ...]:
    return tuple((len(str(row[key])), str(row[key])) for key in varying)


def _readable(value: Any) -> Any:
    if pd.isna(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _has(pair: Pair, metric: str) -> bool:
    return any(m.metric == metric for m in pair.memory)


def _memory_metrics(a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    """Counters that both sides know and that repeat exactly: the resident set of a CPU process does not."""
    failed = [(rows["outcome"] == "oom").any() for rows in (a, b)]
    rss = any((rows["memory_source"] == "cpu_tensors_and_rss").any() for rows in (a, b))
    return [
        name
        for name in _EXACT
        if not (rss and name == "peak_reserved_bytes")
        and all(rows[name].notna().any() or oom for rows, oom in zip((a, b), failed, strict=True))
        and (a[name].notna().any() or b[name].notna().any())
    ]


def _memory(metric: str, a: pd.DataFrame, b: pd.DataFrame, differs: Mapping[str, Any]) -> Memory:
    values_a, values_b = (rows.loc[rows["outcome"] == "ok", metric].dropna().to_numpy(float) for rows in (a, b))
    oom_a, oom_b = ((rows["outcome"] == "oom").any() for rows in (a, b))
    middle_a, middle_b = (float(np.median(v)) if len(v) else None for v in (values_a, values_b))
    if "memory_source" in differs:
        return Memory(metric, "AMBIGUOUS", "the counters mean different things (memory_source)", middle_a, middle_b)
    if oom_a != oom_b and not (len(values_a) and len(values_b)):
        verdict, who = ("LARGER", "B") if oom_b else ("SMALLER", "A")
        return Memory(metric, verdict, f"{who} ran out of memory where the other fits", middle_a, middle_b)
    if middle_a is None or middle_b is None:
        return Memory(metric, "AMBIGUOUS", "not measured on both sides", middle_a, middle_b)
    show = METRICS[metric].show
    change = f"{show(middle_a)} to {show(middle_b)} ({_percent(middle_b / middle_a - 1 if middle_a else 0.0)})"
    if values_a.min() == values_a.max() == values_b.min() == values_b.max():
        return Memory(metric, "EQUAL", f"{show(middle_a)} in every run", middle_a, middle_b)
    if values_b.max() < values_a.min():
        return Memory(metric, "SMALLER", change, middle_a, middle_b)
    if values_b.min() > values_a.max():
        return Memory(metric, "LARGER", change, middle_a, middle_b)
    return Memory(metric, "AMBIGUOUS", "repeats differ by more than the two sides", middle_a, middle_b)


def _memory_over_all(metric: str, pairs: Sequence[Pair]) -> Memory:
    mine = [m for pair in pairs for m in pair.memory if m.metric == metric]
    verdicts = [m.verdict for m in mine]
    counts = {v: verdicts.count(v) for v in ("EQUAL", "SMALLER", "LARGER", "AMBIGUOUS") if v in verdicts}
    strict = [v for v in counts if v != "EQUAL"]
    verdict = "EQUAL" if not strict else strict[0] if len(strict) == 1 else "AMBIGUOUS"
    known = [(m.a, m.b) for m in mine if m.a is not None and m.b is not None]
    reason = ", ".join(f"{v.lower()} in {n}" for v, n in counts.items()) + f" of {len(mine)} pairs"
    if known:
        ratio = float(np.exp(np.mean([np.log(b / a) for a, b in known if a > 0 and b > 0] or [0.0])))
        reason += f"; geometric mean {_percent(ratio - 1)}"
    return Memory(metric, verdict, reason, None, None)


def _run_noise(cells: Sequence[tuple[Any, pd.DataFrame, pd.DataFrame]]) -> tuple[Array, int]:
    """How much log tokens/s of repeats deviate from their mean, over all settings, and the degrees of freedom."""
    found: list[Array] = [np.empty(0)]
    freedom = 0
    for _, *sides in cells:
        for rows in sides:
            logs = _logs(rows)
            if len(logs) > 1:
                found.append((logs - logs.mean()) * np.sqrt(len(logs) / (len(logs) - 1)))
                freedom += len(logs) - 1
    return np.concatenate(found), freedom


def _logs(rows: pd.DataFrame) -> Array:
    values = rows.loc[rows["outcome"] == "ok", "tokens_per_s"].dropna().to_numpy(float)
    return np.asarray(np.log(values[values > 0]))


def _speed(
    a: pd.DataFrame, b: pd.DataFrame, pool: Array, freedom: int, random: np.random.Generator
) -> tuple[Speed, Array | None]:
    """The verdict of one pair, and its bootstrap draws of log(B/A): run-to-run noise is drawn from all repeats."""
    logs_a, logs_b = _logs(a), _logs(b)
    if not len(logs_a) or not len(logs_b):
        return Speed("AMBIGUOUS", _no_speed(a, b)), None
    shift = float(logs_b.mean() - logs_a.mean())
    if freedom == 0:
        reason = "one run each, so the run-to-run spread is unknown; measure repeats (repeat=0,1,2)"
        return Speed("AMBIGUOUS", reason, float(np.expm1(shift))), np.full(DRAWS, shift)
    noise_a, noise_b = (random.choice(pool, (DRAWS, len(logs))).mean(axis=1) for logs in (logs_a, logs_b))
    draws = shift + (noise_b - noise_a) * _student(freedom)
    return _judge(shift, draws, f"{len(logs_a)} and {len(logs_b)} runs"), draws


def _no_speed(a: pd.DataFrame, b: pd.DataFrame) -> str:
    failed = [(rows["outcome"] == "oom").all() for rows in (a, b)]
    if all(failed):
        return "both ran out of memory"
    if any(failed):
        return f"{'A' if failed[0] else 'B'} ran out of memory"
    return "no speed measured on both sides"


def _student(freedom: int) -> float:
    """How much wider an interval must be when the spread itself comes from few runs."""
    return float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))


def _judge(shift: float, draws: Array, basis: str) -> Speed:
    low, high = (float(np.expm1(v)) for v in np.percentile(draws, [2.5, 97.5]))
    change = float(np.expm1(shift))
    text = f"{_percent(change)}, 95 % interval {_percent(low)} to {_percent(high)} from {basis}"
    if low > MARGIN:
        return Speed("FASTER", text, change, low, high)
    if high < -MARGIN:
        return Speed("SLOWER", text, change, low, high)
    if low >= -MARGIN and high <= MARGIN:
        return Speed("SAME", f"{text}, within the margin of 1 %", change, low, high)
    return Speed("AMBIGUOUS", f"{text}, which reaches across the margin of 1 %", change, low, high)


def _speed_over_all(speeds: Sequence[Speed], shifts: Sequence[Array], random: np.random.Generator) -> Speed:
    """The geometric mean over pairs: from run-to-run noise if there were repeats, else from the spread over pairs."""
    if not shifts:
        return Speed("AMBIGUOUS", "no speed measured on both sides")
    centres = np.array([np.log1p(s.change) for s in speeds if s.change is not None])
    if any(s.low is not None for s in speeds):
        return _judge(float(centres.mean()), np.mean(shifts, axis=0), f"repeats of {len(centres)} pairs")
    if len(centres) < 5:
        return Speed("AMBIGUOUS", _FEW, float(np.expm1(centres.mean())))
    n = len(centres)
    pool = (centres - centres.mean()) * np.sqrt(n / (n - 1)) * _student(n - 1)
    draws = centres.mean() + random.choice(pool, (DRAWS, n)).mean(axis=1)
    return _judge(float(centres.mean()), draws, f"the spread over {n} pairs of single runs")


def _percent(change: float) -> str:
    return f"{100 * change:+.2f} %"


def text(comparison: Comparison) -> str:
    """For a terminal: one line a pair, the verdicts over all, what differs."""
    c = comparison
    lines = [f"A {c.a}", f"B {c.b}"]
    lines += [f"  {name}: {a} in A, {b} in B" for name, (a, b) in c.differs.items()]
    for pair in c.pairs:
        verdicts = [f"{METRICS[m.metric].label} {m.verdict} ({m.reason})" for m in pair.memory]
        verdicts.append(f"speed {pair.speed.verdict} ({pair.speed.reason})")
        lines.append(f"{label(pair.settings)}: " + "; ".join(verdicts))
    lines.append(f"over all {len(c.pairs)} pairs:")
    lines += [f"  {METRICS[m.metric].label}: {m.verdict}: {m.reason}" for m in c.memory]
    lines.append(f"  speed: {c.speed.verdict}: {c.speed.reason}")
    if c.only_a or c.only_b:
        lines.append(f"not paired: {c.only_a} combinations only in A, {c.only_b} only in B")
    return "\n".join(lines)
