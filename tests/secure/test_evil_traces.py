"""Kept traces, symbolic traces and formulas that somebody changed: as they were written, or made anew; never code."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import refusal, tiny
from test_evil_recordings import places, put

from vramsweep.harness.hardware.interconnects import Collective
from vramsweep.harness.hardware.roofline import Work
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_parser import parse
from vramsweep.runners.predict import trace_cache
from vramsweep.runners.symbolic import symbolic_candidate
from vramsweep.runners.trace import symbolic_trace
from vramsweep.runners.trace.symbolic_trace import Point, compiled, plain
from vramsweep.runners.trace.trace_data import HostStorages, Maker, Mark, Trace

EVIL: tuple[Any, ...] = (
    None, True, -1, 2**63, 10**40, 0.5, float("nan"), "", "x", "__import__('os')", [], {}, [[]], [-1],
)  # fmt: skip
WRITTEN = (
    "__import__('os').system('touch ran')", "9**9**9", "1 << 9**9", "'x' * 10**9", "[1] * 10**9", "seq_len.__class__",
    "(lambda: 0)()", "f'{1}'", "(seq_len := 3)", "seq_len if 1 else 2", "max(*[1])", "max()", "max", "print(1)", "1.5",
    "True", "None", "nobody", "seq_len\n+1", "#", "", " ", "\0", "\ud800", "(" * 9000 + "1" + ")" * 9000,
    "-" * 19_000 + "1", "not " * 4500 + "1", "+".join(["1"] * 9000), " and ".join(["1"] * 4000) + " or print(1)",
    "9" * 5000, "max(" * 3000 + "1", "1+" * 5_000_000 + "1", "x" * 10_000_000, "{1: 2}", "seq_len[0]", "await x",
    "yield", "*seq_len", "...", "1j", "b''",
)  # fmt: skip


@pytest.mark.parametrize("text", WRITTEN, ids=lambda text: repr(text[:20]))
def test_no_text_becomes_code_or_takes_long(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    with pytest.raises(ValueError, match="no formula") as refused:
        compiled(text)
    assert time.monotonic() - began < 2
    assert len(str(refused.value)) < 600 and "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["1 // 0", "1 % (seq_len - seq_len)", "kept + 1", "max(kept, 1)"])
def test_where_a_formula_has_no_value_it_says_so(text: str) -> None:
    assert "has no value at" in refusal(ValueError, compiled(text), Point(8, 2))


def test_the_largest_number_that_a_formula_makes_is_small() -> None:
    text = "*".join(["9" * 4000] * 4)
    assert len(text) < symbolic_trace.LONGEST
    began = time.monotonic()
    assert "digits" in refusal(ValueError, str, compiled(text)(Point(1, 1)))
    assert time.monotonic() - began < 1


def trace() -> Trace:
    """Two storages, one of which is freed, and what a step does."""
    return Trace(
        sizes=[512, 1024], categories=["parameters", "activations"], events=[1, 2, -2],
        marks=[Mark(1, None, "load"), Mark(3, 0, "forward")], streams=[0, 7], origins=[0, 1],
        makers=[Maker("", "aten.empty", ""), Maker("layer", "aten.mm", "a.py:1")],
        kernels=[(Work("bf16", 10, 20, 1), 2)], collectives=[(Collective("all_reduce", 5), 1)],
        host=HostStorages([4], ["other"], [1], [Mark(1, None, "load")], pinned=[True]), notes=[(1, "use", 1, 7)],
        stepwise=[(1, "-(-{} // 7) * 512", 8)],
    )  # fmt: skip


def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps({"trace": asdict(trace()), "details": {"a": 1}}))
    return found


def test_a_trace_is_read_as_it_was_written() -> None:
    found, details = trace_cache.read(trace_cache.serialize(told()))
    assert (json.loads(json.dumps(asdict(found))), details) == (told()["trace"], {"a": 1})


def test_a_byte_that_was_changed_makes_it_none() -> None:
    content = trace_cache.serialize(told())
    for at in range(len(content) - 1):
        for changed in (content[:at] + bytes((content[at] ^ 1,)) + content[at + 1 :], content[:at]):
            with pytest.raises((ValueError, KeyError, TypeError)):
                trace_cache.read(changed)


def test_every_value_of_every_field_is_of_its_kind_or_refused() -> None:
    """With a checksum that fits, as somebody who means harm would write."""
    kept = 0
    for path in places(told()):
        for value in EVIL:
            try:
                found, _ = trace_cache.read(trace_cache.serialize(put(told(), path, value)))
            except (ValueError, KeyError, TypeError):
                continue
            kept += 1
            assert len(found.sizes) == len(found.categories) == len(found.streams) == len(found.origins), (path, value)
            assert all(type(size) is int and 0 <= size < 1 << 63 for size in (*found.sizes, *found.host.sizes)), path
            assert all(abs(event) <= 2 for event in found.events), path
            assert all(0 <= origin < len(found.makers) for origin in found.origins), path
            assert all(0 <= storage < 2 for storage, _, _ in found.stepwise), path
    assert kept < 67  # texts in the place of texts, numbers in that of numbers


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b"[" * 100_000, b"\xff", b"null\n00000000\n", None])
def test_a_file_that_is_no_trace_is_made_anew(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial: Trial = parse(tiny(device={"name": "simulated", "gpu": "h100-80gb"}, protocol={"name": "brief"}))
    place = trace_cache.trace_path(trial, trial.device.card, tmp_path)
    if content is not None:
        place.write_bytes(content)
    else:
        place.mkdir()  # neither read nor removed
    assert trace_cache.load_trace(trial, trial.device.card, tmp_path) is None
    assert place.exists() == (content is None)
    assert ("traced again" in capsys.readouterr().out) == (content is not None)


def candidate() -> dict[str, Any]:
    """A symbolic trace in plain values."""
    own = trace()
    own.sizes, own.kernels, own.collectives, own.host.sizes = [], [], [], []
    made = symbolic_trace.SymbolicTrace(
        own, ("64 * seq_len", "512"), (0, 1), (1,), (("bf16", 0, 1, 1, 2),), (("all_reduce", 0, 1),),
        {"runner_config": {"train_batch_size": 4}}, ((("runner_config", "train_batch_size"), 1),), ("seq_len >= 2",),
        "unconfirmed",
    )  # fmt: skip
    found: dict[str, Any] = json.loads(json.dumps(plain(symbolic_candidate.Candidate(made, (), (1,)))))
    return found


def test_a_symbolic_trace_holds_what_can_be_worked_out_or_is_refused() -> None:
    assert isinstance(symbolic_candidate.from_plain(candidate()), symbolic_candidate.Candidate)
    worked = 0
    for path in places(candidate()):
        for value in EVIL:
            try:
                found = symbolic_candidate.from_plain(put(candidate(), path, value))
            except (ValueError, KeyError, TypeError):
                continue
            assert isinstance(found, symbolic_candidate.Candidate)
            if found.symbolic.holds(Point(8, 2)):
                made, _ = found.symbolic.at(Point(8, 2))
                assert len(made.sizes) == 2
                worked += 1
    assert worked > 0
