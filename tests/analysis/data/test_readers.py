"""Test that one command gives each conclusion of public sweeps' readers, on their files (../shared/data, if there)."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, Cli

from vramsweep.analysis.data.load import from_frame
from vramsweep.analysis.data.metrics import METRICS, MIB, over_ranks, spread
from vramsweep.analysis.model.curves import Curve
from vramsweep.analysis.model.fit_wording import equation
from vramsweep.analysis.model.observations import jumps, wavering

pytestmark = pytest.mark.deterministic


DATA = ROOT / "../shared/data"
QWEN = DATA / "qwen15-0.5b-zero3"
SWEEP = QWEN / "without-expandable-segments.csv"
LLAMA = DATA / "llama3-8b-zero3-8gpu"
RANKS = "8*(peak_active_mib,peak_reserved_mib),iterations_per_s"
BATCHES = ["--columns", "micro_batch,peak_active_mib,peak_reserved_mib,iterations_per_s", "--set", "seq_len=2048"]
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the public data is not beside this checkout (../shared/data)"
)


def fits(cli: Cli, *words: object) -> dict[str, Any]:
    return {fit["metric"]: fit for fit in cli.json("fit", *words)["fits"]}


@pytest.mark.slow
@needs_data
def test_the_line_from_918_tokens(cli: Cli) -> None:
    assert "y = 2.9598x + 8163.2190 (MiB)" in cli.run("fit", SWEEP, "--metric", "peak_active_bytes", "--from", 918).out


@pytest.mark.slow
@needs_data
def test_reserved_jumps_where_lengths_on_either_side_stay_apart_and_not_where_single_ones_waver(cli: Cli) -> None:
    """From 1,576 to 1,700 tokens it goes up by a gigabyte and back two dozen times, and the last two lengths alone
    lie below what came before: neither is a drop at one length."""
    x, _, peak, _ = np.loadtxt(SWEEP, delimiter=",").T
    peak = peak[np.unique(x, return_index=True)[1]]
    steps = np.diff(peak)
    assert np.sum(np.abs(steps[1575:1700]) > 700) > 20 and np.abs(steps[1700:2045]).max() < 300
    assert steps[2045] < -1000
    text = cli.run("fit", SWEEP, "--metric", "peak_reserved_bytes").out
    found = re.findall(r"it (drops|jumps) by (\S+) (\w+) at (\S+) tokens", text)
    places = {int(at.replace(",", "")): (way, unit) for way, _, unit, at in found}
    assert places.pop(513, None) in (None, ("drops", "GiB"))  # of the curve itself, where that is two lines
    assert places == {314: ("drops", "GiB"), 565: ("jumps", "GiB"), 718: ("jumps", "GiB")}
    assert "lengths from 1,416 to 1,696 tokens lie 0.90 GiB above their neighbours" in text  # 923.3 MiB; ends at 1,696
    for at, size in ((314, -310), (565, 303), (718, 373)):  # as in the file, less what 15 lengths make
        after, before = peak[at - 1 : at + 14], peak[at - 16 : at - 1]
        assert np.median(after) - np.median(before) == pytest.approx(size, abs=60)
        assert before.min() > after.max() if size < 0 else np.percentile(after, 10) > np.percentile(before, 90)


@pytest.mark.slow
@needs_data
def test_least_mean_and_largest_of_eight_gpus(cli: Cli) -> None:
    words = (LLAMA / "lengths-zero3.csv", "--columns", f"seq_len,{RANKS}", "--set", "micro_batch=1")
    text = cli.run("fit", *words, "--metric", "peak_active_bytes").out
    lines = [line.split(",") for line in (LLAMA / "lengths-zero3.csv").read_text().splitlines()]
    last = [float(v) for line in lines if line[0] == "2041" for v in line[1:17:2] if float(v)]
    assert len(last) == 8
    least, mean, most = (f"{size / 1024:,.1f} GiB" for size in (min(last), np.mean(last), max(last)))
    sizes = f"{least} min, {mean} mean, {most} max"
    assert f"over 8 ranks at 2,041 tokens: {sizes}" in text
    of_mean = fits(cli, *words, "--metric", "peak_active_bytes", "--ranks", "mean")["peak_active_bytes"]
    of_worst = fits(cli, *words, "--metric", "peak_active_bytes")["peak_active_bytes"]
    assert of_mean["candidates"][0]["rms"] < of_worst["candidates"][0]["rms"]  # which rank is worst changes


@pytest.mark.slow
@needs_data
def test_memory_and_seconds_per_iteration_are_linear_in_the_batch(cli: Cli) -> None:
    found = fits(cli, QWEN / "batches-checkpointing.csv", *BATCHES, "--axis", "micro_batch")
    assert found["peak_active_bytes"]["chosen"] == found["step_median_s"]["chosen"] == "straight line"
    parameters = found["peak_active_bytes"]["candidates"][0]["curves"][0]["parameters"]
    assert parameters["b1"] / MIB == pytest.approx(3681, abs=1)
    words = ("--columns", f"micro_batch,{RANKS}", "--set", "seq_len=2048", "--axis", "micro_batch")
    found = fits(cli, LLAMA / "batches-zero3-checkpointing.csv", *words)
    assert found["peak_active_bytes"]["chosen"] == found["step_median_s"]["chosen"] == "straight line"


@pytest.mark.slow
@needs_data
def test_the_largest_batch(cli: Cli) -> None:
    words = ("--columns", f"micro_batch,{RANKS}", "--set", "seq_len=2048", "--set", "device_total_gib=80")
    text = cli.run("frontier", LLAMA / "batches-zero3-checkpointing.csv", *words, "--batch", "--gib", "80").out
    assert "12 samples fitted; 13 did not" in text and "CUDA context" in text
    words = (*BATCHES, "--set", "device_total_gib=24", "--batch", "--gib", "24")
    text = cli.run("frontier", QWEN / "batches.csv", *words).out
    assert "2 samples fitted; 3 did not" in text


def second(folder: Path, slope: float = -900_000.0, at: float = 200.0) -> Path:
    """The other setting of the public sweep, made up: active equal within 0.05 %, reserved lower by 300 MiB and the
    slope, speed crossing at a length."""
    random = np.random.default_rng(7)
    x, active, peak, speed = np.loadtxt(SWEEP, delimiter=",").T
    lower = 300 - slope / MIB * x + random.normal(0, 40, len(x))
    columns = (
        x,
        np.round(active * (1 + random.uniform(-0.0004, 0.0004, len(x)))),
        2 * np.round((peak - lower) / 2),
        speed * np.exp(0.05 * np.log(x / at) + random.normal(0, 0.03, len(x))),
    )
    file = folder / "with.csv"
    np.savetxt(file, np.array(columns).T, delimiter=", ", fmt=["%d", "%d", "%d", "%.6f"])
    return file


@pytest.mark.slow
@needs_data
def test_what_readers_concluded_of_the_public_sweep_comes_out_of_one_command(tmp_path: Path, cli: Cli) -> None:
    said = cli.run("compare", SWEEP, second(tmp_path), "--tolerance", "0.001").out
    assert "over all 2,048 pairs, sequence length 1 to 2,048:" in said
    assert "peak active: EQUAL within 0.1 %: equal in 2,048 of 2,048 pairs" in said
    assert "peak reserved: SMALLER: smaller in 2,048 of 2,048 pairs" in said
    slope = said.split("the gap grows by ")[1].split(" bytes per token (95 % interval ")
    low, high = (float(v.replace(",", "")) for v in slope[1].split(")")[0].split(" to "))
    assert low <= 900_000 <= high
    assert 0.98 < float(slope[0].replace(",", "")) / 900_000 < 1.02
    interval = said.split("  speed: FASTER")[1].split(" up to about ")[1].split("(95 % interval ")[1].split(")")[0]
    low, high = (float(v.replace(",", "")) for v in interval.split(" to "))
    assert low <= 200 <= high
    assert high - low < 250


@pytest.mark.slow
@needs_data
def test_checkpointing_halves_the_memory_of_the_public_8b_runs(cli: Cli) -> None:
    def compared(folder: Path, of: str, columns: str) -> str:
        files = (folder / f"{of}.csv", folder / f"{of}-checkpointing.csv")
        settings = ("--columns", f"micro_batch,{columns},iterations_per_s", "--set", "seq_len=2048")
        return cli.run("compare", *files, *settings).out

    said = compared(LLAMA, "batches-zero3", "8*(peak_active_mib,peak_reserved_mib)")
    assert "peak active: SMALLER: smaller in 3 of 3 pairs; geometric mean 0.49 x" in said
    assert "A ran out of memory, the other did not" in said
    said = compared(QWEN, "batches", "peak_active_mib,peak_reserved_mib")
    assert "over all 3 pairs, micro-batch 1 to 3:" in said
    assert "-22.85 %" in said


@needs_data
@pytest.mark.slow
def test_from_the_beginning_of_a_sweep_the_interval_holds_what_fits() -> None:
    import frontier_prefixes

    from vramsweep.analysis.data.importers import open_rows

    cases: list[tuple[Path, str | None, list[str], str]] = [
        (SWEEP, None, [], "seq_len"),
        (LLAMA / "lengths-zero3.csv", f"seq_len,{RANKS}", ["micro_batch=1"], "seq_len"),
        (LLAMA / "batches-zero3-checkpointing.csv", f"micro_batch,{RANKS}", ["seq_len=2048"], "micro_batch"),
    ]
    for file, columns, settings, axis in cases:
        found = frontier_prefixes.ask(open_rows(file, columns, settings)[0], axis, questions=15)
        assert len(found) >= 12
        closed = [one for one in found if not one.open]
        for of, holds in ((found, "holds"), (closed, "holds"), (found, "safe")):
            assert len(of) >= 8 and sum(getattr(one, holds) for one in of) >= 0.9 * len(of), (file, holds)


def test_a_value_that_did_not_fit_is_no_answer_and_an_open_end_is_counted() -> None:
    import frontier_prefixes

    one = frontier_prefixes.Asked(100, 24, (200, 299), 300, 200, 210, 250)
    assert (one.holds, one.safe, one.open) == (True, True, False)
    assert not replace(one, low=300).holds and not replace(one, low=300, high=None).safe
    assert replace(one, high=None).open and replace(one, low=None, high=None).holds
    wavering = replace(one, truth=(200, 500), low=400)
    assert wavering.holds and not wavering.safe


def test_ranks_that_are_not_known_are_left_out() -> None:
    frame = pd.DataFrame(
        {
            "trial_id": ["a", "b"], "outcome": "ok", "seq_len": [1, 2], "peak_active_bytes": [30, 50],
            "rank_peak_active_bytes": [[10.0, None, 30.0], [50.0, None, None]],
        }
    )  # fmt: skip
    table = from_frame(frame, "made up")
    assert list(over_ranks(table, "mean").frame["peak_active_bytes"]) == [20, 50]
    assert list(over_ranks(table, "worst").frame["peak_active_bytes"]) == [30, 50]
    found = spread(table.frame, "peak_active_bytes", np.array([1.0, 2.0]))
    assert found is not None and (found.ranks, found.x, found.least, found.most) == (2, 1.0, 10, 30)
    assert spread(table.frame, "peak_reserved_bytes", np.array([1.0, 2.0])) is None


@pytest.mark.slow
def test_a_jump_is_found_where_it_is_and_noise_has_none() -> None:
    random = np.random.default_rng(0)
    x = np.arange(1.0, 301)
    found = 0
    for _ in range(40):
        noise = random.normal(0, 20, 300)
        (jump,) = jumps(x, noise - np.where(x > 200, 860, 0), 10_000 + 10 * x)
        assert jump.x == pytest.approx(201, abs=2) and jump.size == pytest.approx(-860, rel=0.05)
        found += bool(jumps(x, noise, 1_000 + x))
    assert found <= 4
    flips = 20 * np.sin(x) + np.where((x > 150) & (x < 220) & (x % 7 < 4) | (x > 297), 1000, 0)
    assert jumps(x, flips, 10_000 + 10 * x) == []  # they come back, and the last three lengths tell nothing
    assert jumps(x[:30], noise[:30], x[:30]) == []


def test_lengths_that_waver_are_told_and_noise_is_not() -> None:
    random = np.random.default_rng(3)
    x = np.arange(1.0, 601)
    noise = random.normal(0, 20, 600)
    high = (x > 300) & (x < 401) & (x % 10 < 3)
    (found,) = wavering(x, noise + np.where(high, 900, 0), 10_000 + 10 * x)
    assert (found.start, found.stop, found.count) == (301, 400, int(high.sum()))
    assert found.size == pytest.approx(900, rel=0.05)
    assert wavering(x, noise, 10_000 + 10 * x) == [] and wavering(x[:30], noise[:30], x[:30]) == []


def test_an_end_at_0_is_one_and_rows_that_tried_again_did_not_run_out(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "x.csv"
    rows = [(128, 1000, 0), (256, 1100, 0), (512, 1300, 0), (1024, 1700, 0), (2048, 1710, 3)]
    file.write_text("seq_len,peak_reserved_mib,alloc_retries,device_total_gib\n")
    with file.open("a") as stream:
        stream.writelines(f"{x},{peak},{retries},80\n" for x, peak, retries in rows)
    text = cli.run("fit", file).out
    assert "ran out of memory count" not in text and "counts as a lower bound of peak reserved" in text
    with file.open("a") as stream:
        stream.write("4096,OOM,,80\n")
    assert "    1 row that ran out of memory counts as a lower bound\n" in cli.run("fit", file).out
    for flags in (["--to", "0"], ["--to", "nan"], ["--from", "inf"]):
        out, err = cli.run("fit", file, *flags, status=2)
        assert not out.startswith("\n") and ("nothing could be fitted" if flags[1] == "0" else "takes a number") in err


@pytest.mark.slow
def test_along_the_batch_the_words_are_of_batches_and_samples(tmp_path: Path, cli: Cli) -> None:
    random = np.random.default_rng(0)
    batches = np.arange(1, 65)
    reserved = 1000 + 36 * batches + np.where(batches >= 30, 700, 0) + random.integers(0, 4, 64)
    active = 1000 + 37 * batches + np.where(batches % 8, 300, 0) + random.integers(0, 4, 64)
    np.savetxt(tmp_path / "x.csv", np.array([batches, active, reserved]).T, delimiter=",", fmt="%d")
    words = ("--columns", "micro_batch,peak_active_mib,peak_reserved_mib", "--set", "seq_len=512")
    text = cli.run("fit", tmp_path / "x.csv", *words, "--axis", "micro_batch").out
    assert re.search(r"it jumps by 0\.6\d GiB at 30 samples", text) and "up to 30 samples y =" in text
    assert "batch % 8 == 0: y =" in text and "batches not divisible by 8: " in text
    assert "tensors that grow with batch dominate" in text and "64 rows, 64 batches" in text
    assert "length" not in text.replace("sequence length", "") and "tokens" not in text
    json_text = cli.run("fit", tmp_path / "x.csv", *words, "--axis", "micro_batch", "--json").out
    assert '"class": "batch % 8 == 0"' in json_text and "tokens" not in json_text.replace("range_tokens", "")


def test_what_rounds_to_nothing_is_not_shown() -> None:
    metric = METRICS["peak_active_bytes"]
    line = Curve("quadratic", ((2148.0 * MIB, 2.0 * MIB, -4e-19 * MIB),))
    assert equation(line, metric) == equation(line, metric, longest=700) == "y = 2.0000x + 2148.0000 (MiB)"
    assert equation(Curve("linear", ((-1.0, -1e-9, 0.0),)), metric) == "y = 0.0000 (MiB)"
    small = Curve("quadratic", ((0.0, -1.0, 1e-6 * MIB),))
    assert equation(small, metric, longest=100) == "y = 1e-06x² + 0.0000x + 0.0000 (MiB)"
    assert equation(small, metric, longest=1) == "y = 0.0000 (MiB)"
