"""Differences in words: percent, factors if they are large, bytes in one unit."""

from vramsweep.analysis.data.metrics import GIB, unit_of

FACTOR = 1.5  # from this ratio on, either way, a factor says more than percent
LEAST = 1e-12  # the smallest ratio of which 1 + change still has digits


def percent(change: float) -> str:
    """Return `+1.23 %` for 0.0123."""
    return f"{round(100 * change, 2) + 0.0:+.2f} %"


def size(change: float) -> str:
    """Return B/A − 1 in words: `-3.10 %`, or `0.49 x` if it is large."""
    return format_alike(change)[0]


def format_alike(*changes: float) -> list[str]:
    """Return several changes in the same words: factors if one of them is large."""
    if all(1 / FACTOR < 1 + change < FACTOR for change in changes):
        return [percent(change) for change in changes]
    return [f"{1 + change:,.3g} x" for change in changes]


def speed(change: float) -> str:
    """Return a change of tokens/s in words: `+3.10 %`, or `2.2 x faster`, `5.1 x slower` if it is large."""
    ratio = 1 + change
    if 1 / FACTOR < ratio < FACTOR:
        return percent(change)
    if ratio > 1:
        return f"{ratio:,.3g} x faster"
    return f"{1 / ratio:,.3g} x slower" if ratio > LEAST else "slower beyond measure"


def in_bytes(*values: float, signed: bool = True) -> list[str]:
    """Return bytes in the one unit that suits the largest of them. GiB have one digit after the point, two if one of
    them is below 1 or two of them would look alike."""
    unit, sign = unit_of(max(map(abs, values), default=0.0)), "+" if signed else ""
    digits = unit.digits
    if unit.bytes == GIB and all(not value or abs(value) >= 0.995 * GIB for value in values):
        digits = 2 if len({round(value / GIB, 1) for value in values}) < len(set(values)) else 1
    shown = [round(value / unit.bytes, digits) + 0.0 for value in values]
    return [f"{value:{sign},.{digits}f} {unit.name}" for value in shown]
