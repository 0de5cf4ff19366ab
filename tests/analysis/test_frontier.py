"""What fits: from the curve, marked where it extrapolates, and from real rows."""

from __future__ import annotations

import pandas as pd
import synthetic

from vramsweep.analysis.frontier import frontier, text
from vramsweep.analysis.load import Table, from_frame


def table(**options: object) -> Table:
    return from_frame(pd.DataFrame(synthetic.sweep(allocators=("default",), **options)), "test")  # type: ignore[arg-type]


def test_the_largest_length_lies_between_the_rows_that_prove_it() -> None:
    limits = {(limit.label, limit.gib): limit for limit in frontier(table(), [8, 24, 400])}
    inside = limits["batch 1", 8]
    assert inside.value is not None and inside.largest_ok is not None and inside.smallest_too_large is not None
    assert inside.largest_ok <= inside.value < inside.smallest_too_large
    assert not inside.extrapolated and len(inside.trial_ids) == 2
    assert inside.low is not None and inside.high is not None and inside.low <= inside.value <= inside.high
    beyond = limits["batch 1", 24]
    assert beyond.extrapolated and "beyond the measured" in beyond.remark
    assert limits["batch 1", 400].value is None and limits["batch 1", 400].remark.startswith("more than")


def test_nothing_fits_in_too_small_a_device() -> None:
    limit = frontier(table(batches=(1,)), [1])[0]
    assert limit.value is None and "not even 128 fits" in limit.remark


def test_the_largest_batch_per_length() -> None:
    rows = table(batches=(1, 2, 4, 8), lengths=(1024, 2048))
    limits = frontier(rows, [12], "micro_batch")
    assert {limit.label for limit in limits} == {"seq len 1024", "seq len 2048"}
    assert all(limit.axis == "micro_batch" and limit.value is not None for limit in limits)
    assert "samples" in text(limits)


def test_a_row_that_ran_out_of_memory_on_a_smaller_device_proves_nothing_about_a_larger_one() -> None:
    limits = {limit.gib: limit for limit in frontier(table(batches=(4,)), [24, 80])}
    assert limits[24].smallest_too_large == 4096
    assert limits[80].smallest_too_large is None
