"""Test the display of a running sweep: names by what varies, a region on a terminal, lines, the expected time."""

import signal
from io import StringIO
from typing import Any

import pytest
from conftest import on_terminal, source, tiny

from vramsweep.harness.messages.console import Console
from vramsweep.harness.rows.schema import Row, complete_row
from vramsweep.harness.sweep import plan, progress
from vramsweep.harness.sweep.budget import PREDICTED_S, Expected
from vramsweep.harness.sweep.labels import Labels, describe_common
from vramsweep.harness.sweep.plan import Planned
from vramsweep.harness.sweep.progress import Lines, Pace, Progress, Region
from vramsweep.harness.verbs import plan as plan_verb

CARDS = ("h100-80gb", "a100-80gb", "l4-24gb", "rtx4090-24gb", "t4-16gb")


def planned(*values: dict[str, Any], repeats: int = 1) -> list[Planned]:
    return [item for of_one in plan.expand_trials(values, repeats) for item in of_one]


def labels(*values: dict[str, Any], repeats: int = 1) -> list[str]:
    items = planned(*values, repeats=repeats)
    named = Labels(items)
    return [named(item) for item in items]


def row(item: Planned, outcome: str = "ok", **over: Any) -> Row:
    return complete_row({"trial_id": item.trial_id, "outcome": outcome, "terminal": True, "attempt": 1} | over)


def text(region: Region, width: int) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(region.drawn())
    return captured.get().splitlines()


def simulated(card: str, **over: Any) -> dict[str, Any]:
    return tiny(device={"name": "simulated", "gpu": card}, **over)


def test_trials_are_called_by_what_varies() -> None:
    assert labels(*(simulated(card) for card in CARDS)) == list(CARDS)
    both = [tiny(checkpointing=c, optimizer=o) for c in ("none", "full") for o in ("adamw_torch", "sgd")]
    assert labels(*both)[1:3] == ["checkpointing=none · optimizer=sgd", "checkpointing=full · optimizer=adamw_torch"]
    assert labels(tiny(grad_accum=1), tiny(grad_accum=4)) == ["grad_accum=1", "grad_accum=4"]
    stages = [tiny(runner={"name": "deepspeed"}, sharding=s, world_size=2, device={"name": "cuda"})
              for s in ("zero1", "zero3")]  # fmt: skip
    assert labels(*stages) == ["zero1", "zero3"]
    command = {"name": "script", "command": "python x.py --lr {lr} --l {seq_len}"}
    options = [tiny(runner=command | {"options": {"lr": lr}}, seq_len=n) for lr in ("1e-4", "1e-5") for n in (8, 16)]
    assert labels(*options)[-1] == "lr=1e-5 · seq 16"
    assert labels(tiny(), repeats=2) == ["repeat 0", "repeat 1"]
    assert labels(tiny()) == ["tiny · torch · seq 32 · batch 2 · fp32"]


def test_a_name_stands_for_its_part_unless_two_share_it() -> None:
    split = [{"name": f"split_{n}", "conf": f"max_split_size_mb:{n}"} for n in (32, 64)]
    assert labels(*(tiny(allocator=one) for one in split)) == ["split_32", "split_64"]
    same = [tiny(allocator=one | {"name": "custom"}) for one in split]
    assert labels(*same) == ["allocator.conf=max_split_size_mb:32", "allocator.conf=max_split_size_mb:64"]


def test_of_many_axes_defaults_go_without_saying_and_no_two_trials_are_called_alike() -> None:
    grid = [tiny(checkpointing=c, grad_accum=g, attention=a, seq_len=n) for c in ("none", "full") for g in (1, 2)
            for a in ("sdpa", "eager") for n in (8, 16)]  # fmt: skip
    named = labels(*grid)
    assert named[0] == "seq 8" and len(set(named)) == len(grid)
    assert set(next(one for one in named if one.count(" · ") == 3).split(" · ")) == {
        "grad_accum=2", "attention=eager", "checkpointing=full", "seq 8"}  # fmt: skip


def test_what_cannot_run_varies_in_what_was_asked_alone() -> None:
    assert labels(tiny(seq_len=8), tiny(seq_len=0)) == ["seq 8", "seq 0"]
    items = planned(tiny(seq_len=8), tiny(seq_len=16), tiny(seq_len=0), tiny(seq_len=0, precision="bf16"))
    assert describe_common(items) == "tiny · torch · cpu · batch 2 · protocol=brief"
    assert list(map(len, plan_verb.refused(items).values())) == [2]
    out = StringIO()
    Console(file=out, width=120).print(plan_verb.show_plan(items, {items[0].trial_id}, lambda _: Expected(3.0, "")))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert [one for one in lines if "~" in one] == [["fp32", "8,", "16", "1", "1", "~", "3", "s"]]


@pytest.mark.parametrize("width", [100, 80, 60])
def test_the_region_fits_its_terminal(width: int) -> None:
    items = planned(
        *(simulated(card, precision=p, seq_len=n) for card in CARDS for p in ("fp32", "bf16") for n in (8, 16))
    )
    region = Region(len(items), items, Console(width=width))
    sizes: dict[str, Any] = {"peak_allocated_bytes": 5 << 30, "peak_reserved_bytes": 6 << 30, "tokens_per_s": 1234.5}
    for item in items[:7]:
        Progress.show(region, row(item, **sizes), item)
    region.starts(items[8])
    region.note("finishing the trials")
    lines = text(region, width)
    assert max(map(len, lines)) <= width and len(lines) <= 10
    shown = " ".join(" ".join(lines).split())
    assert "7/20" in shown and "7 ok · 0 oom · 0 failed" in shown and "finishing the trials" in shown
    assert f"▸ {region.label(items[8])} · 0:00" in shown


