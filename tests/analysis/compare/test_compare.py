"""Pairs, verdicts and their reasons, and that chance alone seldom makes a verdict."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
from conftest import Cli, refusal
from synthetic import table

from vramsweep.analysis.compare.trends import along
from vramsweep.analysis.compare.verdicts import Comparison, OverAll, compare
from vramsweep.analysis.compare.verdicts_text import text
from vramsweep.analysis.data.groups import split
from vramsweep.analysis.data.load import Table
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import Row

pytestmark = pytest.mark.deterministic

MIB = 2**20


def speed(rows: list[Row], factor: float) -> list[Row]:
    return [{**r, "tokens_per_s": r["tokens_per_s"] and r["tokens_per_s"] * factor} for r in rows]


def sweep(seed: int = 0, repeats: int = 3, **fixed: Any) -> list[Row]:
    lengths = (256, 512, 1024, 2048)
    return synthetic.curve(lengths, repeats=repeats, seed=seed, **fixed)


@pytest.mark.slow
def test_allocators_within_one_table() -> None:
    both = split(table(synthetic.sweep(batches=(1,))), "allocator", ["default", "expandable"])
    found = compare(*both)
    assert found.differs["allocator"] == ("default", "expandable")
    verdicts = {m.metric: m.verdict for m in found.memory}
    assert verdicts["peak_allocated_bytes"] == "EQUAL"
    assert verdicts["peak_reserved_bytes"] == "SMALLER"
    assert found.speed.verdict == "SAME"
    assert not found.worse
    assert compare(*reversed(both)).worse  # type: ignore[arg-type]


def test_what_tells_pairs_apart_is_said_once() -> None:
    """Rows say an allocator by its name, its text, and again in the trial's own words."""
    rows = synthetic.sweep(lengths=(256, 512), batches=(1, 2), repeats=1)
    sides = []
    for checkpointing in ("none", "full"):
        trial = {"checkpointing": checkpointing, "trial.checkpointing": checkpointing}
        sides.append(table([{**row, **trial, "trial.allocator.name": row["allocator"]} for row in rows]))
    found = compare(*sides)
    assert found.differs == {"checkpointing": ("none", "full")}
    assert {tuple(pair.settings) for pair in found.pairs} == {("allocator", "micro_batch", "seq_len")}


def test_lengths_and_batches_that_go_together_are_both_told() -> None:
    rows = [row for row in synthetic.sweep(lengths=(256, 512), batches=(1, 2), allocators=("default",))
            if row["seq_len"] * row["micro_batch"] == 512]  # fmt: skip
    found = compare(table(rows), table(rows))
    assert {tuple(pair.settings) for pair in found.pairs} == {("micro_batch", "seq_len")}


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "SAME"), (1.1, "FASTER"), (0.9, "SLOWER"), (1.01, "AMBIGUOUS")])
def test_speed_verdicts(factor: float, verdict: str) -> None:
    found = compare(table(sweep(0)), table(speed(sweep(1), factor)))
    assert found.speed.verdict == verdict
    assert found.speed.low is not None and found.speed.high is not None
    assert found.speed.low < factor - 1 < found.speed.high or verdict == "SAME"


@pytest.mark.parametrize("limited", [(256,), (256, 512, 1024, 2048)])
def test_speed_that_a_host_limits_is_no_difference(limited: tuple[int, ...]) -> None:
    slow = table([{**r, "bound_by": "host" if r["seq_len"] in limited else "gpu"} for r in speed(sweep(1), 0.5)])
    for found, known in ((compare(table(sweep(0)), slow), "SLOWER"), (compare(slow, table(sweep(0))), "FASTER")):
        for pair in found.pairs:
            assert pair.speed.verdict == ("AMBIGUOUS" if pair.seq_len in limited else known)
        assert found.speed.verdict == ("AMBIGUOUS" if len(limited) == 4 else known)
        without = "" if len(limited) == 4 else f"without {len(limited)} of 4 pairs: "
        assert f"{without}the host limits the speed" in found.speed.reason and "no speed" not in found.speed.reason


@pytest.mark.filterwarnings("error")
def test_a_speed_of_nearly_nothing_is_slower_without_a_factor() -> None:
    rows = sweep()
    found = compare(table(rows), table([{**r, "tokens_per_s": 1e-30} for r in rows]))
    assert (found.speed.verdict, found.worse) == ("SLOWER", True)
    assert "slower beyond measure" in text(found, along(found))


