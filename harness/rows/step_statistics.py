"""Tests of whether a row's step times come from one steady state: spread, drift, an odd first or last step. Pure.

The steps of a steady state are alike whatever their order. So the tests compare them with steps in random order. They
also ask whether the published speed (the mean of the steps) would change by what `compare` can tell apart. Thresholds,
sources and false-alarm rates: docs/how_measurement_works.md. quality_flags.py leaves out steps of different lengths,
whose times differ for a reason.
"""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from itertools import combinations

DEVIATION = 0.10  # standard deviation over the mean, from which `pyperf check` calls a benchmark unstable
OUTLIER = 0.50  # share of the mean by which the shortest or longest step may lie off it, as there
FALSE_ALARM = 0.01  # chance that `is_drifting` or `outlying_end` is true of independent steps
MOVES = 0.01  # share of the mean that `compare` tells apart (analysis/compare/verdicts.py, MARGIN)
ODD = 8.0  # robust standard deviations; Iglewicz and Hoaglin's 3.5 would be a false alarm in 9 % of rows of ten steps
FEWEST = 10  # steps needed to judge an end by the others
FEWEST_OF_A_DRIFT = 6  # with five steps the rarest order has a chance of 1.7 %
MAD_TO_SD = 1.4826  # of normal noise
MOST = 1000  # steps compared pair by pair; more are averaged in runs to this many means
EXACT = 60  # steps up to which the chance of a rank sum is counted exactly; beyond, a normal distribution is assumed


def spread(times: Sequence[float]) -> float | None:
    """Return standard deviation over mean of the steps; None for fewer than two, or if time did not pass."""
    mean = _mean(times)
    return None if mean is None else statistics.stdev(times) / mean


def is_noisy(times: Sequence[float]) -> bool | None:
    """Apply pyperf's test of a benchmark's values: standard deviation, shortest and longest."""
    mean, deviation = _mean(times), spread(times)
    if mean is None or deviation is None:
        return None
    return deviation >= DEVIATION or any(abs(end - mean) >= OUTLIER * mean for end in (min(times), max(times)))


def is_drifting(times: Sequence[float]) -> bool | None:
    """Return whether steps get faster (warm-up went on) or slower, by a test of ranks and by enough to change the mean.

    The test is Mann's (1945) and Kendall's at `FALSE_ALARM`, two-sided. Sen's (1968) slope over all steps must reach
    twice `MOVES`, which is half as much in the mean. None for fewer than `FEWEST_OF_A_DRIFT` steps.
    """
    if len(times) < FEWEST_OF_A_DRIFT or _mean(times) is None:
        return None
    some = _fewer(times)
    return p_value(some) < FALSE_ALARM and abs(drift(some)) >= 2 * MOVES


def _fewer(times: Sequence[float]) -> Sequence[float]:
    """Return at most `MOST` values: means of runs of equally many steps, which are as good as steps for a test of
    order. Pairs of all steps of a long training would take hours and all memory."""
    each = -(-len(times) // MOST)
    if each == 1:
        return times
    return [statistics.fmean(times[at : at + each]) for at in range(0, len(times) - each + 1, each)]


def p_value(times: Sequence[float]) -> float:
    """Return the chance that random order rises or falls at least as steadily; cautious, ties count for neither."""
    score = abs(sum((after > before) - (after < before) for before, after in combinations(times, 2)))
    n = len(times)
    if n <= EXACT:
        pairs = n * (n - 1) // 2
        return min(1.0, 2 * sum(_orders(n)[: (pairs - score) // 2 + 1]))
    deviation = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return 2 * (1 - statistics.NormalDist().cdf(max(score - 1, 0) / deviation))


def drift(times: Sequence[float]) -> float:
    """Return the change from first to last step by Sen's slope (median over pairs), over the median step."""
    slopes = [(times[j] - times[i]) / (j - i) for i, j in combinations(range(len(times)), 2)]
    return statistics.median(slopes) * (len(times) - 1) / statistics.median(times)


def outlying_end(times: Sequence[float]) -> bool | None:
    """Return whether the first or last step is not like the others, and changes the mean by at least `MOVES`.

    It must be off their median by more than `ODD` times their median absolute deviation (as a standard deviation). None
    for fewer than `FEWEST` steps.
    """
    if len(times) < FEWEST or _mean(times) is None:
        return None
    return any(_is_outlying(end, others) for end, others in ((times[0], times[1:]), (times[-1], times[:-1])))


def _is_outlying(end: float, others: Sequence[float]) -> bool:
    middle = statistics.median(others)
    spread = MAD_TO_SD * statistics.median(abs(time - middle) for time in others)
    off = abs(end - middle)
    return off > ODD * spread and off >= MOVES * middle * (len(others) + 1)


def _mean(times: Sequence[float]) -> float | None:
    if len(times) < 2 or min(times) <= 0:
        return None
    return statistics.fmean(times)


@cache
def _orders(n: int) -> list[float]:
    """Return the share of all orders of n different values that have 0, 1, 2, ... inverted pairs (Kendall 1938)."""
    shares = [1.0]
    for length in range(2, n + 1):
        longer = [0.0] * (len(shares) + length - 1)
        for pairs, share in enumerate(shares):
            for more in range(length):
                longer[pairs + more] += share / length
        shares = longer
    return shares
