"""Fits in words and as JSON: bytes per token, fixed part, knots, dominant parts of memory, and uncertainty."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.metrics import MIB, Metric
from vramsweep.analysis.model.curves import BASES, PLAIN, Curve
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.observations import AXES, NOUNS, UNITS, members
from vramsweep.analysis.model.pointwise_fit import Candidate
from vramsweep.analysis.model.predictors import Residual
from vramsweep.analysis.model.residual_model import Unaligned
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.search.fit_knowledge import PADDED_TO

LONGEST = 1e6  # tokens or samples, if the longest x is not given
Piece = tuple[float, float, float]  # a + b x + c x²


def equation(curve: Curve, metric: Metric, axis: str = "seq_len", longest: float = LONGEST) -> str:
    """Return `y = 2.9598x + 8163.2190 (MiB)`; several pieces as their maximum, or apart, each where it holds.

    A coefficient that adds nothing to these digits up to the `longest` x is not shown.
    """
    decimals = _decimals(metric)
    pieces = []
    for piece in curve.pieces:
        a, b, c = (value / metric.scale for value in _visible_piece(piece, metric, longest))
        if c:
            pieces.append(f"{c:.6g}x² {_signed(b, decimals)}x {_signed(a, decimals)}")
        elif b:
            slope = round(b, decimals) + 0.0  # not -0.0000
            pieces.append(f"{slope:.{decimals}f}x {_signed(a, decimals)}")
        else:
            pieces.append(f"{round(a, decimals) + 0.0:.{decimals}f}")
    if curve.edges:
        spans = [_span(start, stop, UNITS[axis]).removesuffix(", ") for start, stop, *_ in curve.lines()]
        return "; ".join(f"{span} y = {one}" for span, one in zip(spans, pieces, strict=True)) + f" ({metric.unit})"
    whole = pieces[0] if len(pieces) == 1 else f"max({', '.join(pieces)})"
    return f"y = {whole} ({metric.unit})"


def _decimals(metric: Metric) -> int:
    return 4 if metric.memory else 8


def _visible_piece(piece: Piece, metric: Metric, longest: float) -> Piece:
    """Return the piece without coefficients that round to nothing up to `longest`."""
    a, b, c = piece
    least = 0.5 * 10.0 ** -_decimals(metric) * metric.scale
    return a, b if abs(b) * longest >= least else 0.0, c if abs(c) * longest**2 >= least else 0.0


def _signed(value: float, decimals: int) -> str:
    rounded = round(value, decimals)
    return f"{'-' if rounded < 0 else '+'} {abs(rounded):.{decimals}f}"


def explain(fit: Fit) -> list[str]:
    """Explain the chosen model in sentences, one for each piece of each curve."""
    model = fit.chosen.model
    unit = UNITS[fit.axis]
    sentences = other_class(fit)
    for key, curve in model.curves.items():
        which = f"{NOUNS[fit.axis][1]} {'' if key else 'not '}divisible by {model.modulus}: "
        where = which if model.modulus else ""
        bounds = fit.intervals[key]
        pieces = curve.lines()
        for i, (start, stop, a, b, c) in enumerate(pieces):
            low, high = max(start, fit.range[0]), min(stop, fit.range[1])  # measured part of the piece
            piece = _visible_piece((a, b, c), fit.metric, fit.range[1])
            flat, line = _piece(fit, piece, low, high, bounds.get(f"b{i + 1}"))
            sentences.append(where + _span(start, stop, unit) + line + _dominates(fit, i, len(pieces), flat))
        for i, knot in enumerate(curve.knots, 1):
            low, high = bounds[f"k{i}"]
            if curve.edges:
                before, after = (a + b * knot + c * knot * knot for a, b, c in curve.pieces[i - 1 : i + 1])
                sentences.append(f"{where}{_jump(fit, after - before, knot)}")
            elif np.isfinite(knot):
                sure = f"95 % interval {low:,.0f} to {high:,.0f}"
                sentences.append(f"{where}the lines meet at {knot:,.0f} {unit} ({sure})")
    return sentences


def _class(divisible: bool) -> str:
    return f"lengths {'' if divisible else 'not '}divisible by {PADDED_TO}"


def other_class(fit: Fit) -> list[str]:
    """Say what lengths of the class with no, or a few, measured rows need; empty without such a class."""
    of = fit.predictor
    if not isinstance(of, Unaligned):
        return []
    new = fit.predict(of.of_other_class(np.array([fit.range[1] - 1])))
    which = f"only {_class(of.divisible)} were measured; others may need {'more' if of.divisible else 'less'}"
    if len(of.x):
        which = f"{_class(not of.divisible)} are estimated from only {len(np.unique(of.x))} of them"
    ends = _interval(fit.metric, float(new.new_low[0]), float(new.new_high[0]))
    return [f"{which}: a new run at {new.x[0]:,.0f} {UNITS[fit.axis]}: {ends} (95 %)"]


def _piece(fit: Fit, piece: Piece, low: float, high: float, interval: tuple[float, float] | None) -> tuple[bool, str]:
    """Return whether the piece is flat between these x, and its text; `interval` is that of its slope."""
    a, b, c = piece
    middle = (low + high) / 2
    if abs(b * (high - low) + c * (high**2 - low**2)) < 0.01 * float(np.abs(fit.points.y).max()):
        return True, f"flat at {fit.metric.show(a + b * middle + c * middle**2)}"
    return False, _parabola(fit, piece) if c else _line(fit, a, b, interval)


def _span(start: float, stop: float, unit: str) -> str:
    if np.isfinite(start) and np.isfinite(stop):
        return f"from {start:,.0f} to {stop:,.0f} {unit}, "
    if np.isfinite(stop):
        return f"up to {stop:,.0f} {unit}, "
    return f"from {start:,.0f} {unit} on, " if np.isfinite(start) else ""


def _jump(fit: Fit, size: float, x: float) -> str:
    """Describe a change of level, where two lines that do not meet change over or a quantity leaves its curve."""
    return f"it {'drops' if size < 0 else 'jumps'} by {fit.metric.show(abs(size))} at {x:,.0f} {UNITS[fit.axis]}"


def _each(fit: Fit) -> str:
    """Return the unit of a slope's x. Along length it is a position: a token of every sample of a micro-batch."""
    return "position" if fit.axis == "seq_len" else UNITS[fit.axis].removesuffix("s")


