"""Fits in words and as JSON: bytes per token, fixed part, knots, what dominates where, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vramsweep.analysis.data.metrics import Metric, show_bytes
from vramsweep.analysis.model.curves import Curve
from vramsweep.analysis.model.fit import Candidate, Fit


def equation(curve: Curve, metric: Metric) -> str:
    """`y = 2.9598x + 8163.2190 (MiB)`; a hinge as the maximum (or minimum) of its lines."""
    decimals = 4 if metric.memory else 8
    if curve.kind == "quadratic":
        a, b, c = (value / metric.scale for value in curve.coefficients)
        return f"y = {c:.6g}x² {_signed(b, decimals)}x {_signed(a, decimals)} ({metric.unit})"
    lines = []
    for _, _, fixed, slope in curve.lines():
        slope = round(slope / metric.scale, decimals) + 0.0  # not -0.0000
        lines.append(f"{slope:.{decimals}f}x {_signed(fixed / metric.scale, decimals)}")
    if len(lines) == 1:
        return f"y = {lines[0]} ({metric.unit})"
    return f"y = max({', '.join(lines)}) ({metric.unit})"


def _signed(value: float, decimals: int) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value):.{decimals}f}"


def explain(fit: Fit) -> list[str]:
    """The chosen model in sentences, one for each piece of each curve."""
    model = fit.chosen.model
    sentences = []
    for key, curve in model.curves.items():
        where = ""
        if model.modulus:
            where = f"lengths divisible by {model.modulus}: " if key else f"lengths not divisible by {model.modulus}: "
        bounds = fit.intervals()[key]
        if curve.kind == "quadratic":
            sentences.append(where + _parabola(fit, curve))
            continue
        pieces = curve.lines()
        for i, (start, stop, fixed, slope) in enumerate(pieces):
            low, high = max(start, fit.range[0]), min(stop, fit.range[1])  # of the piece, as far as it was measured
            flat = abs(slope) * (high - low) < 0.01 * float(np.abs(fit.points.y).max())
            if fit.metric.memory and flat:
                line = f"flat at {show_bytes(fixed + slope * (low + high) / 2)}"
            else:
                line = _line(fit, fixed, slope, bounds[1] if i == 0 else None)
            sentences.append(where + _span(start, stop) + line + _dominates(fit, i, len(pieces), flat))
        for i, knot in enumerate(curve.knots):
            low, high = bounds[len(curve.coefficients) + i]
            sentences.append(f"{where}the lines meet at {knot:,.0f} tokens (95 % interval {low:,.0f} to {high:,.0f})")
    return sentences


def _span(start: float, stop: float) -> str:
    if np.isfinite(start) and np.isfinite(stop):
        return f"from {start:,.0f} to {stop:,.0f} tokens, "
    if np.isfinite(stop):
        return f"up to {stop:,.0f} tokens, "
    return f"from {start:,.0f} tokens on, " if np.isfinite(start) else ""


def _line(fit: Fit, fixed: float, slope: float, interval: tuple[float, float] | None) -> str:
    if fit.metric.memory:
        sure = f" (95 % interval {interval[0]:,.0f} to {interval[1]:,.0f})" if interval else ""
        return f"{slope:,.0f} bytes per token{sure} on top of a fixed part of {show_bytes(fixed)}"
    text = f"{slope * 1e6:,.3f} µs per token of length on top of {fixed * 1e3:,.3f} ms"
    if fit.samples_per_step is None or slope <= 0:
        return text
    most = fit.samples_per_step / slope
    return f"{text} (throughput: {fit.samples_per_step:g} x length / step time, there below {most:,.0f} tokens/s)"


def _parabola(fit: Fit, curve: Curve) -> str:
    metric = fit.metric
    a, b, c = curve.coefficients
    _, high = fit.range
    if metric.memory:
        equal = f"; the two are equal at {abs(b / c):,.0f} tokens" if b * c > 0 and abs(b / c) < 10 * high else ""
        text = (
            f"{b:,.0f} bytes per token and {c:,.4g} bytes per token² on top of a fixed part of {show_bytes(a)}{equal}"
        )
        typical = " (a part that grows with length squared is typical of attention that stores its scores)"
        return text + (typical if c > 0 else "")
    return f"{a * 1e3:,.4g} ms {b * 1e6:+,.4g} µs per token {c * 1e9:+,.4g} ns per token²"


def _dominates(fit: Fit, piece: int, pieces: int, flat: bool) -> str:
    """What makes the peak on this piece: from the rows' phase peaks, otherwise what the slope allows to say."""
    if not fit.metric.memory:
        return ""
    phase = fit.phases[piece] if piece < len(fit.phases) else ""
    if phase:
        return f"; the {phase} phase has the largest peak there in most rows"
    if pieces == 1:
        return ""
    if flat:
        return "; length does not matter there: weights, gradients and optimizer state dominate"
    return "; activations and other tensors that grow with length dominate"