def test_what_is_not_known_and_what_is_only_estimated() -> None:
    (item,) = planned(tiny())
    known: dict[str, Any] = {"peak_allocated_bytes": 5 << 20, "peak_reserved_bytes": 6 << 20}
    assert progress.describe_result(row(item, "oom", reason="full", **known)) == "full"
    assert progress.describe_result(row(item, estimated_tokens_per_s=7039.0)) == "memory unknown, ≤ 7,000 tokens/s"
    assert progress.describe_result(row(item, "oom", unlimited_peak_reserved_bytes=9 << 20)) == "needs 9.0 MiB reserved"
    measured = row(item, tokens_per_s=1234.5, estimated_tokens_per_s=1.0, **known)
    eager = progress.describe_result(measured | {"not_covered": ["compiled_code"]})
    assert eager == "5.0 MiB allocated, 6.0 MiB reserved, not covered: compiled_code, 1,234 tokens/s"
    assert progress.describe_result(measured) == "5.0 MiB allocated, 6.0 MiB reserved, 1,234 tokens/s"
    resident = progress.describe_result(measured | {"memory_source": "cpu_tensors_and_rss"})
    assert resident == "5.0 MiB allocated, 1,234 tokens/s"
    faulty = {"parameters_without_gradient": 8000, "trainable_parameters": 9000, "full_after_steps": 1308}
    assert progress.describe_result(row(item, **known, **faulty)) == (
        "5.0 MiB allocated, 6.0 MiB reserved, 8,000 of 9,000 trainable parameters had no gradient in any step, full "
        "after about 1,308 steps"
    )


def test_lines_and_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    items = planned(*(simulated(card) for card in CARDS))
    lines = Lines(5, items)
    for item in items[:2]:
        lines.show(row(item, peak_allocated_bytes=3 << 20, peak_reserved_bytes=4 << 20), item)
    told = capsys.readouterr().out.splitlines()
    right = [f"[{n}/5] ok        {card} · 3.0 MiB allocated, 4.0 MiB reserved" for n, card in enumerate(CARDS[:2], 1)]
    assert [one.partition(" · oom 0 ")[0] for one in told] == right
    few = Lines(progress.MANY, items)
    few.show(row(items[0], "crash", reason="killed by signal 9"), items[0])
    for _ in range(9):
        few.show(row(items[1]), items[1])
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("[1/50] crash     h100-80gb · killed by signal 9 · oom 0 · failed 1")
    assert told[1].startswith("[5/50] oom 0 · failed 1")
    assert told[2].startswith("[10/50]") and not told[3:]
    Lines(progress.MANY, planned(tiny())).show(row(items[0]), items[0])  # what is measured has a line each
    assert capsys.readouterr().out.startswith("[1/50] ok ")


def test_what_runs_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A log gets such a line now and then; on a terminal the region shows it."""
    items = planned(*(simulated(card) for card in CARDS))
    lines, region = Lines(5, items), Region(5, items, Console(width=100))
    for one in (lines, region):
        one.works(None, {"text": "tracing: 1 of 3 done", "done": 0, "total": 1})
    assert lines.drawn() == "[0/5] tracing: 1 of 3 done · ETA unknown (0:00)"
    assert "tracing: 1 of 3 done (0:00)" in text(region, 100)
    for one in (lines, region):
        one.works(None, {"text": ""})
        one.starts(items[0])
        one.starts(items[1])
        one.works(items[0].trial_id, {"text": "tracing step 2 of 3"})
    assert lines.drawn() == "[0/5] h100-80gb · tracing step 2 of 3 and 1 more · ETA unknown (0:00)"
    assert text(region, 100)[-2:] == ["▸ h100-80gb · tracing step 2 of 3 · 0:00", "▸ a100-80gb · 0:00"]
    lines.show(row(items[0]), items[0])
    assert str(lines.drawn()).startswith("[1/5] a100-80gb · ETA ")
    lines.batches = 1
    assert lines.left() == "unknown"  # nobody knows what another batch takes
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 1 and err == ""


def test_a_file_is_no_terminal_whatever_colours_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().is_terminal and not Console().redraws
    assert isinstance(progress.choose_progress(3), Lines)


SWEEP = source("sweep_with_a_region.txt")


@pytest.mark.slow
def test_a_region_goes_when_the_sweep_is_over_and_a_killed_one_leaves_the_cursor() -> None:
    code, said = on_terminal(SWEEP, "ends")
    assert code == 0 and "\x1b[2K" in said  # it was drawn, and wiped
    assert "▸ seq 16 · 0:01" in said and "crash     seq 8 · killed by signal 9" in said
    tail = said[said.rindex("\x1b[2K") :]
    assert "2 of 2 in 0:0" in tail and "1 failed · 1 ok" in tail and tail.rstrip().endswith("the report")
    killed, left = on_terminal(SWEEP, "killed")
    assert killed == -signal.SIGKILL and "▸ seq 16" in left
    assert "\x1b[?25l" not in said + left  # hidden, it would have to be shown again


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
