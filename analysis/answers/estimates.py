"""What other tools say beside what a step takes, and what each change does to a run: two answers.

Estimates are of weights, gradients and optimizer state, most of them; none knows a length or a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from vramsweep.analysis.answers.alike import Rows, alike, folded, gib, is_, kinds, label, shared, text
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import GIB, MIB
from vramsweep.harness.techniques import AXES

TOOLS = {
    "16 bytes a parameter": "16 B",
    "accelerate estimate-memory": "accel.",
    "DeepSpeed estimate_zero": "DeepSp.",
}  # those that a table shows, by what they are called in it
CHANGES = (
    "model",
    "runner",
    "seq_len",
    "micro_batch",
    "grad_accum",
    "sharding",
    "world_size",
    "offload_optimizer",
    "offload_param",
    "zero_init",
    "protocol",
    "allocator",
    *(axis.name for axis in AXES),
)  # axes that a change may be of, as they are typed
STATES = ("parameters", "buffers", "gradients", "optimizer_state")
Found = tuple[pd.DataFrame, list[str]]


def composition(table: Table) -> Found:
    """A line per run: its peak, what of that are states, and what each tool says, in GiB, and how far that is off."""
    lines = []
    for _, card, runs in _by_card(table):
        for row in sorted(runs, key=lambda row: (_number(row["parameters"]), _number(row["world_size"]))):
            peak = row["unlimited_peak_reserved_bytes" if _full(row) else "peak_allocated_bytes"]
            states = row[[f"peak_{name}_bytes" for name in STATES]].sum(min_count=len(STATES))
            said = table.others.get(str(row["trial_id"]), {})
            ended = _is(row["outcome"], "ok") or _full(row)
            lines.append(
                {
                    "model": f"{text(row['model'])}{_kept(row)}",
                    "cards": text(row["world_size"]),
                    "peak": gib(peak) + (" *" if _full(row) else "") if ended else text(row["outcome"]),
                    "states": gib(states),
                    **{name: _beside(said.get(tool), peak) for tool, name in TOOLS.items()},
                    "card": card,
                }
            )
    frame, notes = folded(pd.DataFrame(lines), "card")
    if lines:
        notes.append("GiB a card; peak: of what a step allocates; states: weights, gradients and optimizer state then.")
    if any(line["model"].endswith("ckpt") for line in lines):
        notes.append("ckpt: full checkpointing.")
    if any(line["peak"].endswith("*") for line in lines):
        notes.append("* runs out of memory there: what it would reserve without a limit.")
    if lines and not table.others:
        notes.append("No other tool's answer is at hand: others=true asks them.")
    return frame, [*notes, *_sources(lines)]


def changes(table: Table) -> Found:
    """Of each card the run that the others differ least from, and what each of them changes: MiB reserved, and a
    token's time."""
    lines: list[dict[str, str]] = []
    notes: list[str] = []
    for rows, card, runs in _by_card(table):
        settings = [_settings(row) for row in runs]
        nearest = _nearest(settings)
        base, center = settings[nearest], runs[nearest]
        told = [(_changed(base, one), row) for one, row in zip(settings, runs, strict=True)]
        for more, row in sorted(told, key=lambda one: (len(one[0]), -(_need(one[1]) or 0))):
            said = " ".join(f"{axis}={value}" for axis, value in more.items())
            lines.append({"change": said or "as it is", **_cells(row, center, rows.seconds), "card": card})
        times = "measured" if rows.measured else "estimated"
        notes += [f"{label(center)}; {card}. time: of a token, {times}."]
        notes += [_load(center, table.others.get(str(center["trial_id"]), {}))]
    return folded(pd.DataFrame(lines), "card")[0], notes


def _by_card(table: Table) -> Iterator[tuple[Rows, str, list[pd.Series[Any]]]]:
    """The rows of each card, its name, and its runs, each once: of repeats that finished the one in the middle."""
    for rows in kinds(table):
        for card, own in rows.frame.groupby(rows.card, sort=False):
            yield rows, str(card), [_middle(part) for part in alike(own)]


