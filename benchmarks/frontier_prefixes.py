"""Compare the maximum length or batch, fitted to the beginning of a sweep, with the rest of the sweep.

    python benchmarks/frontier_prefixes.py ROWS [--columns ...] [--set ...] [--axis seq_len|micro_batch]

A question takes the first rows of a sweep, all of them or eight, and a memory size that a later row exceeds. Does the
95 % interval hold the largest value that fits? Prints how often, for all questions and for those whose interval has
both ends (an open end cannot miss), how often every row up to the lower end fits, and the curve's median error.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vramsweep.analysis.data.importers import open_rows
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import GIB
from vramsweep.analysis.model.memory_frontier import frontier
from vramsweep.analysis.model.observations import along

REACH = 4  # as memory_frontier.REACH


@dataclass(frozen=True)
class Asked:
    """A question and its answer; `low` and `high` are None where the fit gives no such end.

    `truth` is the longest row up to which all rows fit, and the largest value that may fit. The latter is one less than
    `first_over`, the first row that does not fit; if a later row fits again, the last row that fits.
    """

    upto: float
    gib: float
    truth: tuple[float, float]
    first_over: float
    low: float | None
    value: float | None
    high: float | None

    @property
    def open(self) -> bool:
        """Return whether the interval lacks an end."""
        return self.low is None or self.high is None

    @property
    def safe(self) -> bool:
        """Return whether every row up to the lower end fits."""
        return self.low is None or self.low < self.first_over

    @property
    def holds(self) -> bool:
        """Return whether a right value lies in the interval; several are right if rows have gaps or waver."""
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        return low <= self.truth[1] and high >= self.truth[0]


def ask(table: Table, axis: str = "seq_len", counts: Sequence[int] = (0, 8), questions: int = 24) -> list[Asked]:
    """Return questions about prefixes of a table of one group, answered; a count of 0 takes all rows of a prefix."""
    frame = table.frame[table.frame["peak_reserved_bytes"].notna()]
    x, y = along(frame, axis), frame["peak_reserved_bytes"].to_numpy(float)
    order = np.argsort(x, kind="stable")
    frame, x, y = frame.iloc[order], x[order], y[order]
    different = np.unique(x)
    random = np.random.default_rng(0)
    found = []
    for count in counts:
        for _ in range(questions):
            end = int(random.integers(max(5, len(different) // 8), max(len(different) - 1, 6)))
            upto = different[min(end, len(different) - 2)]
            inside = np.flatnonzero(x <= upto)
            later = np.flatnonzero((x > upto) & (x <= REACH * upto))
            if not len(later):
                continue
            limit = float(y[random.choice(later)]) + 1
            over = np.flatnonzero(y > limit)
            if not len(over) or x[over[0]] <= upto:
                continue
            first_over, last_ok = float(x[over[0]]), float(x[np.flatnonzero(y <= limit)[-1]])
            truth = (float(different[np.searchsorted(different, first_over) - 1]), max(last_ok, first_over - 1))
            taken = inside if not count else inside[np.unique(np.linspace(0, len(inside) - 1, count).astype(int))]
            gib = limit / GIB
            mask = table.frame.index.to_series().isin(frame.index[taken])
            limits = [one for one in frontier(table.where(mask), [gib], axis) if one.multiples_of is None]
            if limits:
                one = limits[0]
                found.append(Asked(float(upto), gib, truth, first_over, one.low, one.value, one.high))
    return found


def main() -> None:
    """Print how often the interval holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--columns")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--axis", default="seq_len")
    arguments = parser.parse_args()
    table, _ = open_rows(arguments.rows, arguments.columns, arguments.settings)
    found = ask(table, arguments.axis)
    for one in found:
        print(f"{'holds ' if one.holds else 'MISSES'} up to {one.upto:,.0f}, {one.gib:.2f} GiB: {one.truth} in "
              f"[{one.low}, {one.high}], curve {one.value}")  # fmt: skip
    off = [abs(one.value / one.truth[0] - 1) for one in found if one.value is not None]
    closed = [one for one in found if not one.open]
    print(
        f"{sum(one.holds for one in found)} of {len(found)} hold, {sum(one.holds for one in closed)} of the "
        f"{len(closed)} whose ends are both known; all rows up to the lower end fit in "
        f"{sum(one.safe for one in found)}; the curve is off by {np.median(off):.1%} (median)"
    )


if __name__ == "__main__":
    main()
