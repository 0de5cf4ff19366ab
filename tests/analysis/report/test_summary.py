"""Test the end of a finished sweep: a row for each configuration and three findings, on one screen."""

from pathlib import Path

import pytest
import synthetic
from conftest import Cli

from vramsweep.analysis.data.load import POSITIONS
from vramsweep.analysis.report.summary import Summary, summary, text
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.rows.schema import Row

pytestmark = pytest.mark.deterministic
GIB = 2**30


def of(rows: list[Row]) -> Summary:
    return summary(synthetic.table(rows))


def test_a_row_says_what_was_tried_what_fits_and_what_it_takes() -> None:
    found = of(synthetic.sweep())  # 1.5 MB a token; default reserves 15 % more, and 128 MiB; 24 GiB
    lines = {line.label: line for line in found.lines}
    assert list(lines) == [f"{a} · batch {b}" for a in ("default", "expandable") for b in (1, 2, 4)]
    assert {line.tried for line in lines.values()} == {8192}
    assert [line.fits for line in lines.values()] == [8192, 6144, 3072] * 2
    for line in lines.values():
        assert line.mib_per_token == pytest.approx(1_500_000 / 2**20, rel=1e-3)
        assert not line.estimated and not line.predicted and not line.torn
    assert lines["default · batch 1"].reserved_over_allocated == pytest.approx(1.15 + 0.125 / 13.4, abs=0.005)
    fits, change, _ = found.findings
    most = "Up to 8,192 tokens fit (2 of 6 configurations), least with default · batch 4: 3,072 tokens."
    assert fits == most
    assert change.startswith("expandable instead of default saves 11 %: 15.6 GiB to 13.8 GiB reserved at 8,192 tokens")
    assert found.title == "synthetic: 104 ok · 16 oom\nmeasured on Synthetic 24 GB"


def test_rows_that_are_all_invalid_come_to_no_line() -> None:
    found = of([row | {"outcome": "invalid"} for row in synthetic.curve((64, 128))])
    assert not found.lines and found.title.startswith("synthetic: 2 invalid")
    assert "in the report" not in text(found, 120) and "MiB per token" not in text(found, 120)


