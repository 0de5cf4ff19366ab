"""What a sweep shows while it runs: names by what varies, a region on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, tiny

from vramsweep.harness import card_state, machine, outline, plan, progress
from vramsweep.harness.budget import Expected
from vramsweep.harness.console import Console
from vramsweep.harness.labels import Labels, common
from vramsweep.harness.plan import Planned
from vramsweep.harness.progress import Few, Lines, Region
from vramsweep.harness.row import Row, complete

CARDS = ("h100-80gb", "a100-80gb", "l4-24gb", "rtx4090-24gb", "t4-16gb")


def planned(*values: dict[str, Any], repeats: int = 1) -> list[Planned]:
    return [item for of_one in plan.expand(values, repeats) for item in of_one]


def labels(*values: dict[str, Any], repeats: int = 1) -> list[str]:
    items = planned(*values, repeats=repeats)
    named = Labels(items)
    return [named(item) for item in items]


def row(item: Planned, outcome: str = "ok", **over: Any) -> Row:
    return complete({"trial_id": item.trial_id, "outcome": outcome, "terminal": True, "attempt": 1} | over)


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
    assert common(items) == "tiny · torch · cpu · batch 2 · protocol=brief"
    (one, other) = outline.refused(items), outline.lines(items, [items[0].trial_id], lambda _: Expected(3.0, ""), {})
    assert [len(found.labels) for found in one] == [2]
    assert [(line.label, dict(line.ranges), dict(line.states)) for line in other] == [
        ("fp32", {"seq_len": "8, 16"}, {"to do": 1, "finished": 1})
    ]


@pytest.mark.parametrize("width", [100, 80, 60])
def test_the_region_fits_its_terminal(width: int) -> None:
    items = planned(
        *(simulated(card, precision=p, seq_len=n) for card in CARDS for p in ("fp32", "bf16") for n in (8, 16))
    )
    region = Region(len(items), items, Console(width=width))
    sizes: dict[str, Any] = {"peak_allocated_bytes": 5 << 30, "peak_reserved_bytes": 6 << 30, "tokens_per_s": 1234.5}
    for item in items[:7]:
        region.add(row(item, **sizes))
        region._rows.append((region.label(item), row(item, **sizes)))
    region.starts(items[8])
    region.note("finishing what runs")
    lines = text(region, width)
    assert max(map(len, lines)) <= width and len(lines) <= 20
    shown = " ".join(" ".join(lines).split())
    assert "7/20" in shown and "7 ok · 0 oom · 0 failed" in shown and "finishing what runs" in shown
    assert f"▸ {region.label(items[8])} · 0:00" in shown and "5.00 GiB" in shown and "1,234" in shown
    assert ("reserved" in shown) is (width >= 72)


def test_what_is_not_known_and_what_is_only_estimated() -> None:
    items = planned(tiny(seq_len=8), tiny(seq_len=16))
    region = Region(2, items, Console(width=100))
    region._rows.append(("a", row(items[0], "oom", reason="full")))
    region._rows.append(("b", row(items[1], estimated_tokens_per_s=7000.0)))
    (estimated, unknown) = text(region, 100)[-2:]  # the newest first
    assert estimated.split()[2:] == ["–", "–", "≤", "7,000"] and unknown.split() == ["oom", "a", "–", "–", "–"]


def test_lines_and_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    items = planned(*(simulated(card) for card in CARDS))
    lines = Lines(5, items)
    for item in items[:2]:
        lines.show(row(item, peak_allocated_bytes=3 << 20, peak_reserved_bytes=4 << 20), item)
    told = capsys.readouterr().out.splitlines()
    assert [one.partition(" · oom 0 ")[0] for one in told] == [
        f"[{n}/5] ok        {card} · 3.0 MiB allocated, 4.0 MiB reserved" for n, card in enumerate(CARDS[:2], 1)
    ]
    few = Few(20, items)
    few.show(row(items[0], "crash", reason="killed by signal 9"), items[0])
    few.show(row(items[1]), items[1])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "crash: h100-80gb: killed by signal 9" and told[1].startswith("[2/20] oom 0 · failed 1")


def test_a_file_is_no_terminal_whatever_colours_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert Console().is_terminal and not Console().redraws
    assert isinstance(progress.shown(3), Lines) and isinstance(progress.few(3), Few)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two cards, and what NVML is asked."""
    cards = [machine.Gpu(n, "NVIDIA H100", f"GPU-{n}", "580", 80 << 30, 0, ()) for n in (0, 1)]
    answers: dict[str, Any] = {
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda uuid: SimpleNamespace(gpu=90 + int(uuid[-1])),
        "nvmlDeviceGetMemoryInfo": lambda uuid: SimpleNamespace(used=40 << 30),
    }
    names: list[str] = []

    def ask(name: str, *words: Any) -> tuple[Any, str | None]:
        names.append(name)
        return (answers[name](words[0]), None) if name in answers else (None, "not supported")

    @contextlib.contextmanager
    def nvml() -> Iterator[bool]:
        yield True

    monkeypatch.setattr(machine, "visible_gpus", lambda environ: cards)
    monkeypatch.setattr(machine, "ask", ask)
    monkeypatch.setattr(machine, "nvml", nvml)
    return names


