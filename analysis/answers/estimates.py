"""What other tools say beside what a step takes, and what each change does to a run: two answers.

Estimates are of weights, gradients and optimizer state, most of them; none knows a length or a batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from vramsweep.analysis.answers.alike import alike, kinds, label
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
    "allocator",
    *(axis.name for axis in AXES),
)  # axes that a change may be of, as they are typed
STATES = ("parameters", "buffers", "gradients", "optimizer_state")
Found = tuple[pd.DataFrame, list[str]]


def composition(table: Table) -> Found:
    """A line per run: its peak, what of that are states, and what each tool says, in GiB, and how far that is off."""
    lines = []
    for card, runs in _by_card(table):
        for row in sorted(runs, key=lambda row: (_number(row["parameters"]), _number(row["world_size"]))):
            peak = row["peak_allocated_bytes"]
            if pd.isna(peak):
                peak = row["unlimited_peak_reserved_bytes"]
            states = row[[f"peak_{name}_bytes" for name in STATES]].sum(min_count=len(STATES))
            said = table.others.get(str(row["trial_id"]), {})
            lines.append(
                {
                    "model": f"{row['model']}{_kept(row)}",
                    "cards": str(row["world_size"]),
                    "peak": _gib(peak) + ("" if _is(row["outcome"], "ok") else " *"),
                    "states": _gib(states),
                    **{name: _beside(said.get(tool), peak) for tool, name in TOOLS.items()},
                    "card": card,
                }
            )
    frame, notes = _one_card(pd.DataFrame(lines))
    notes = [
        *notes,
        *(
            ["GiB a card; peak: of what a step allocates; states: weights, gradients and optimizer state then."]
            if lines
            else []
        ),
    ]
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
    for card, runs in _by_card(table):
        settings = [_settings(row) for row in runs]
        away = [sum(len(_changed(one, other)) for other in settings) for one in settings]
        base, center = settings[away.index(min(away))], runs[away.index(min(away))]
        told = [(_changed(base, one), row) for one, row in zip(settings, runs, strict=True)]
        for more, row in sorted(told, key=lambda one: (len(one[0]), -(_need(one[1]) or 0))):
            said = " ".join(f"{axis}={value}" for axis, value in more.items())
            lines.append({"change": said or "as it is", **_cells(row, center), "card": card})
        times = "measured" if card.startswith("measured") else "estimated"
        notes += [f"{label(center)}, {card}. Times are {times}."]
        notes += [_load(center, table.others.get(str(center["trial_id"]), {}))]
    return _one_card(pd.DataFrame(lines))[0], notes


def _by_card(table: Table) -> Iterator[tuple[str, list[pd.Series[Any]]]]:
    """`predicted: h100-80gb` and its runs, each once: of repeats the one in the middle."""
    for rows in kinds(table):
        cards = rows.frame["gpu_name" if rows.measured else "simulated_gpu"].fillna("unknown")
        for card, own in rows.frame.groupby(cards, sort=False):
            parts = (part.sort_values("peak_reserved_bytes") for part in alike(own))
            runs = [part.iloc[len(part) // 2] for part in parts]
            yield f"{'measured' if rows.measured else 'predicted'}: {card}", runs


def _one_card(frame: pd.DataFrame) -> Found:
    """The card is a note where it is the same in all lines, else a column."""
    if frame.empty or frame["card"].nunique() > 1:
        return frame, []
    return frame.drop(columns="card"), [f"{frame['card'].iloc[0]}."]


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


def _cells(row: pd.Series[Any], base: pd.Series[Any]) -> dict[str, str]:
    need, before = _need(row), _need(base)
    time, was = (one["step_s"] / (one["micro_batch"] * one["grad_accum"]) for one in (row, base))
    if need is None:
        return {"MiB": str(row["outcome"]), "saves": "–", "fits": "–", "time": "–"}
    return {
        "MiB": f"{need / MIB:,.0f}",
        "saves": "–" if before is None else f"{(before - need) / MIB:+,.0f}",
        "fits": "yes" if _is(row["outcome"], "ok") else "no",
        "time": "–" if pd.isna(time) or pd.isna(was) else f"x{time / was:.2f}",
    }


def _need(row: pd.Series[Any]) -> float | None:
    """Bytes reserved, if need be without a limit."""
    found = row["peak_reserved_bytes" if _is(row["outcome"], "ok") else "unlimited_peak_reserved_bytes"]
    return None if pd.isna(found) else float(found)


def _settings(row: pd.Series[Any]) -> dict[str, str]:
    """What was asked for, by axis, as it is typed; without what is not known."""
    return {axis: str(row[axis]) for axis in CHANGES if axis in row and not pd.isna(row[axis])}


def _changed(base: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """The axes of both in which the other differs, with its values."""
    return {axis: value for axis, value in other.items() if axis in base and base[axis] != value}


def _number(value: Any) -> float:
    return math.inf if pd.isna(value) else float(value)


def _gib(size: float | None) -> str:
    return "–" if size is None or pd.isna(size) else f"{size / GIB:,.1f}"


def _beside(said: int | None, peak: float | None) -> str:
    if said is None:
        return "–"
    off = "" if peak is None or pd.isna(peak) else f" {said / peak - 1:+.0%}"
    return f"{said / GIB:,.1f}{off}"


def _sources(lines: list[dict[str, str]]) -> list[str]:
    known = Counter(name for line in lines for name in TOOLS.values() if line[name] != "–")
    told = [f"{name} {tool}" for tool, name in TOOLS.items() if known[name]]
    return [f"{'; '.join(told)}: and by how much each is off the peak."] if told else []