def _line(fit: Fit, fixed: float, slope: float, interval: tuple[float, float] | None) -> str:
    each = _each(fit)
    if fit.metric.memory:
        sure = f" (95 % interval {interval[0]:,.0f} to {interval[1]:,.0f})" if interval else ""
        return f"{slope:,.0f} bytes per {each}{sure} on top of a fixed part of {format_size(fixed)}"
    if fit.axis != "seq_len":
        return f"{_seconds(slope)} per {each}{_on_top(fixed)}"
    text = f"{_seconds(slope)} per position{_on_top(fixed)}"
    if fit.samples_per_step is None or slope <= 0:
        return text
    most = fit.samples_per_step / slope
    return f"{text} (throughput: {fit.samples_per_step:g} x length / step time, approaching {most:,.0f} tokens/s)"


def _on_top(fixed: float) -> str:
    """Return a step's fixed time in words; a line that would start below 0 tells none."""
    return f" on top of {_seconds(fixed)}" if fixed >= 0 else ""


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(value) * factor >= 0.1:
            return f"{value * factor:,.4g} {unit}"
    return f"{value * 1e6:,.4g} µs"


def _parabola(fit: Fit, piece: Piece) -> str:
    a, b, c = piece
    each = _each(fit)
    _, high = fit.range
    if fit.metric.memory:
        near = b * c > 0 and abs(b / c) < 10 * high
        equal = f"; the two are equal at {abs(b / c):,.0f} {UNITS[fit.axis]}" if near else ""
        fixed = f"on top of a fixed part of {format_size(a)}{equal}"
        text = f"{b:,.0f} bytes per {each} and {c:,.4g} bytes per {each}² {fixed}"
        typical = " (a part that grows with length squared is typical of attention that stores its scores)"
        return text + (typical if c * high > 0.25 * abs(b) and fit.axis == "seq_len" else "")
    return f"{_seconds(a)}, {_seconds(b)} per {each} and {_seconds(c)} per {each}²"


