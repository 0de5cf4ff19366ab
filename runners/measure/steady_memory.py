"""Checks whether memory stays the same from step to step, measured or predicted. Pure, without torch."""

import itertools
from collections.abc import Sequence

NO_BACKWARD = "torch.autograd ran no backward pass"
PHASES_UNKNOWN = f"the peaks of the phases are unknown, because {NO_BACKWARD}"


def step_growth(held: Sequence[int | None]) -> int | None:
    """Return the smallest growth from step end to step end; None for fewer than three steps or unknown values.

    A step that ends with no more than another leaks nothing.
    """
    known = all_known(held)
    if known is None or len(known) < 3:
        return None
    return min(after - before for before, after in itertools.pairwise(known))


def steps_until_full(steps: int, growth: int | None, free: int | None) -> int | None:
    """Return after how many steps memory is full if `free` bytes were left after `steps` steps, at the last one's peak;
    None without growth or for unknown values."""
    return None if growth is None or free is None or growth <= 0 else steps + max(free, 0) // growth


def reached_plateau(reserved: list[int | None]) -> bool | None:
    """Check whether peak reserved had stopped rising by half-way; None for fewer than two steps or unknown values."""
    known = all_known(reserved)
    if known is None or len(known) < 2:
        return None
    return max(known[len(known) // 2 :]) <= max(known[: len(known) // 2])


def all_known(values: Sequence[int | None]) -> list[int] | None:
    """Return the values; None if any of them is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None
