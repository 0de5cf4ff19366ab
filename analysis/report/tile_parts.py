"""The answer about what dominates the peak: its largest part if the parts are known, else what grows with length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.pairing import Beside
from vramsweep.analysis.figures.composition import OF_PEAK, called, oom_parts
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.phases import PHASES
from vramsweep.analysis.report.tiles import FLAT, NARROW, Head, Tile, basis, ended, join, last_piece, memory_fit
from vramsweep.harness.messages.units import format_size


def dominates(frame: pd.DataFrame, of: Head | None, found: Sequence[Fit], beside: Beside) -> Tile:
    """Return the largest part of the peak at the longest length, from the row or a prediction for its settings. Without
    parts, compare what grows with length with what does not. If nothing ran, show memory when it ran out."""
    question = "What dominates the peak?"
    if of is None:
        lost = ended(frame, "oom").sort_values(["seq_len", "micro_batch"])
        if lost.empty or len(ended(frame, "ok")):
            return Tile(question, about="No row has a peak.")
        held = {called(part): float(size) for part, size in oom_parts(lost.iloc[0]).items()}
        phase = str(lost["phase"].dropna().mode().get(0, "")).split(", ")[-1]
        if sum(held.values()) > 0:
            what = f"of {format_size(sum(held.values()))}, including the failed request, when memory ran out"
            return _largest(question, held, f"{what} in {phase}" if phase else what, basis(lost.iloc[0]))
        if not phase:
            return Tile(question, about="No row has a peak.")
        return Tile(question, phase.capitalize(), "", "Memory ran out there, so no peak is known.")
    at = f"at {of.longest:,} tokens"
    if own := _parts(of.row):
        return _largest(question, own, f"of {format_size(sum(own.values()))} allocated {at}", of.basis)
    if (twin := _twin(of, beside)) is not None:
        measured = of.row["peak_allocated_bytes"]
        beside_it = "" if pd.isna(measured) else f"; measured: {format_size(float(measured))}"
        parts = _parts(twin)
        return _largest(
            question, parts, f"of {format_size(sum(parts.values()))} predicted {at}{beside_it}", basis(twin)
        )
    peaks = {phase: float(v) for phase in PHASES if not pd.isna(v := of.row[f"{phase}_peak_allocated_bytes"])}
    phase = f"the {max(peaks, key=lambda one: peaks[one])} phase has the peak" if peaks else ""
    fit = memory_fit(of, found)
    whole = fit is not None and fit.range[0] <= of.frame["seq_len"].min()  # else its intercept is no fixed part
    grows = _growing(fit, float(of.longest)) if fit is not None and whole else None
    if fit is not None and grows is not None:
        value = f"Length-dependent part, {100 * grows:.0f}{NARROW}%"
        told = f"activations and similar; {100 * (1 - grows):.0f}{NARROW}% is weights, gradients, optimizer state"
        if grows < 0.5:
            value = f"Length-independent part, {100 * (1 - grows):.0f}{NARROW}%"
            told = f"weights, gradients, optimizer state; {100 * grows:.0f}{NARROW}% grows with length"
        return Tile(question, value, "", join(told, f"of {fit.metric.label} {at}", phase), of.kind)
    if phase:
        return Tile(question, phase.removesuffix(" has the peak").capitalize(), "", join(at), of.basis)
    return Tile(question, about="The rows have no components of the peak, and no curve separates them.")


def _parts(row: pd.Series[Any]) -> dict[str, float]:
    """Return the known parts of a row's peak in bytes; {} if they sum to 0."""
    found = {called(part): float(row[column]) for part, column in OF_PEAK.items() if not pd.isna(row[column])}
    return found if sum(found.values()) > 0 else {}


def _twin(of: Head, beside: Beside) -> pd.Series[Any] | None:
    """Return the predicted row with these settings, length and batch that knows its parts, None if there is none."""
    if (rows := beside.of(of.group)) is None:
        return None
    same = rows["outcome"].eq("ok") & rows["seq_len"].eq(of.longest) & rows["micro_batch"].eq(of.row["micro_batch"])
    return next((row for _, row in rows[same.fillna(False).astype(bool)].iterrows() if _parts(row)), None)


def _largest(question: str, parts: Mapping[str, float], of: str, basis: str) -> Tile:
    """Return the answer that names the largest part and the few after it."""
    total = sum(parts.values())
    first, *others = sorted(parts, key=lambda name: -parts[name])
    share = {name: f"{100 * size / total:.0f}{NARROW}%" for name, size in parts.items()}
    rest = [f"{name} {share[name]}" for name in others[:3] if parts[name] >= 0.005 * total]
    told = join(f"then {', '.join(rest)}" if rest else "", of)
    return Tile(question, f"{first.capitalize()}, {share[first]}", "", told, basis)


def _growing(fit: Fit, longest: float) -> float | None:
    """Return the share of the curve at the longest length that grows with length; None if its terms are no parts."""
    _, fixed, slope, square, _ = last_piece(fit)
    peak = float(fit.value(np.array([longest]))[0])
    share = (slope * longest + square * longest**2) / peak if peak > 0 else float("nan")
    return max(share, 0.0) if -FLAT < share <= 1 and fixed >= 0 else None
