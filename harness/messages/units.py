"""Sizes and times as they are typed, and sizes as they are shown; no other module reads or writes them.

A size needs its unit, because a bare 24 could be bytes, GB or GiB; so does a time. An option or a setting that is named
after its unit (`--gib`, `device.memory_gib`, `timeout_s`) takes a bare number of it, and any other unit too. Money is a
bare number everywhere, in any currency, the same for all.

PyTorch reads the sizes in PYTORCH_CUDA_ALLOC_CONF (allocator/config.py).
"""

import math
import re

from vramsweep.harness.messages.errors import UserError

GIB = 1 << 30
LEAST = 0.01  # GiB, or of another unit, that is shown as a number, at least
MOST = (1 << 63) - 1  # bytes: the largest whole number of PyTorch, of JSON readers and of a table
SIZES = {"B": 1}
SIZES |= {f"{prefix}{unit}": 1 << 10 * (i + 1) for i, prefix in enumerate("KMGTP") for unit in ("iB", "i")}
SIZES |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGTP")}
TIMES = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"\d+(?:\.\d+)?"
_MEASURE = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)", re.ASCII)
_TIME = re.compile("".join(rf"(?:({_NUMBER}){unit})?" for unit in TIMES), re.ASCII | re.IGNORECASE)
# A key's ending says the unit of a bare number, and how many bytes or seconds that is.
_NAMED = (("_gib", "size", GIB), ("_s", "time", 1), ("hours", "time", 3600))


def parse_size(text: str, said: str | None = None) -> int:
    """Return the bytes of "24GiB", "512 MiB", "80GB" or "512B"; `said` is how it was typed, if that is more.

    Raises UserError for what is no size above 0, for a number without its unit and for 24G, which may be either.
    """
    said = f"{text!r:.60}" if said is None else said
    found = _MEASURE.fullmatch(text.strip())
    if found is None:
        raise UserError(f"{said} is not a size; write for example 24GiB, 512MiB or 80GB")
    number, unit = found.groups()
    if not unit:
        raise UserError(f"{said} has no unit; use {number}GiB (2^30 bytes), {number}GB (10^9), {number}MiB, {number}B")
    if unit.upper() in "KMGTP":
        unit = unit.upper()
        raise UserError(f"{said} is ambiguous; write {number}{unit}iB (units of 1024) or {number}{unit}B (of 1000)")
    if unit not in SIZES:  # 24gib and 24GIB mean GiB; 24Gb would be bits
        plain = next((known for known in SIZES if unit in (known.lower(), known.upper())), None)
        if plain is None:
            raise UserError(f"{said} has an unknown unit; write for example 24GiB, 512MiB or 80GB")
        unit = plain
    bytes_ = float(number) * SIZES[unit]
    if not bytes_ >= 1:
        raise UserError(f"{said} is not a size above 0; write for example 24GiB, 512MiB or 80GB")
    if bytes_ > MOST:
        raise UserError(f"{said} is more than any memory; allowed are up to 8 EiB")
    return int(bytes_)


def gib(text: str, said: str | None = None) -> float:
    """Return the GiB of a bare number, or of a size with its unit. Raises UserError for what is no size above 0."""
    return parse_size(f"{text}GiB" if _bare(text) else text, said or text) / GIB


