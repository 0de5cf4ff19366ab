"""What other tools say beside what a step takes, and what each change does to a run: two answers.

Estimates are of weights, gradients and optimizer state, most of them; none knows a length or a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from vramsweep.analysis.alike import kinds, label
from vramsweep.analysis.load import Table
from vramsweep.analysis.metrics import GIB, MIB

TOOLS = {
    "16 bytes a parameter": "16 B",
    "accelerate estimate-memory": "accel.",
    "DeepSpeed estimate_zero": "DeepSp.",
}  # those that a table shows, by what they are called in it
STATES = ("parameters", "buffers", "gradients", "optimizer_state")
Found = tuple[pd.DataFrame, list[str]]


def composition(table: Table) -> Found:
    """A line per run: its peak, what of that are states, and what each tool says, in GiB, and how far that is off."""
    lines = []
    for rows in kinds(table):
        for _, row in rows.frame.sort_values(["parameters", "world_size"]).iterrows():
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
                }
            )
    notes = [f"GiB a card, {rows.basis}; peak: of what a step allocates." for rows in kinds(table)]
    if any(line["model"].endswith("ckpt") for line in lines):
        notes.append("ckpt: full checkpointing.")
    if any(line["peak"].endswith("*") for line in lines):
        notes.append("* runs out of memory there: what it would reserve without a limit.")
    if lines and not table.others:
        notes.append("No other tool was asked: others=true asks them.")
    return pd.DataFrame(lines), [*notes, *_sources(lines)]


def changes(table: Table) -> Found:
    """The run that the others differ least from, and what each of them changes: MiB reserved, and a token's time."""
    lines: list[dict[str, str]] = []
    notes: list[str] = []
    for rows in kinds(table):
        every = [row for _, row in rows.frame.iterrows()]
        parts = [frozenset(_settings(row)) for row in every]
        center = min(zip(every, parts, strict=True), key=lambda one: sum(len(one[1] ^ other) for other in parts))[0]
        base = set(_settings(center))
        for row in sorted(every, key=lambda row: (len({*_settings(row)} - base), -(_need(row) or 0))):
            more = [part for part in _settings(row) if part not in base]
            lines.append({"change": " ".join(more) or "as it is", **_cells(row, center)})
        said = table.others.get(str(center["trial_id"]), {})
        notes += [f"{label(center)}, {rows.basis}. Times are {'measured' if rows.measured else 'estimated'}."]
        notes += [_load(center, said)]
    return pd.DataFrame(lines), notes


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


def _settings(row: pd.Series[Any]) -> list[str]:
    passes = row["grad_accum"]
    accumulated = [] if pd.isna(passes) or passes == 1 else [f"grad_accum={passes}"]
    return [*label(row).split(", "), *accumulated]


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
