"""The tables that a sweep of a question ends in: in the report, the terminal and files. All rows are fabricated."""

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import Cli, refusal
from test_claims import Row, row, table, timed

from vramsweep.analysis.answers import answer_table as answers
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.journal import PLAN
from vramsweep.harness.spec import runner_table

pytestmark = pytest.mark.deterministic


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
    assert len(pd.read_csv(folder / "figures" / "answer.csv")) == len(answers.claims.CLAIMS)
    assert (folder / "figures" / "answer.md").read_text().startswith("# Are the guides right?")
    told = cli.json("report", folder, "--images", "none")
    assert told["answer_table"][1]["verdict"] == "confirmed (predicted)"
    cli.run("paper", folder, "--json")
    assert (folder / "paper" / "tables" / "answer.tex").exists()


@pytest.mark.slow
def test_no_question_no_answer(tmp_path: Path, cli: Cli) -> None:
    folder = written(timed(0.3), tmp_path / "sweep", None)
    cli.run("report", folder, "--images", "none", "--answer", "claims")
    assert (folder / "figures" / "answer.md").exists()
    cli.run("report", folder, "--images", "none")  # without it, the earlier one is no part of it
    assert not (folder / "figures" / "answer.md").exists()
    assert '<section id="answer"' not in (folder / "report.html").read_text()
    for content in ("{", "[]", '{"answer": 3}'):
        (folder / PLAN).write_text(content)
        assert answers.read_question(folder) is None
    (folder / PLAN).write_text('{"answer": "fit-24gb"}')  # of an earlier version
    cli.run("report", folder, "--images", "none")
    assert "no such answer" in refusal(UserError, answers.answer_question, table(*timed(0.3)), "clams")


def test_the_names_are_those_that_a_sweep_may_ask_for() -> None:
    assert answers.NAMES == runner_table.ANSWERS


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


@pytest.mark.parametrize("answer", answers.NAMES)
def test_every_answer_can_say_that_there_is_nothing(answer: str) -> None:
    found = answers.answer_question(table(row(device="cpu", simulated_gpu=None)), answer)
    assert found is not None
    assert set(found.frame["verdict"]) == {"not tested"} and "NOT TESTED: " in found.text()
    assert found.markdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", answers.NAMES)
def test_rows_of_which_little_is_known_stop_no_answer(name: str) -> None:
    way = {"precision", "checkpointing", "optimizer", "adapter", "outcome", "device"}
    rows = [
        {name: value if name in kept else None for name, value in row(outcome=outcome, seq_len=length).items()}
        for kept in ({"outcome"}, {"outcome", "device"}, {"outcome", "device", "seq_len", "peak_allocated_bytes"},
                     way, {*way, "seq_len", "model"})
        for outcome in ("ok", "oom", "invalid")
        for length in (16, 32, 64)
    ]  # fmt: skip
    rows += [row(seq_len=length, peak_reserved_bytes=None, model="unreserved") for length in (16, 32, 64)]
    found = answers.answer_question(table(*rows), name)
    assert found is not None
    said = found.text() + found.markdown() + found.frame.to_csv()
    assert len(found.frame) and "<NA>" not in said and not re.search(r"\b(nan|inf|None)\b", said)