def _middle(repeats: pd.DataFrame) -> pd.Series[Any]:
    ok = repeats[is_(repeats, "outcome", "ok")]
    ranked = (ok if len(ok) else repeats).sort_values("peak_reserved_bytes")
    return ranked.iloc[(len(ranked) - 1) // 2]


def _nearest(settings: Sequence[Mapping[str, str]]) -> int:
    """Which of them the others differ least from."""
    away = [0] * len(settings)
    for axis in CHANGES:
        counts = Counter(one[axis] for one in settings if axis in one)
        for number, one in enumerate(settings):
            away[number] += counts.total() - counts[one[axis]] if axis in one else 0
    return away.index(min(away))


def _kept(row: pd.Series[Any]) -> str:
    return " ckpt" if _is(row["checkpointing"], "full") else ""


def _is(value: Any, wanted: Any) -> bool:
    """A null is nothing that is wanted."""
    return not pd.isna(value) and bool(value == wanted)


def _load(row: pd.Series[Any], said: Mapping[str, int | None]) -> str:
    """What is known before the first step, beside what the step takes."""
    told = [f"{tool}: {size / MIB:,.0f}" for tool, size in said.items() if size is not None]
    need = _need(row)
    count = row["parameters"]
    weights = [] if pd.isna(count) else [f"weights in fp32: {4 * count / MIB:,.0f}"]
    if not told:
        told = ["no other tool was asked (others=true)"]
    takes = "how much is not known" if need is None else f"{need / MIB:,.0f}"
    return f"MiB before it runs: {'; '.join([*weights, *told])}. What a step reserves: {takes}."


def _cells(row: pd.Series[Any], base: pd.Series[Any], seconds: Sequence[str]) -> dict[str, str]:
    need, before = _need(row), _need(base)
    ok, times = _is(row["outcome"], "ok"), shared(row, base, seconds)
    slower = None if times is None else row[times] / _tokens(row) / (base[times] / _tokens(base))
    return {
        "MiB": f"{need / MIB:,.0f}" if need is not None else "–" if ok else text(row["outcome"]),
        "saves": "–" if need is None or before is None else f"{(before - need) / MIB:+,.0f}",
        "fits": "yes" if ok else "no" if _full(row) else "–",
        "time": "–" if pd.isna(slower) else f"x{slower:.2f}",
    }


def _tokens(row: pd.Series[Any]) -> Any:
    """Of a step, over all cards."""
    return row["seq_len"] * row["micro_batch"] * row["grad_accum"] * row["world_size"]


def _full(row: pd.Series[Any]) -> bool:
    """Whether memory ran out, a card's or the host's."""
    return _is(row["outcome"], "oom") or _is(row["outcome"], "host_oom")


def _need(row: pd.Series[Any]) -> float | None:
    """Bytes reserved, if need be without a limit."""
    found = row["peak_reserved_bytes" if _is(row["outcome"], "ok") else "unlimited_peak_reserved_bytes"]
    return None if pd.isna(found) else float(found)


def _settings(row: pd.Series[Any]) -> dict[str, str]:
    """What was asked for, by axis, as it is typed; without what is not known."""
    return {axis: text(row[axis]) for axis in CHANGES if axis in row and not pd.isna(row[axis])}


def _changed(base: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """The axes of both in which the other differs, with its values."""
    return {axis: value for axis, value in other.items() if axis in base and base[axis] != value}


def _number(value: Any) -> float:
    return math.inf if pd.isna(value) else float(value)


def _beside(said: int | None, peak: float | None) -> str:
    if said is None:
        return "–"
    off = "" if peak is None or pd.isna(peak) else f" {said / peak - 1:+.0%}"
    return f"{said / GIB:,.1f}{off}"


def _sources(lines: list[dict[str, str]]) -> list[str]:
    told = [f"{name}: {tool}" for tool, name in TOOLS.items() if any(line[name] != "–" for line in lines)]
    return [f"{'; '.join(told)}. Beside each: how far it is off the peak."] if told else []