def _dominates(fit: Fit, piece: int, pieces: int, flat: bool) -> str:
    """Say what makes the peak on this piece, from the rows' phase peaks or else from the slope."""
    if not fit.metric.memory:
        return ""
    if phase := fit.phases[piece] if piece < len(fit.phases) else "":
        return f"; the {phase} phase has the largest peak there in most rows"
    if pieces == 1:
        return ""
    noun = NOUNS[fit.axis][0]
    if flat:
        return f"; {noun} does not matter there: weights, gradients and optimizer state dominate"
    return f"; activations and other tensors that grow with {noun} dominate"


def rests_on(fit: Fit) -> list[str]:
    """Say what values and intervals are based on, how sure that is, and what to measure next."""
    unit = UNITS[fit.axis]
    found = [f"values between and beyond the points are based {BASES[fit.basis]} ({fit.because})"]
    if fit.residual is not None:
        found.append(_residual(fit, fit.residual))
    if not fit.identified and fit.metric.memory and fit.only is None:
        found.append("more than one kind of curve is possible, or a piece has fewer points than parameters")
    at = fit.ahead
    ends = [_interval(fit.metric, *pair) for pair in zip(at.new_low, at.new_high, strict=True)]
    farther = f"; at {at.x[1]:,.0f}, outside the measured range: {ends[1]}" if len(ends) > 1 else ""
    found.append(f"a new run at {at.x[0]:,.0f} {unit}: {ends[0]}{farther} (95 %)")
    found += [_jump(fit, jump.size, jump.x) for jump in fit.jumps]
    for part in fit.wavering:
        found.append(
            f"{part.count} {NOUNS[fit.axis][1]} from {part.start:,.0f} to {part.stop:,.0f} {unit} lie "
            f"{fit.metric.show(abs(part.size))} {'below' if part.size < 0 else 'above'} their neighbours (median)"
        )
    if (one := fit.ranks) is not None:
        sizes = ", ".join(
            f"{fit.metric.show(v)} {n}" for v, n in ((one.least, "min"), (one.mean, "mean"), (one.most, "max"))
        )
        found.append(f"over {one.ranks} ranks at {one.x:,.0f} {unit}: {sizes}; they differ by {one.apart:.1%} (median)")
    if fit.next_x is not None and fit.metric.memory:
        found.append(f"to know more, measure {fit.next_x:,} {unit} next")
    return found


def _interval(metric: Metric, low: float, high: float) -> str:
    if not np.isfinite(high):
        return f"{metric.show(low)} or more"
    return " to ".join(dict.fromkeys((metric.show(low), metric.show(high))))


def _residual(fit: Fit, residual: Residual) -> str:
    """Say how far measured lies from predicted."""
    at = np.array(fit.range)
    ends = [float(v) for v in fit.predictor.value(at) - residual.predicted.value(at)]
    grows = {"line": "a line in tokens"}.get(residual.excess.posterior.kinds()[0], "a constant and a share of it")
    kind = "a constant" if abs(ends[1] - ends[0]) <= max(0.02 * abs(ends[1]), 2 * MIB) else grows
    left = fit.points.y - fit.predictor.value(fit.points.x)
    sizes = " to ".join(dict.fromkeys(f"{'plus' if v >= 0 else 'minus'} {fit.metric.show(abs(v))}" for v in ends))
    rms = fit.metric.show(float(np.sqrt(np.mean(left**2))))
    return f"measured equals predicted {sizes} ({kind}; RMS of the rest {rms})"