def test_a_setting_that_another_follows_is_compared() -> None:
    """Ways of sharding come with their number of GPUs."""
    one = synthetic.curve((256, 512, 1024), sharding="none", world_size=1)
    some = synthetic.curve((256, 512, 1024), sharding="fsdp2", world_size=8)
    less = [row | {name: row[name] // 3 for name in ("peak_allocated_bytes", "peak_reserved_bytes")} for row in some]
    named = [row | {"trial_id": f"{row['trial_id']}-8"} for row in less]
    assert any("fsdp2 instead of no sharding saves 67 %" in said for said in of([*one, *named]).findings)


def test_positions_are_all_only_where_every_configuration_goes_as_far() -> None:
    far, near = ([row | {POSITIONS: "1024", "allocator": name, "trial_id": f"{name}{row['seq_len']}"}
                  for row in synthetic.curve(lengths)]
                 for name, lengths in (("default", (256, 512, 1024)), ("expandable", (256, 512))))  # fmt: skip
    assert any("no more positions" in said for said in of(far).findings)
    assert any("More was not tried" in said for said in of([*far, *near]).findings)


def test_several_batches_of_one_length_are_along_the_batch() -> None:
    found = of(synthetic.sweep(lengths=(512,), batches=(1, 2, 4, 64)))
    assert found.axis == "micro_batch" and [line.fits for line in found.lines] == [4, 4]
    assert found.lines[0].mib_per_token == pytest.approx(1_500_000 / 2**20, rel=0.3)  # a flat part is in it
    said = text(found, 120)
    assert "first batch" in said and "first length" not in said
    assert (found.lines[0].fails, found.lines[0].smallest_peak_bytes < found.lines[0].peak_bytes) == (64, True)


def test_one_length_ends_in_a_table_whose_unknown_is_no_number() -> None:
    found = of(synthetic.curve((128,)))
    (line,) = found.lines
    assert (line.label, line.tried, line.fits, line.mib_per_token) == ("made-up · torch · bf16", 128, 128, None)
    said = text(found, 120).splitlines()
    assert said[6].split()[-8:-2] == ["128", "or", "more", "(longest", "tried)", format_gib(line.peak_bytes or 0)]
    assert "MiB per" not in said[4]  # a column of which nothing is known


def test_models_without_tokens_have_their_batch_peak_and_samples() -> None:
    rows = [
        {**row, "seq_len": None, "micro_batch": 4, "tokens_per_s": None, "samples_per_s": 321.5}
        for row in synthetic.curve((128,))
    ]
    found = of(rows)
    (line,) = found.lines
    assert found.axis == "micro_batch" and (line.fits, line.samples_per_s, line.tokens_per_s) == (4, 321.5, None)
    said = text(found, 120)
    assert "samples/s" in said and "tokens/s" not in said and "322" in said and "4 or more (largest tried)" in said
    unknown = of([{**row, "micro_batch": None} for row in rows])
    assert unknown.lines[0].peak_bytes == line.peak_bytes and "322" in text(unknown, 120)


def test_speeds_that_the_host_limits_are_not_compared() -> None:
    rows = [{**row, "bound_by": "host"} for row in synthetic.sweep((512, 1024), batches=(1,))]
    text = " ".join(summary(synthetic.table(rows)).findings)
    assert "saves" in text and "% tokens/s" not in text and "bound by the host)" in text


@pytest.mark.slow
def test_nothing_fits_is_not_the_same_as_nothing_known() -> None:
    full = of([{**row, "unlimited_peak_reserved_bytes": 30 * GIB} for row in synthetic.sweep(device_gib=1)])
    assert {line.fits for line in full.lines} == {0} and "none" in text(full, 100)
    assert full.findings == ("Nothing that was tried fits; the smallest would reserve 30.0 GiB.",)
    crashed = of([{**row, "outcome": "crash"} for row in synthetic.sweep(device_gib=1)])
    assert {line.fits for line in crashed.lines} == {None} and crashed.findings == ()
    rows = synthetic.curve((128, 256, 512))
    (torn,) = of([rows[0], {**rows[1], "outcome": "oom"}, rows[2]]).lines
    assert torn.torn and torn.fits == 512


@pytest.mark.slow
def test_a_prediction_and_an_estimate_say_so() -> None:
    rows = synthetic.sweep(device="simulated", simulated_gpu="l4-24gb", tokens_per_s=None, estimated_tokens_per_s=5e3)
    found = of(rows)
    assert all(line.predicted and line.estimated for line in found.lines)
    assert found.title.endswith("predicted for l4-24gb") and all("predicted" in one for one in found.findings)
    codes = ["evaluation"], ["compiled_code", "evaluation"]
    first, eager = (of([{**row, "not_covered": one} for row in rows]).title.splitlines()[0] for one in codes)
    assert first == found.title.splitlines()[0] and eager.startswith("not covered: code that torch.compile")
    said = text(found, 100)
    assert said.count("≤ 5,000") == 6 and "≤ estimate of the highest possible speed" in said
    better = text(of([{**row, "calibrated_tokens_per_s": 3e3} for row in rows]), 100)
    assert better.count("≈ 3,000") == 6 and "≤" not in better and "≈ estimate from speeds of other runs" in better


def test_a_resident_set_is_no_allocator() -> None:
    rows = synthetic.sweep(device="cpu", memory_source="cpu_tensors_and_rss")
    assert {line.reserved_over_allocated for line in of(rows).lines} == {None}


@pytest.mark.slow
def test_it_fits_a_screen() -> None:
    found = of(synthetic.sweep(lengths=(128, 256), batches=tuple(range(1, 31)), repeats=1))
    for width in (100, 80, 60):
        said = text(found, width)
        assert max(map(len, said.splitlines())) <= width and len(said.splitlines()) <= 30
        assert "and 47 more in the report" in said  # of 60


@pytest.mark.slow
def test_the_end_of_a_report(tmp_path: Path, cli: Cli) -> None:
    evil = "\x1b]0;owned\x07[red]x"
    path = synthetic.write(tmp_path / "s", synthetic.sweep(lengths=(128, 256, 512), batches=(1, 2), model=evil))
    said = cli.run("report", path, "--images", "none").out
    lines = said.splitlines()
    assert len(lines) <= 30 and r"\x1b]0;owned" not in said  # of one model, its name is not told
    assert [line.split()[0] for line in lines[-4:]] == ["report", "rows", "figures", "fits"]
    assert sum(line.startswith("note: ") for line in lines) <= 3 and "on top of a fixed part" not in said
    told = cli.json("report", path, "--images", "none")
    assert (len(told["configurations"]), len(told["findings"])) == (4, 3)
    assert any("on top of a fixed part" in line for line in told["summary"])
    one = synthetic.write(tmp_path / "o", synthetic.curve((128,), repeats=2, model=evil))
    said = cli.run("report", one, "--images", "none").out
    assert r"\x1b]0;owned\x07[red]x · torch · bf16" in said and "no curve could be fitted" not in said
