"""The tables that a sweep of a question ends in: in the report, the terminal and files. All rows are fabricated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Cli
from test_claims import GIB, Row, row, table, timed

from vramsweep.analysis.answers import edges, ways
from vramsweep.analysis.answers import registry as answers
from vramsweep.analysis.report import page
from vramsweep.harness import registry
from vramsweep.harness.errors import UserError
from vramsweep.harness.journal import PLAN


def written(rows: list[Row], folder: Path, answer: Any) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({**one, "trial_id": f"t{i}", "sweep": folder.name}) for i, one in enumerate(rows)]
    (folder / "journal.jsonl").write_text("\n".join(lines) + "\n")
    if answer is not None:
        (folder / PLAN).write_text(json.dumps({"answer": answer}))
    return folder


@pytest.mark.slow
def test_the_report_of_a_question_begins_with_its_answer(tmp_path: Path, cli: Cli) -> None:
    folder = written(timed(0.3), tmp_path / "claims", "claims")
    said = cli.run("report", folder, "--images", "none").out
    assert "CONFIRMED (PREDICTED): Gradient checkpointing costs 20 to 33 % of time\n  found: 30 % (made-up" in said
    card = said[said.index("Are the guides right?") : said.index("\nnote: ")]
    assert max(map(len, card.splitlines())) <= 80
    page = (folder / "report.html").read_text()
    assert [id for id in re.findall('<section id="([a-z-]+)"', page) if id != "main-figure"][:3] == [
        "card", "answer", "findings",
    ]  # fmt: skip
    assert "<h3>Gradient checkpointing costs 20 to 33 % of time</h3><p><strong>confirmed (predicted)</strong>" in page
    assert '<a href="https://arxiv.org/abs/2205.14135">' in page
    assert len(pd.read_csv(folder / "answer.csv")) == len(answers.claims.CLAIMS)
    assert (folder / "answer.md").read_text().startswith("# Are the guides right?")
    told = cli.json("report", folder, "--images", "none")
    assert told["answer_table"][1]["verdict"] == "confirmed (predicted)"
    cli.run("paper", folder, "--json")
    assert (folder / "paper" / "tables" / "answer.tex").exists()


@pytest.mark.slow
def test_no_question_no_answer(tmp_path: Path, cli: Cli) -> None:
    folder = written(timed(0.3), tmp_path / "sweep", None)
    cli.run("report", folder, "--images", "none", "--answer", "claims")
    assert (folder / "answer.md").exists()
    cli.run("report", folder, "--images", "none")  # without it, the earlier one is no part of it
    assert not (folder / "answer.md").exists()
    assert '<section id="answer"' not in (folder / "report.html").read_text()
    for content in ("{", "[]", '{"answer": 3}'):
        (folder / PLAN).write_text(content)
        assert answers.asked(folder) is None
    (folder / PLAN).write_text('{"answer": "clams"}')
    wrong = cli.refuse("report", folder, "--images", "none")
    assert "answer=clams: there is no such answer; allowed: claims, " in wrong
    with pytest.raises(UserError, match="no such answer"):
        answers.answered(table(*timed(0.3)), "clams")


def test_the_names_are_those_that_a_sweep_may_ask_for() -> None:
    assert answers.NAMES == registry.ANSWERS


@pytest.mark.slow
def test_files_of_others_beside_rows_stay(tmp_path: Path, cli: Cli) -> None:
    folder = written(timed(0.3), tmp_path / "sweep", None)
    cli.run("report", folder, "--images", "none")
    for place in (tmp_path / "downloads", folder):
        place.mkdir(exist_ok=True)
        others = [place / name for name in ("answer.csv", "answer.md", "residuals.csv")]
        for file in others:
            file.write_text("mine")
        rows = folder if place == folder else (folder / "rows.csv").rename(place / "rows.csv")
        cli.run("report", rows, "--images", "none")
        assert [file.read_text() for file in others] == ["mine"] * 3


@pytest.mark.parametrize("answer", answers.ANSWERS, ids=lambda a: a.name)
def test_every_answer_can_say_that_there_is_nothing(answer: answers.Answer) -> None:
    found = answers.answered(table(row(device="cpu", simulated_gpu=None)), answer.name)
    assert found is not None
    assert "No row answers this." in found.text() or set(found.frame["verdict"]) == {"not tested"}
    assert found.markdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", answers.NAMES)
def test_rows_of_which_little_is_known_stop_no_answer(name: str) -> None:
    way = {*ways._PLAIN, "outcome", "device"}
    rows = [
        {name: value if name in kept else None for name, value in row(outcome=outcome, seq_len=length).items()}
        for kept in ({"outcome"}, {"outcome", "device"}, {"outcome", "device", "seq_len", "peak_allocated_bytes"},
                     way, {*way, "seq_len", "model"})
        for outcome in ("ok", "oom", "invalid")
        for length in (16, 32, 64)
    ]  # fmt: skip
    rows += [row(seq_len=length, peak_reserved_bytes=None, model="unreserved") for length in (16, 32, 64)]
    found = answers.answered(table(*rows), name)
    assert found is not None
    said = found.text() + found.markdown() + found.frame.to_csv()
    assert len(found.frame) and "<NA>" not in said and not re.search(r"\b(nan|inf|None)\b", said)


@pytest.mark.slow
def test_what_fits() -> None:
    def one(gib: float, fits: bool, **values: Any) -> Row:
        peak = "peak_reserved_bytes" if fits else "unlimited_peak_reserved_bytes"
        return row(**{"peak_reserved_bytes": None, peak: int(gib * GIB), "outcome": "ok" if fits else "oom", **values})

    lora = {"checkpointing": "full", "adapter": "lora"}
    rows = [
        one(20, True, precision="fp32"),
        one(30, False, precision="bf16"),
        one(12.34, True, checkpointing="full"),
        one(9, True, checkpointing="full", optimizer="adamw_bnb_8bit"),
        one(7, True, precision="bf16_pure", **lora),
        row(model="small", parameters=5, outcome="crash", reason="no such thing", precision="fp32"),
        row(precision="fp16"),  # none of the ways, nor are these:
        one(70, False, precision="fp32", attention="eager"),
        one(70, False, precision="fp32", allocator="expandable"),
        one(70, False, precision="fp32", sharding="fsdp2", world_size=8),
        one(70, False, precision="bf16_pure", lora_r=64, **lora),
    ]
    frame, notes = ways.make(table(*rows))
    assert frame.to_dict("records") == [
        {"model": "small", "fp32": "crash", "bf16": "–", "checkpt": "–", "8-bit": "–", "LoRA": "–", "QLoRA": "–"},
        {"model": "made-up", "fp32": "yes 20.0", "bf16": "no 30.0", "checkpt": "yes 12.3", "8-bit": "yes 9.0",
         "LoRA": "yes 7.0", "QLoRA": "–"},
    ]  # fmt: skip
    assert notes[0] == "tokens 1,024, batch 1, card predicted: h100-80gb"
    assert "no such thing" in notes[-1]
    both, _ = ways.make(table(*rows, {**rows[0], "device": "cuda", "gpu_name": "NVIDIA L4", "simulated_gpu": None}))
    assert list(both["card"]) == ["measured: NVIDIA L4", "predicted: h100-80gb", "predicted: h100-80gb"]


@pytest.mark.slow
def test_what_tells_runs_apart_is_no_line_s_secret() -> None:
    def one(outcome: str, **other: Any) -> Row:
        size = "peak_reserved_bytes" if outcome == "ok" else "unlimited_peak_reserved_bytes"
        return row(**{"peak_reserved_bytes": None, size: 9 * GIB, "outcome": outcome, **other})

    frame, _ = ways.make(
        table(one("ok"), one("oom", runner="trainer"), one("ok", precision="fp32"), one("ok", repeat=1))
    )
    assert frame[["runner", "fp32", "bf16"]].to_dict("records") == [
        {"runner": "torch", "fp32": "yes 9.0", "bf16": "yes 9.0"},
        {"runner": "trainer", "fp32": "–", "bf16": "no 9.0"},
    ]
    assert not {"protocol", "torch_version", "card"} & set(frame)
    less, _ = ways.make(table(one("ok"), one("oom", memory_limit_bytes=8 * GIB)))
    assert list(less["bf16"]) == ["yes 9.0", "no 9.0"] and len(set(less["memory_limit_bytes"])) == 2


def test_rows_of_no_way_are_told_the_ways() -> None:
    found = answers.answered(table(row(precision="fp16", outcome="crash", reason="unused")), "fit-24gb")
    assert found is not None and found.frame.empty
    said = " ".join(found.text().split())
    assert "No row answers this." in said and "fp32: precision=fp32; bf16: precision=bf16; checkpt: " in said
    assert "unused" not in said


def test_reasons_of_the_lines_are_counted() -> None:
    rows = [row(model=str(n), outcome="crash", reason=f"reason {n}") for n in range(5)]
    assert ways.make(table(*rows))[1][-1].endswith("reason 0; reason 1; reason 2; and 2 more reasons")


def test_curves_that_differ_in_something_are_called_differently() -> None:
    ways_of = ({}, {"zero_init": False}, {"runner": "trainer"}, {"protocol": "paper"}, {"versions": "torch 2.4"})
    rows = [
        row(seq_len=length, sharding="zero3", world_size=2, **{"zero_init": True} | other)
        for length in (16, 32)
        for other in ways_of
    ]
    frame, _ = edges.make(table(*rows))
    assert len(set(frame["configuration"])) == len(frame) == len(ways_of)
    assert "zero_init=false" in frame["configuration"][1]


@pytest.mark.slow
def test_what_a_curve_says() -> None:
    def curve(fitting: dict[int, int], out: tuple[int, ...], axis: str, **values: Any) -> list[Row]:
        fits = [row(peak_reserved_bytes=gib * GIB, **{axis: x}, **values) for x, gib in fitting.items()]
        return [*fits, *(row(outcome="oom", peak_reserved_bytes=None, **{axis: x}, **values) for x in out)]

    rows = [
        *curve({512: 4, 1024: 6, 4096: 9}, (2048,), "seq_len"),  # one that fits above one that does not is luck
        *curve({512: 4, 2048: 6}, (), "seq_len", allocator="expandable", allocator_conf="expandable:True"),
        *curve({}, (2, 4), "micro_batch", seq_len=16),
        *curve({1: 4, 4: 6}, (8,), "micro_batch", model="other"),
        row(outcome="timeout", micro_batch=2, model="other"),
    ]
    frame, notes = edges.make(table(*rows))
    assert frame.to_numpy().tolist() == [
        ["made-up, batch 1", "tokens", "1,024", "4.0 to 6.0", "2,048"],
        ["made-up, batch 1, expandable", "tokens", "2,048", "4.0 to 6.0", "–"],
        ["made-up, 16 tokens", "batch", "none", "–", "2"],
        ["other, 1,024 tokens", "batch", "1", "4.0 to 4.0", "2 (timeout)"],
    ]
    assert notes[0] == "card predicted: h100-80gb"
    other = edges.make(table(*rows, *({**one, "simulated_gpu": "l4-24gb"} for one in rows)))[0]
    assert set(other["card"]) == {"predicted: h100-80gb", "predicted: l4-24gb"}
    found = answers.answered(table(*rows), "seqlen-zero3")
    assert found is not None
    assert max(map(len, found.text().splitlines())) <= 80


def test_a_long_first_cell_is_folded_where_the_rest_has_room() -> None:
    def shown(first: str, second: str) -> list[str]:
        frame = pd.DataFrame([{"change": first, "MiB": second, "fits": "yes"}])
        return answers.Answered("n", "t", frame, ()).text().splitlines()[2:]

    lines = shown("checkpointing=full optimizer=adamw_bnb_8bit use_cache=off grad_accum=2 loss=chunked", "3,154")
    assert max(map(len, lines)) <= 80 and lines[1].endswith("3,154  yes") and lines[2] == "grad_accum=2 loss=chunked"
    assert shown("short", "a number with many words " * 4)[:2] == [  # a card, which has no verdict
        "short", "  MiB: " + "a number with many words " * 2 + "a number with many",
    ]  # fmt: skip


def test_what_is_too_wide_is_a_card_with_a_heading_and_a_verdict_if_there_is_one() -> None:
    frame = pd.DataFrame([{"model": "gpt2", "tokens": "512", "said": "words " * 20}])
    plain = answers.Answered("n", "t", frame, ())
    assert list(plain.cards()) == [("gpt2", None, {"tokens": "512", "said": "words " * 20})]
    assert "<h3>gpt2</h3><dl><dt>tokens</dt><dd>512</dd>" in page.part("answer", plain)
    judged = answers.Answered("n", "t", frame, (), "tokens")
    assert judged.text().splitlines()[2] == "512: gpt2"
    assert "<h3>gpt2</h3><p><strong>512</strong></p><dl><dt>said</dt>" in page.part("answer", judged)
    assert "<h3>" not in page.part(
        "answer", answers.Answered("n", "t", frame[["model"]], ())
    )  # the section has the title