def text(fit: Fit) -> str:
    """Return the whole fit for a terminal: line and parabola always, then the chosen model and why."""
    metric = fit.metric
    low, high = fit.range
    n = len(fit.points.x)
    unit, first = UNITS[fit.axis], other_class(fit)
    lines = [
        f"{metric.label} against {AXES[fit.axis]}, {fit.label}: {n:,} rows, {fit.lengths:,} {NOUNS[fit.axis][1]}, "
        f"{low:,.0f} to {high:,.0f} {unit}",
        *(f"  {sentence}" for sentence in first),
    ]
    width = max(len(c.model.name) for c in fit.candidates)
    for candidate in fit.candidates:
        mark = "*" if candidate is fit.chosen else " "
        errors = f"RMS {_number(candidate.rms, metric)}, worst {number(candidate.worst, metric)}"
        quality = f"R² {format_r2(candidate.r2)}, {errors}, probability {candidate.probability:.3g}"
        lines.append(f"  {mark} {candidate.model.name:<{width}}  {quality}")
        if candidate is fit.chosen or candidate.model.kind in PLAIN:
            for key in candidate.model.curves:
                own = f", RMS {_number(_rms_of(fit, candidate, key), metric)}" if candidate.model.modulus else ""
                lines.append(f"      {of_class(fit, candidate, key)}{own}")
    lines.append(f"  * chosen: {fit.why}")
    lines += [f"    {sentence}" for sentence in (*explain(fit)[len(first) :], *rests_on(fit))]
    if ran_out := len(fit.points.bound_x) - fit.points.retried:
        of = "row that ran out of memory counts as a lower bound"
        of = of if ran_out == 1 else "rows that ran out of memory count as lower bounds"
        lines.append(f"    {ran_out:,} {of}")
    lines += [f"  ! {warning}" for warning in fit.warnings]
    where = "" if fit.only is None else f"for {_class(fit.only)} "
    lines.append(f"    holds {where}from {low:,.0f} to {high:,.0f} {unit}; beyond that it is a guess")
    return "\n".join(lines)


def equations(fit: Fit, candidate: Candidate) -> str:
    """Return the equations of all of a model's curves, in the metric's unit."""
    return "; ".join(of_class(fit, candidate, key) for key in candidate.model.curves)


def frame(fits: Sequence[Fit]) -> pd.DataFrame:
    """Return a row for each shown model of each fit: its equation in the metric's unit, its errors in the column's. It
    holds the value at the longest x, for the chosen model with the 95 % interval of a new run there."""
    rows = []
    for fit in fits:
        last = fit.predict(np.array([fit.range[1]]))
        for one in fit.shown:
            chosen = one is fit.chosen
            rows.append({
                "metric": fit.metric.column, "unit": fit.metric.column_unit, "settings": fit.label, "axis": fit.axis,
                "rows": len(fit.points.x), "first": fit.range[0], "last": fit.range[1], "model": one.model.name,
                "chosen": chosen, "equation": equations(fit, one), "r2": one.r2, "rms": one.rms, "worst": one.worst,
                "probability": one.probability, "rests_on": fit.basis if chosen else "points",
                "at_last": float((last.value if chosen else one.model.predict(last.x))[0]),
                "new_run_low": float(last.new_low[0]) if chosen else np.nan,
                "new_run_high": float(last.new_high[0]) if chosen else np.nan,
            })  # fmt: skip
    return pd.DataFrame(rows)


def _rms_of(fit: Fit, candidate: Candidate, key: bool) -> float:
    at = members(fit.points.x, candidate.model.modulus)[key]
    left = fit.points.y[at] - candidate.model.curves[key].predict(fit.points.x[at])
    return float(np.sqrt(np.mean(left**2))) if len(left) else float("nan")


def class_name(candidate: Candidate, key: bool, axis: str) -> str:
    """Return in words which lengths a curve is for; empty if for all."""
    if candidate.model.modulus is None:
        return ""
    return f"{NOUNS[axis][0]} % {candidate.model.modulus} {'==' if key else '!='} 0: "