def test_cards_are_looked_at_seldom_and_what_they_do_not_say_is_left_out(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(card_state.time, "monotonic", lambda: now[0])
    state = card_state.CardState()
    assert state.text() == "2 x NVIDIA H100 · 90 to 91 % busy · 40 of 80.0 GiB used"
    count = len(asked)
    now[0] += card_state.EVERY_S / 2
    assert state.text() and len(asked) == count
    now[0] += card_state.EVERY_S
    assert state.text() and len(asked) == 2 * count
    state.close()
    now[0] += 100
    assert state.text() and len(asked) == 2 * count


def test_no_card_is_asked_about_what_runs_elsewhere(asked: list[str]) -> None:
    assert Region(1, planned(tiny()))._card is None and Region(1, planned(simulated("l4-24gb")))._card is None
    assert Region(1, planned(tiny(device={"name": "cuda"})))._card is not None


SWEEP = """
import os, sys, time
from vramsweep.harness import plan, terminal
from vramsweep.harness.progress import shown
sys.path.insert(0, "tests")
from conftest import tiny
items = [item for of_one in plan.expand([tiny(seq_len=n) for n in (8, 16)], 1) for item in of_one]
with terminal.escaped():
    region = shown(2, items)
    region.began("2 trials")
    region.starts(items[0])
    region.show({"outcome": "crash", "reason": "killed by signal 9"}, items[0])
    region.starts(items[1])
    time.sleep(1.2)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    region.show({"outcome": "ok"}, items[1])
    region.close()
    print("the report")
"""


def on_terminal(words: Sequence[str]) -> tuple[int, str]:
    """A process's status on a pseudo-terminal, and all that it wrote there."""
    parent, child = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    environ.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", SWEEP, *words], stdout=child, stderr=child, env=environ, cwd=ROOT)
    os.close(child)
    said = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while piece := os.read(parent, 65536):
            said += piece
    os.close(parent)
    return process.wait(), said.decode()


def test_a_region_goes_when_the_sweep_is_over_and_a_killed_one_leaves_the_cursor() -> None:
    code, said = on_terminal(["ends"])
    assert code == 0 and "\x1b[2K" in said  # it was drawn, and wiped
    assert "▸ seq 16 · 0:01" in said and "crash: seq 8: killed by signal 9" in said
    tail = said[said.rindex("\x1b[2K") :]
    assert "2 of 2 in 0:0" in tail and "1 failed · 1 ok" in tail and tail.rstrip().endswith("the report")
    killed, left = on_terminal(["killed"])
    assert killed == -signal.SIGKILL and "▸ seq 16" in left
    assert "\x1b[?25l" not in said + left  # hidden, it would have to be shown again
