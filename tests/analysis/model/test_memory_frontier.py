"""Test the longest that fits: from the curve, marked as extrapolated beyond the data, and from real rows."""

from pathlib import Path

import pandas as pd
import pytest
import synthetic
from conftest import Cli

from vramsweep.analysis.data.load import POSITIONS, Table, from_frame
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.model.memory_frontier import ALL, Limit, frontier, text
from vramsweep.analysis.model.observations import allocator_limits, observations

pytestmark = pytest.mark.deterministic


def table(**options: object) -> Table:
    return synthetic.table(synthetic.sweep(allocators=("default",), **options))  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_largest_length_lies_between_the_rows_that_prove_it() -> None:
    limits = {(limit.label, limit.gib): limit for limit in frontier(table(batches=(1, 4)), [1, 8, 23, 24, 80, 400])}
    inside = limits["batch 1", 8]
    assert inside.value is not None and inside.largest_ok is not None and inside.smallest_too_large is not None
    assert inside.largest_ok <= inside.value < inside.smallest_too_large
    assert not inside.extrapolated and len(inside.trial_ids) == 2
    assert inside.low is not None and inside.high is not None and inside.low <= inside.value <= inside.high
    beyond = limits["batch 1", 24]
    assert beyond.extrapolated and "beyond the measured" in beyond.remark
    assert limits["batch 1", 400].value is None and limits["batch 1", 400].remark.startswith("more than")
    assert limits["batch 1", 1].value is None and "not even 128 fits" in limits["batch 1", 1].remark
    assert limits["batch 4", 23].smallest_too_large == 4096
    assert limits["batch 4", 80].smallest_too_large is None  # what a smaller device's row proves nothing about


@pytest.mark.slow
def test_no_curve_is_read_beyond_what_the_model_has_positions_for() -> None:
    def limits(positions: object) -> dict[float, Limit]:
        rows = [row | {POSITIONS: positions} for row in synthetic.curve((128, 256, 512, 1024))]
        return {limit.gib: limit for limit in frontier(synthetic.table(rows), [3.8, 80])}

    for positions, free in ((None, True), ("8192", True), ("512", True), ("2048", False), ("1024", False)):
        limit = limits(positions)[80]  # "512": a row ran longer
        assert (limit.value is None and limit.remark == "more than 4,096") == free
        assert free or (limit.value == limit.high == int(str(positions)) and limit.remark == ALL)
    assert limits("1024")[80].proven and not limits("1024")[80].extrapolated
    assert not limits("2048")[80].proven and limits("2048")[80].extrapolated
    assert "1,024 tokens fitted; all that the model has positions for (" in text([limits("1024")[80]])
    tight = {
        "outcome": "oom", "seq_len": 1100, "trial_id": "o",
        **dict.fromkeys(("peak_reserved_bytes", "device_used_bytes")),
    }  # fmt: skip
    rows = synthetic.curve((128, 256, 512, 1024), device_gib=80)
    known = [row | {POSITIONS: "2048"} for row in (*rows, rows[0] | tight)]
    [limit] = frontier(synthetic.table(known), [80])
    assert limit.high is None or limit.high < 1100  # which did not fit
    short = limits("1024")[3.8]
    assert short.value is None or (short.value < 1024 and short.remark != ALL)


@pytest.mark.slow
def test_the_largest_batch_per_length() -> None:
    rows = table(batches=(1, 2, 4, 8), lengths=(1024, 2048))
    limits = frontier(rows, [12], "micro_batch")
    assert {limit.label for limit in limits} == {"1,024 tokens", "2,048 tokens"}
    assert all(limit.axis == "micro_batch" and limit.value is not None for limit in limits)
    assert "samples" in text(limits)


@pytest.mark.slow
def test_a_size_is_what_a_card_of_it_really_leaves() -> None:
    """An 80 GiB card never has 80 GiB for tensors, and NVML's figure counts the context, which is not a tensor."""
    rows = pd.DataFrame(synthetic.sweep(allocators=("default",), batches=(1,), device_gib=200))
    for basis in ("device_used_bytes", "peak_reserved_bytes"):
        frame = rows if basis == "device_used_bytes" else rows.assign(device_used_bytes=None)
        frame.loc[0, basis] = 79 << 30  # of 80 GiB; no 80 GiB card's allocator has it
        (limit,) = frontier(from_frame(frame.iloc[:1], "test"), [80])
        assert 78 < limit.usable_gib < 79
        assert (limit.largest_ok is None) == (basis == "peak_reserved_bytes")
        assert "80 GiB (78.3 usable)" in text([limit])
    (odd,) = frontier(from_frame(rows.iloc[:1], "test"), [83])
    assert odd.usable_gib == 83
    assert "83 GiB:" in text([odd])


def test_a_simulated_row_that_did_not_fit_needed_more_than_its_card_s_allocator_has() -> None:
    """Not more than the card's memory: between the two lies the CUDA context."""
    rows = pd.DataFrame(synthetic.sweep(allocators=("default",), batches=(4,)))
    limit = rows["outcome"].eq("ok").map({True: 20 << 30, False: None})
    frame = from_frame(rows.assign(memory_limit_bytes=limit), "test").frame
    assert set(allocator_limits(frame)) == {20 << 30}
    points = observations(frame, METRICS["peak_reserved_bytes"])
    assert len(points.bound_y) and set(points.bound_y) == {20 << 30}
    measured = from_frame(rows, "test").frame
    assert max(allocator_limits(measured)) < 24 << 30


@pytest.mark.parametrize("gib", ["nan", "inf", "0", "-24", "24,x", "24,", "24G"])
def test_sizes_are_numbers_above_nothing(tmp_path: Path, cli: Cli, gib: str) -> None:
    rows = synthetic.write(tmp_path, synthetic.sweep((128,), (1,), ("default",)))
    said = cli.refuse("frontier", rows, f"--gib={gib}")
    assert said.startswith("vramsweep: --gib: ") and ("write for example 24GiB" in said or "24GiB (units of" in said)


@pytest.mark.slow
def test_a_row_out_of_memory_below_a_length_that_ran_is_said_and_neither_contradicted(tmp_path: Path) -> None:
    """Something else held memory there, or it wavers."""
    rows = pd.DataFrame(synthetic.sweep(allocators=("default",), batches=(1,), repeats=1))
    lost = rows["seq_len"].eq(256)
    gone = dict.fromkeys([name for name in rows if "peak" in str(name)] + ["device_used_bytes", "tokens_per_s"])
    rows.loc[lost, list(gone)] = None
    (limit,) = frontier(from_frame(rows.assign(outcome=rows["outcome"].mask(lost, "oom")), "test"), [24])
    assert (limit.smallest_too_large, limit.largest_ok) == (256, 8192)
    assert "results from 256 to 8,192 contradict each other" in limit.remark
    assert limit.low is None or limit.low < 256
    assert "256 did not" in text([limit])


def test_a_foreign_row_out_of_memory_below_a_length_that_ran(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "x.csv"
    file.write_text(
        "seq_len,peak_reserved_mib,device_total_gib\n128,1000,80\n256,OOM,80\n512,1160,80\n1024,1240,80\n2048,1500,80\n"
    )
    said = cli.run("frontier", file, "--gib", "80").out
    assert "2,048 tokens fitted; 256 did not; results from 256 to 2,048 contradict each other" in said
    file.write_text(file.read_text().replace("256,OOM", "1,OOM"))  # and nothing shorter is safe
    (limit,) = cli.json("frontier", file, "--gib", "80")
    assert (limit["low"], limit["largest_ok"], limit["smallest_too_large"]) == (None, 2048, 1)