def text(fit: Fit) -> str:
    """The whole fit for a terminal: the line and the parabola always, then the chosen model and why."""
    metric = fit.metric
    low, high = fit.range
    n = len(fit.points.x)
    different = len(np.unique(fit.points.x))
    lines = [
        f"{metric.label} against sequence length, {fit.label}: {n:,} rows, {different:,} lengths, "
        f"{low:,.0f} to {high:,.0f} tokens" + (", Huber loss" if fit.robust else "")
    ]
    width = max(len(c.model.name) for c in fit.candidates)
    for candidate in fit.candidates:
        mark = "*" if candidate is fit.chosen else " "
        lines.append(f"  {mark} {candidate.model.name:<{width}}  {_quality(candidate, metric)}")
        if candidate is fit.chosen or candidate.model.name in ("straight line", "quadratic"):
            for key, curve in candidate.model.curves.items():
                lines.append(f"      {class_name(candidate, key)}{equation(curve, metric)}")
    lines.append(f"  * chosen: {fit.why}")
    lines += [f"    {sentence}" for sentence in explain(fit)]
    censored = len(fit.points.bound_x)
    if censored:
        lines.append(f"    {censored} row{'s' * (censored != 1)} that ran out of memory count as lower bounds")
    lines += [f"  ! {warning}" for warning in fit.warnings]
    lines.append(f"    holds from {low:,.0f} to {high:,.0f} tokens; beyond that it is a guess")
    return "\n".join(lines)


def class_name(candidate: Candidate, key: bool) -> str:
    """Which lengths a curve is for; empty when for all."""
    if candidate.model.modulus is None:
        return ""
    return f"length % {candidate.model.modulus} {'==' if key else '!='} 0: "


def _quality(candidate: Candidate, metric: Metric) -> str:
    def number(value: float) -> str:
        return f"{value / metric.scale:,.4g}" if np.isfinite(value) else "–"

    return (
        f"RMS {number(candidate.rms)}, worst {number(candidate.worst)}, held-out {number(candidate.held_out)} "
        f"{metric.unit}, AICc {candidate.aicc:,.1f}"
    )


def as_json(fit: Fit) -> dict[str, Any]:
    """The fit as plain data; numbers in the column's own unit (bytes, seconds, tokens/s), NaN and infinity as null."""
    intervals = fit.intervals()
    return {
        "metric": fit.metric.column,
        "unit": "bytes" if fit.metric.memory else fit.metric.unit,
        "settings": {k: _plain(v) for k, v in fit.settings.items()},
        "rows": len(fit.points.x),
        "lengths": len(np.unique(fit.points.x)),
        "censored": len(fit.points.bound_x),
        "range_tokens": list(fit.range),
        "robust": fit.robust,
        "chosen": fit.chosen.model.name,
        "why": fit.why,
        "explanation": explain(fit),
        "warnings": list(fit.warnings),
        "candidates": [
            {
                "model": c.model.name,
                "kind": c.model.kind,
                "modulus": c.model.modulus,
                "rms": _plain(c.rms),
                "worst": _plain(c.worst),
                "held_out": _plain(c.held_out),
                "aicc": _plain(c.aicc),
                "curves": [
                    {
                        "class": class_name(c, key).rstrip(": ") or None,
                        "equation": equation(curve, fit.metric),
                        "parameters": dict(zip(curve.names, curve.parameters, strict=True)),
                        "intervals": dict(zip(curve.names, intervals[key], strict=True)) if c is fit.chosen else None,
                    }
                    for key, curve in c.model.curves.items()
                ],
            }
            for c in fit.candidates
        ],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def summary(fits: Sequence[Fit]) -> str:
    """One line a fit, for the end of a sweep."""
    lines = []
    for fit in fits:
        equations = "; ".join(
            class_name(fit.chosen, key) + equation(curve, fit.metric) for key, curve in fit.chosen.model.curves.items()
        )
        lines.append(f"{fit.metric.label}, {fit.label}: {equations}, RMS {fit.metric.show(fit.chosen.rms)}")
        lines += [f"    {sentence}" for sentence in explain(fit)]
    return "\n".join(lines)