def format_count(number: int, what: str) -> str:
    """Return `1 row` or `1,234 rows`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def format_gib(size: float) -> str:
    """Return bytes as a number of GiB, for pairs of them."""
    return format_in("GiB", size)


def choose_unit(largest: float) -> str:
    """Return the one unit of a table by its largest size: GiB, or MiB if GiB would leave hardly a digit."""
    return "MiB" if 0 < largest < GIB / 10 else "GiB"


def format_in(unit: str, size: float) -> str:
    """Return bytes as a number of the unit, for a column: one digit after the point, two below 1."""
    number = size / SIZES[unit]
    if 0 < abs(number) < LEAST / 2:
        return f"<{LEAST}"
    return f"{number:,.{1 if abs(number) >= 0.995 or not number else 2}f}"


def format_size(size: float) -> str:
    """Return bytes with the unit that suits a size that stands alone: 11.4 GiB, 0.46 GiB, 9.0 MiB, 512 B."""
    if abs(size) >= GIB / 10:
        return f"{format_gib(size)} GiB"
    unit = next((name for name in ("MiB", "KiB") if abs(size) >= SIZES[name]), "B")
    return f"{size / SIZES[unit]:,.{0 if unit == 'B' else 1}f} {unit}"


def format_estimate(value: float) -> str:
    """Format an estimate with two digits, because more of them mean nothing."""
    digits = 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def parse_seconds(text: str, said: str | None = None) -> float:
    """Return seconds of 90m, 8h, 1h30m, 1d or 3600s. Raises UserError if it is no time above 0, or has no unit."""
    said = text if said is None else said
    plain = "".join(text.split())
    if _bare(plain) and 0 < float(plain) < math.inf:
        raise UserError(f"{said} has no unit; use {plain}m, {plain}h or {plain}s")
    found = _TIME.fullmatch(plain)
    spent = math.nan
    if found and plain:
        spent = sum(float(number or 0) * unit for number, unit in zip(found.groups(), TIMES.values(), strict=True))
    if not 0 < spent < math.inf:
        raise UserError(f"{said} is not a time above 0; write for example 90m, 8h, 1h30m or 3600s")
    return spent


def parse_limit(budget: object, max_cost: object, price_per_hour: object) -> tuple[float, str] | None:
    """Return the seconds that a sweep may take and the setting that says so, in words; None if there is no limit.

    Of a time and a cost the tighter one counts. Raises UserError for invalid values.
    """
    given = None if budget is None else parse_seconds(str(budget), f"budget={budget}")
    limits = [] if given is None else [(given, f"budget of {duration_words(given)}")]
    for name, value in (("max_cost", max_cost), ("price_per_hour", price_per_hour)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and 0 < float(str(value)) < math.inf):
            raise UserError(f"{name}={value}: allowed is a number above 0, in any currency, or null")
    if max_cost is not None:
        if price_per_hour is None:
            raise UserError(
                f"max_cost={max_cost} needs price_per_hour, the price of the whole node in the same currency, as "
                "max_cost=40 price_per_hour=12.5"
            )
        cost, price = float(str(max_cost)), float(str(price_per_hour))
        limits.append((3600 * cost / price, f"max_cost of {cost:g} at {price:g} an hour"))
    return min(limits, default=None)


def duration_words(spent: float) -> str:
    """Format seconds in the two largest units: 8 h, 1 h 30 min, 12 s."""
    if spent < 10:
        return f"{spent:.2g} s"
    left = round(spent) if spent < 3600 else 60 * round(spent / 60)
    parts = []
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        count, left = divmod(left, size)
        parts += [f"{count} {name}"] if count else []
    return " ".join(parts[:2])


def in_its_unit(key: str, text: str) -> str:
    """Return a setting's value as a bare number of the unit in its key's name: 22.35… for device.memory_gib=24GB.

    All else that is typed (null, a range, a bare number) comes back as it is. Raises UserError for an unknown unit.
    """
    of = next((one for one in _NAMED if key.rpartition(".")[2].endswith(one[0])), None)
    if of is None or _bare(text) or not text[:1].isdigit() or not text.replace(".", "").replace(" ", "").isalnum():
        return text
    if re.fullmatch(r"[\d.]+e\d+", text, re.IGNORECASE):
        return text
    _, kind, unit = of
    found = parse_size(text, f"{key}={text}") if kind == "size" else parse_seconds(text, f"{key}={text}")
    number = found / unit
    return str(int(number)) if number.is_integer() else repr(number)


def _bare(text: str) -> bool:
    return re.fullmatch(_NUMBER, text.strip(), re.ASCII) is not None
