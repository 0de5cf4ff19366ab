"""Pairs, verdicts and their reasons, and that chance alone seldom makes a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import synthetic

from vramsweep.analysis import cli
from vramsweep.analysis.compare.verdicts import compare, split
from vramsweep.analysis.data.load import Table, from_frame
from vramsweep.harness.errors import UserError
from vramsweep.harness.row import Row


def table(rows: list[Row]) -> Table:
    return from_frame(pd.DataFrame(rows), "test")


def speed(rows: list[Row], factor: float) -> list[Row]:
    return [{**r, "tokens_per_s": r["tokens_per_s"] and r["tokens_per_s"] * factor} for r in rows]


def sweep(seed: int = 0, repeats: int = 3, **fixed: Any) -> list[Row]:
    lengths = (256, 512, 1024, 2048)
    return synthetic.sweep(lengths=lengths, batches=(1,), allocators=("default",), repeats=repeats, seed=seed, **fixed)


def test_allocators_within_one_table() -> None:
    both = split(table(synthetic.sweep()), "allocator", ["default", "expandable"])
    found = compare(*both)
    assert found.differs["allocator"] == ("default", "expandable")
    verdicts = {m.metric: m.verdict for m in found.memory}
    assert verdicts["peak_allocated_bytes"] == "EQUAL"
    assert verdicts["peak_reserved_bytes"] == "SMALLER"
    assert found.speed.verdict == "SAME"
    assert not found.worse
    assert compare(*reversed(both)).worse  # type: ignore[arg-type]


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "SAME"), (1.1, "FASTER"), (0.9, "SLOWER"), (1.01, "AMBIGUOUS")])
def test_speed_verdicts(factor: float, verdict: str) -> None:
    found = compare(table(sweep(0)), table(speed(sweep(1), factor)))
    assert found.speed.verdict == verdict
    assert found.speed.low is not None and found.speed.high is not None
    assert found.speed.low < factor - 1 < found.speed.high or verdict == "SAME"


def test_a_byte_more_is_larger_and_running_out_of_memory_is_larger_still() -> None:
    rows = sweep()
    more = [{**r, "peak_allocated_bytes": r["peak_allocated_bytes"] + 1} for r in rows]
    allocated = next(m for m in compare(table(rows), table(more)).memory if m.metric == "peak_allocated_bytes")
    assert allocated.verdict == "LARGER"
    gone = [
        {**r, "outcome": "oom", "peak_allocated_bytes": None, "peak_reserved_bytes": None, "tokens_per_s": None}
        for r in rows
    ]
    found = compare(table(rows), table(gone))
    assert found.worse
    assert all("B ran out of memory" in m.reason for pair in found.pairs for m in pair.memory)


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
            noise = pd.Series(1.0, index=frame.index)
            random = __import__("numpy").random.default_rng([seed, side])
            noise[:] = random.normal(1, 0.02, len(frame))
            sides.append(Table(frame.assign(tokens_per_s=frame["tokens_per_s"] * noise), "test"))
        found = compare(*sides)
        wrong += found.speed.verdict in ("FASTER", "SLOWER")
        wrong_pairs += sum(p.speed.verdict in ("FASTER", "SLOWER") for p in found.pairs)
        pairs += len(found.pairs)
    assert wrong <= 3
    assert wrong_pairs / pairs <= 0.05


def test_predicted_rows_are_not_compared_with_measured_ones() -> None:
    with pytest.raises(UserError, match="predicted"):
        compare(table(sweep()), table(sweep(device="simulated")))


def test_nothing_in_common_is_said_with_the_axis_that_differs() -> None:
    other = synthetic.sweep(lengths=(300, 600), batches=(1,), allocators=("default",))
    with pytest.raises(UserError, match="share no seq_len"):
        compare(table(sweep()), table(other))


def test_resident_sets_are_not_compared_exactly() -> None:
    rows = sweep(memory_source="cpu_tensors_and_rss")
    assert {m.metric for m in compare(table(rows), table(rows)).memory} == {"peak_allocated_bytes", "peak_active_bytes"}


def test_exit_status_is_for_ci(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = synthetic.write(tmp_path / "a", sweep())
    b = synthetic.write(tmp_path / "b", speed(sweep(1), 0.8))
    assert cli.main(["compare", str(a), str(a)]) == 0
    assert cli.main(["compare", str(a), str(b)]) == 1
    assert "SLOWER" in capsys.readouterr().out
    assert cli.main(["compare", str(a), "--by", "allocator=default,none"]) == 2
    assert "there are default" in capsys.readouterr().err
    assert cli.main(["compare", str(a), str(b), "--json"]) == 1