def memory(found: Comparison, metric: str) -> OverAll:
    return next(m for m in found.memory if m.metric == metric)


def larger(rows: list[Row], **more: float) -> list[Row]:
    """The rows with each of these columns larger by so many bytes."""
    return [{**r, **{name: r[name] and r[name] + by for name, by in more.items()}} for r in rows]


@pytest.mark.slow
def test_a_byte_makes_a_difference_only_with_tolerance_0() -> None:
    rows = sweep()
    more = table(larger(rows, peak_allocated_bytes=1))
    assert memory(compare(table(rows), more, tolerance=0), "peak_allocated_bytes").verdict == "LARGER"
    found = compare(table(rows), more)
    assert memory(found, "peak_allocated_bytes").verdict == "EQUAL"
    assert memory(found, "peak_allocated_bytes").apart == 1
    assert not found.worse
    allocated = found.pairs[0].memory[0]
    assert (allocated.verdict, allocated.apart) == ("EQUAL", 1)
    assert "runs of A and B differ by at most 1 B" in allocated.reason
    assert "peak allocated: EQUAL within 0.5 %: equal in 4 of 4 pairs" in text(found, along(found))
    same = compare(table(rows), table(rows))
    assert "peak allocated: EQUAL: equal in 4 of 4 pairs" in text(same, along(same))


@pytest.mark.slow
def test_reserved_may_differ_by_a_block() -> None:
    rows = [{**r, "peak_reserved_bytes": 200 * MIB} for r in sweep()]
    for by, verdict in ((2 * MIB, "EQUAL"), (4 * MIB, "LARGER"), (-4 * MIB, "SMALLER")):
        found = compare(table(rows), table(larger(rows, peak_reserved_bytes=by)))
        assert memory(found, "peak_reserved_bytes").verdict == verdict
    exact = compare(table(rows), table(larger(rows, peak_reserved_bytes=2 * MIB)), tolerance=0)
    assert memory(exact, "peak_reserved_bytes").verdict == "LARGER"


def test_an_ambiguous_pair_says_how_far_the_sides_overlap_and_how_far_the_medians_are() -> None:
    sides = []
    for sizes in ((1000, 1100, 1200), (1150, 1160, 1300)):
        rows = sweep(repeats=3)[:3]
        sides.append(table([{**r, "peak_allocated_bytes": s * MIB} for r, s in zip(rows, sizes, strict=True)]))
    found = compare(*sides).pairs[0].memory[0]
    assert found.verdict == "AMBIGUOUS"
    assert found.reason == "runs of A and B overlap by 50.0 MiB; medians: " \
        "1.07 GiB to 1.13 GiB (+60.0 MiB, +5.45 %)"  # fmt: skip


def test_verdicts_over_all_have_sizes_and_say_where() -> None:
    rows = sweep()
    half = [{**r, "peak_allocated_bytes": int(r["peak_allocated_bytes"] * (0.5 if r["seq_len"] < 2048 else 0.4)),
             "tokens_per_s": r["tokens_per_s"] / 5} for r in rows]  # fmt: skip
    found = compare(table(rows), table(half))
    allocated = memory(found, "peak_allocated_bytes")
    assert allocated.least and allocated.most
    assert allocated.least.settings == {"seq_len": 2048}
    assert allocated.least.change == pytest.approx(-0.6)
    assert allocated.change == pytest.approx((0.5**3 * 0.4) ** 0.25 - 1)
    said = text(found, along(found))
    assert "geometric mean 0.473 x" in said
    assert "(0.4 x) at 2,048 tokens" in said
    assert "x slower" in found.speed.reason and found.worse


@pytest.mark.slow
def test_nearly_all_pairs_decide_the_verdict_over_all_but_any_larger_one_the_exit_status() -> None:
    lengths = tuple(range(100, 4100, 100))
    rows = synthetic.curve(lengths)
    odd = [{**r, "peak_allocated_bytes": r["peak_allocated_bytes"] * (2 if r["seq_len"] == 300 else 1)} for r in rows]
    found = compare(table(rows), table(odd))
    assert memory(found, "peak_allocated_bytes").verdict == "EQUAL"
    assert "larger in 1 of 40 pairs" in memory(found, "peak_allocated_bytes").reason
    assert found.worse
    gone = [{**r, "peak_allocated_bytes": None, "outcome": "oom"} if r["seq_len"] == 300 else r for r in rows]
    assert memory(compare(table(rows), table(gone)), "peak_allocated_bytes").verdict == "LARGER"