def of_class(fit: Fit, candidate: Candidate, key: bool) -> str:
    """Return the equation of one of a candidate's curves, after the class it is for."""
    curve = candidate.model.curves[key]
    return class_name(candidate, key, fit.axis) + equation(curve, fit.metric, fit.axis, fit.range[1])


def number(value: float, metric: Metric) -> str:
    """Return a size in the metric's one unit, for columns of sizes."""
    return f"{_number(value, metric)} {metric.unit}"


def _number(value: float, metric: Metric) -> str:
    if metric.memory and abs(value) < 1:
        return "0"  # of a byte: rounding errors
    return f"{value / metric.scale:,.4g}" if np.isfinite(value) else "–"


def format_r2(value: float) -> str:
    """Return R² with enough digits to tell it from 1, four at least."""
    if not np.isfinite(value):
        return "–"
    digits = max(4, min(9, 1 - int(np.floor(np.log10(1 - value))))) if value < 1 else 4
    return f"{value:.{digits}f}"


def as_json(fit: Fit) -> dict[str, Any]:
    """Return the fit as plain data; numbers in the column's own unit (bytes, seconds), NaN and infinity as null."""
    at = fit.ahead
    ahead = zip(at.x, at.value, at.new_low, at.new_high, at.extrapolated, strict=True)
    return {
        "metric": fit.metric.column,
        "unit": fit.metric.column_unit,
        "settings": {k: _plain(v) for k, v in fit.settings.items()},
        "rows": len(fit.points.x),
        "lengths": fit.lengths,
        "censored": len(fit.points.bound_x),
        "range_tokens": list(fit.range),
        "outliers": list(fit.outliers),
        "only": None if fit.only is None else _class(fit.only),
        "axis": fit.axis,
        "chosen": fit.chosen.model.name,
        "basis": fit.basis,
        "identified": fit.identified,
        "rests_on": rests_on(fit),
        "next": fit.next_x,
        "predicted": [
            {"x": float(x), "value": _plain(y), "new_run": [_plain(low), _plain(high)], "extrapolated": bool(beyond)}
            for x, y, low, high, beyond in ahead
        ],
        "why": fit.why,
        "explanation": explain(fit),
        "warnings": list(fit.warnings),
        "candidates": [_candidate(fit, candidate) for candidate in fit.candidates],
    }


def _candidate(fit: Fit, candidate: Candidate) -> dict[str, Any]:
    def of_curve(key: bool, curve: Curve) -> dict[str, Any]:
        intervals = fit.intervals[key] if candidate is fit.chosen else None
        return {
            "class": class_name(candidate, key, fit.axis).rstrip(": ") or None,
            "equation": equation(curve, fit.metric, fit.axis, fit.range[1]),
            "rms": _plain(_rms_of(fit, candidate, key)),
            "parameters": {name: _plain(value) for name, value in curve.parameters.items()},
            "intervals": intervals and {name: [_plain(v) for v in ends] for name, ends in intervals.items()},
        }

    return {
        "model": candidate.model.name,
        "kind": candidate.model.kind,
        "modulus": candidate.model.modulus,
        **{name: _plain(getattr(candidate, name)) for name in ("r2", "rms", "worst", "probability")},
        "curves": [of_curve(key, curve) for key, curve in candidate.model.curves.items()],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def summary(fits: Sequence[Fit], brief: bool = False) -> str:
    """Return a line for each fit, for the end of a sweep; unless `brief`, its explanation follows."""
    lines = []
    for fit in fits:
        error = f"R² {format_r2(fit.chosen.r2)}, RMS {number(fit.chosen.rms, fit.metric)}"
        told = f"{equations(fit, fit.chosen)}, {error}"
        lines.append(f"{fit.metric.label}, {fit.label}: {told}")
        lines += [f"    {sentence}" for sentence in ([] if brief else explain(fit))]
    return "\n".join(lines)
