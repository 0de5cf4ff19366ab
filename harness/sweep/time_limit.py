"""The time that a sweep may take, as the user gives it: a time, or a cost at a price an hour."""

from __future__ import annotations

import math

from vramsweep.harness.messages import units
from vramsweep.harness.messages.errors import UserError


def parse_limit(budget: object, max_cost: object, price_per_hour: object) -> tuple[float, str] | None:
    """Return the seconds that a sweep may take and the setting that says so, in words; None if there is no limit.

    Of a time and a cost the tighter one counts. Raises UserError for invalid values.
    """
    given = None if budget is None else units.parse_seconds(str(budget), f"budget={budget}")
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
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    left = round(spent) if spent < 3600 else 60 * round(spent / 60)
    parts = []
    for size, name in units:
        count, left = divmod(left, size)
        parts += [f"{count} {name}"] if count else []
    return " ".join(parts[:2])