def test_running_out_of_memory_is_larger() -> None:
    rows = sweep()
    unknown = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_s"))
    gone = [{**r, **unknown, "outcome": "oom"} for r in rows]
    found = compare(table(rows), table(gone))
    assert found.worse
    assert all("B ran out of memory" in m.reason for pair in found.pairs for m in pair.memory)


def test_where_foreign_rows_come_from_does_not_keep_them_apart() -> None:
    rows = [{**r, "foreign": f"file {r['seq_len']}"} for r in sweep()]
    assert len(compare(table(rows), table(sweep())).pairs) == 4


@pytest.mark.slow
def test_many_pairs_are_a_summary_and_twelve_of_them(tmp_path: Path, cli: Cli) -> None:
    rows = synthetic.curve(range(100, 2100, 100))
    a = synthetic.write(tmp_path / "a", rows)
    for flags, pairs in (([], 12), (["--all"], 20)):
        said = cli.run("compare", a, a, *flags).out
        assert sum(" tokens: " in line[:16] for line in said.splitlines()) == pairs
    found = cli.json("compare", a, a)
    assert len(found["pairs"]) == 20
    assert found["along"]["axis"] == "seq_len"


def test_what_compare_does_not_take_is_said(tmp_path: Path, cli: Cli) -> None:
    a = synthetic.write(tmp_path / "a", sweep())
    for flags, said in (
        (["--tolerance", "2"], "a share such as 0.001"),
        (["--axis", "micro_batch"], "micro_batch is the same in all pairs; use --axis seq_len or tokens"),
        (["--figure", "x.gif"], "--figure: x.gif must end in one of .html, .png, .svg, .pdf"),
    ):
        assert said in cli.refuse("compare", a, a, *flags)


def test_single_runs_give_no_verdict_on_speed_for_a_pair_and_say_why() -> None:
    found = compare(table(sweep(0, repeats=1)), table(sweep(1, repeats=1)))
    assert {pair.speed.verdict for pair in found.pairs} == {"AMBIGUOUS"}
    assert "run-to-run spread is unknown" in found.pairs[0].speed.reason


@pytest.mark.slow
def test_identical_distributions_seldom_get_a_verdict() -> None:
    """A run-to-run spread of 2 %, no true difference: FASTER or SLOWER at most 5 times in 100."""
    wrong_pairs = pairs = wrong = 0
    frame = table(sweep(repeats=3)).frame
    for seed in range(60):
        sides = []
        for side in range(2):
            noise = np.random.default_rng([seed, side]).normal(1, 0.02, len(frame))
            sides.append(Table(frame.assign(tokens_per_s=frame["tokens_per_s"] * noise), "test"))
        found = compare(*sides)
        wrong += found.speed.verdict in ("FASTER", "SLOWER")
        wrong_pairs += sum(p.speed.verdict in ("FASTER", "SLOWER") for p in found.pairs)
        pairs += len(found.pairs)
    assert wrong <= 3
    assert wrong_pairs / pairs <= 0.05


def test_one_pair_is_one_and_what_it_does_not_know_is_said() -> None:
    rows = [{**r, "micro_batch": None} for r in sweep() if r["seq_len"] == 256]
    found = compare(table(rows), table(rows))
    assert "over the one pair:" in text(found, along(found))
    with pytest.raises(UserError, match="micro_batch is unknown in all pairs; no axis varies, so leave --axis out"):
        along(found, "micro_batch")


def test_predicted_and_measured_rows_or_others_with_nothing_in_common_are_not_compared() -> None:
    assert "predicted" in refusal(UserError, compare, table(sweep()), table(sweep(device="simulated")))
    other = synthetic.curve((300, 600), repeats=2)
    assert "share no seq_len" in refusal(UserError, compare, table(sweep()), table(other))


def test_resident_sets_are_not_compared_exactly() -> None:
    rows = sweep(memory_source="cpu_tensors_and_rss")
    assert {m.metric for m in compare(table(rows), table(rows)).memory} == {"peak_allocated_bytes", "peak_active_bytes"}


def test_exit_status_is_for_ci(tmp_path: Path, cli: Cli) -> None:
    a = synthetic.write(tmp_path / "a", sweep())
    b = synthetic.write(tmp_path / "b", speed(sweep(1), 0.8))
    cli.run("compare", a, a)
    assert "SLOWER" in cli.run("compare", a, b, status=1).out
    assert "there are default" in cli.refuse("compare", a, "--by", "allocator=default,none")
    cli.json("compare", a, b, status=1)
