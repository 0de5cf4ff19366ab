"""Test the expected time of the rest of a sweep, on a clock of the test's own."""

import pytest

from vramsweep.harness.sweep.budget import PREDICTED_S
from vramsweep.harness.sweep.progress import Pace


class Course:
    """A sweep in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = Pace(lambda: self.now)

    def trace(self, seconds: float, traced: int, families: int) -> None:
        """Trace a family for so long, as the parent hears of it."""
        self.pace.count_traced(traced - 1, families, tracing=True)
        self.now += seconds
        self.pace.count_traced(traced, families, tracing=False)

    def rows(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.now += seconds
            self.pace.count_row()


def test_measured_trials_take_as_long_as_those_before() -> None:
    course = Course()
    assert course.pace.seconds_left(4) is None
    course.rows(2, 30)
    assert course.pace.seconds_left(4) == 120
    course.now += 20
    assert course.pace.seconds_left(4) == 100
    course.now += 101
    assert course.pace.seconds_left(4) is None  # it has turned out wrong
    assert course.pace.seconds_left(0) == 0


def test_at_42_of_84_the_second_half_still_has_to_be_traced() -> None:
    course = Course()
    course.now += 8  # imports
    course.trace(60, 1, 2)
    assert course.pace.seconds_left(84) is None  # no row tells yet how long one takes
    course.rows(42, 0.25)
    assert course.pace.seconds_left(42) == pytest.approx(42 * 0.25 + 60)
    course.pace.count_traced(1, 2, tracing=True)
    course.now += 40
    course.pace.count_traced(1, 2, tracing=True)
    assert course.pace.seconds_left(42) == pytest.approx(42 * 0.25 + 20)
    course.now += 40
    assert course.pace.seconds_left(42) is None  # the second takes longer than the first
    course.trace(0, 2, 2)
    assert course.pace.seconds_left(42) == pytest.approx(42 * 0.25)


def test_changes_that_have_a_trace_each() -> None:
    course = Course()
    course.pace.count_traced(0, 20, tracing=True)
    assert course.pace.seconds_left(20) is None
    course.now += 10
    course.pace.count_traced(5, 20, tracing=True)
    assert course.pace.seconds_left(20) == pytest.approx(15 * 2 + 20 * PREDICTED_S)


def test_another_worker_begins_anew_and_kept_traces_take_no_time() -> None:
    course = Course()
    course.trace(100, 1, 1)
    course.rows(10, 1)
    course.now += 7  # imports
    course.trace(30, 1, 3)
    course.rows(10, 1)
    assert course.pace.seconds_left(10) == pytest.approx(10 * (27 / 20) + 2 * 30)
    kept = Course()
    kept.trace(0, 1, 2)
    kept.rows(4, 0.5)
    assert kept.pace.seconds_left(4) == pytest.approx(2)
