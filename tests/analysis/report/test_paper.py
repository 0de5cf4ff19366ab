"""The folder for a paper: tables that a real LaTeX sets, figures whose words are all on the page, and again from it."""

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import Cli, parametrized

from vramsweep.analysis.cli import main
from vramsweep.analysis.data import export
from vramsweep.analysis.data.load import from_frame
from vramsweep.analysis.figures.composition import OF_PEAK
from vramsweep.analysis.report import latex, paper_tables
from vramsweep.analysis.report.findings import methods
from vramsweep.analysis.report.write import lock_text

NEEDS = {"pdflatex": "a LaTeX (pdflatex)", "pdftotext": "poppler's pdftotext"}
EVIL = r"[5] * 50 % & $x$_\input{y} #1 {~^} 语言"


def needs(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{NEEDS[program]} is not here")
    return found


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A paper of measured and predicted rows, with a name that other languages read."""
    lengths = (128, 256, 512, 1024, 2048)
    predicted = {"simulated_gpu": "l4-24gb", "gpu_name": None, "unproven": ["adapter=lora"]}
    rows = [
        *synthetic.sweep(lengths, (1, 2)),
        *synthetic.sweep(lengths, (1,), allocators=(EVIL,), flags=["wide_spread"]),
        *synthetic.sweep(range(1024, 3584, 256), (1,), device="simulated", **predicted),  # too many for level labels
        *synthetic.sweep((1152, 2048), (4,), device="simulated", **predicted),
    ]
    for number, row in enumerate(rows):
        row["trial_id"] = f"{row['trial_id']}-{number}"
        if row["device"] == "simulated" and row["outcome"] == "ok":
            row |= dict.fromkeys(OF_PEAK.values(), row["peak_allocated_bytes"] // len(OF_PEAK))
    folder = synthetic.write(tmp_path_factory.mktemp("paper") / "sweep", rows)
    assert main(["paper", str(folder)]) == 0
    return folder / "paper"


def compiled(folder: Path, name: str) -> str:
    """The log of LaTeX's second run."""
    line = [needs("pdflatex"), "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", name]
    for _ in range(2):
        done = subprocess.run(line, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    return (folder / Path(name).with_suffix(".log")).read_text(encoding="utf-8", errors="replace")


def complaints(log: str) -> list[str]:
    return [line for line in log.splitlines() if re.search(r"Overfull|undefined|multiply|^!", line)]


@pytest.mark.slow
def test_a_real_latex_sets_every_table_and_figure_and_nothing_sticks_out(paper: Path) -> None:
    example = (paper / "example.tex").read_text()
    tables = [f"tables/{file.stem}" for file in (paper / "tables").glob("*.tex")]
    figures = [f"figures/{file.stem}" for file in (paper / "figures").glob("*.csv")]
    assert len(tables) >= 8
    assert set(re.findall(r"\\input\{\\vramsweeppath/((?:tables|figures)/.*?)\}", example)) == {*tables, *figures}
    assert complaints(compiled(paper, "example.tex")) == []


@pytest.mark.slow
def test_every_word_of_a_figure_is_on_its_page_and_its_small_print_says_what_it_is_of(paper: Path) -> None:
    figures = sorted((paper / "figures").glob("*.pdf"))
    assert len(figures) >= 8
    for figure in figures:
        made = subprocess.run([needs("pdftotext"), "-bbox", figure, "-"], capture_output=True, text=True, check=True)
        page = re.search(r'<page width="([\d.]+)" height="([\d.]+)">', made.stdout)
        assert page is not None and float(page[1]) == pytest.approx(3.5 * 72, abs=0.1)
        pattern = r'xMin="(.*?)" yMin="(.*?)" xMax="(.*?)" yMax="(.*?)">(.*?)<'
        found = re.findall(pattern, made.stdout)
        words = [(float(x0), float(y0), float(x1), float(y1), word) for x0, y0, x1, y1, word in found]
        right, bottom = float(page[1]) + 0.5, float(page[2]) + 1
        assert [one for one in words if one[0] < 0 or one[1] < -1 or one[2] > right or one[3] > bottom] == [], figure
        assert overlapping(words) == [], figure.name
        assert max(gaps([one for one in words if one[1] > bottom / 2])) < 30, f"{figure.name}: air"
        text = " ".join(word for *_, word in words)
        assert re.search(r"(Measured|Predicted|Measured and predicted) (on|for) .* · torch 0.0 · .* rows?\b", text)


def gaps(words: Sequence[tuple[float, float, float, float, str]]) -> list[float]:
    """The heights, in points, without a word, from above."""
    ends = list(itertools.accumulate((one[3] for one in sorted(words, key=lambda one: one[1])), max))
    return [below - above for above, below in zip(ends, sorted(one[1] for one in words)[1:], strict=False)]


def overlapping(words: Sequence[tuple[float, float, float, float, str]]) -> list[str]:
    """Pairs of words (left, top, right, bottom in points, text) that cover each other by more than their edges."""
    found = []
    for one, other in itertools.combinations(words, 2):
        across = min(one[2], other[2]) - max(one[0], other[0])
        down = min(one[3], other[3]) - max(one[1], other[1])
        if across > 1.5 and down > 0.35 * min(one[3] - one[1], other[3] - other[1]):
            found.append(f"{one[4]} and {other[4]}")
    return found


@pytest.mark.slow
def test_tables_that_would_be_too_wide_or_too_long_lose_columns_and_lines_and_say_so(tmp_path: Path) -> None:
    long = "a_name_that_has_no_end/" * 3
    wide = pd.DataFrame({f"column {n}": [long, "x" * 60] for n in range(9)})
    lines = [(f"{EVIL} {n}", f"{n * 1.5:,.1f}", f"{n * 1000:,} ± {n + 1}", f"{n} to {n * 12345:,}") for n in range(90)]
    numbers = pd.DataFrame(lines, columns=["name", "size (GiB)", "speed", "range"])
    numbers.loc[89, "range"] = "–"
    numbers["mixed"] = ["–", "1 GiB", *["2 MiB"] * 88]
    made = {}
    for name, frame in (("wide", wide), ("numbers", numbers)):
        table = latex.Table(name, f"{name} {EVIL}", tuple(latex.columns(frame)))
        made[name] = latex.latex(table, f"tab:{name}")
        (tmp_path / f"{name}.tex").write_text(made[name], encoding="utf-8")
    assert "Columns that did not fit are in wide.csv: column" in made["wide"]
    assert "more lines are in numbers.csv" in made["numbers"]
    assert r"(\unit{\gibi\byte})" in made["numbers"] and "88000 +- 89" not in made["numbers"]
    example = latex.render("example.tex.j2", prefix="x", tables=[], figures=[], methods="")
    own = example.replace(r"\vramsweeppath/methods", "wide").replace(r"\vramsweeppath/results", "numbers")
    (tmp_path / "own.tex").write_text(own, encoding="utf-8")
    assert complaints(compiled(tmp_path, "own.tex")) == []


def test_tables_escape_what_their_language_reads() -> None:
    frame = pd.DataFrame({"name": ["a_b & 50 % | x"], "GiB": ["1.5"]})
    assert r"a\_b \& 50 \% \textbar{} x & 1.5 \\" in latex.latex(latex.Table("t", "", (*latex.columns(frame),)), "t")
    assert r"a_b & 50 % \| x | 1.5" in export.markdown(frame)
    assert "---:" in export.markdown(frame)


@parametrized("latex_columns")
def test_a_column_of_numbers_in_one_unit_is_set_as_numbers(
    cells: list[str], unit: str, kind: str, made: tuple[str, ...]
) -> None:
    (found,) = latex.columns(pd.DataFrame({"size": cells}))
    assert (found.unit, found.kind, found.cells) == (unit, kind, made)


@parametrized("cells_with_intervals")
def test_a_bracket_is_less_than_its_value(value: float, ends: tuple[float, float], cell: str) -> None:
    assert paper_tables._uncertain(value, ends) == cell
    for half in 10.0 ** np.linspace(-9, 3, 200):  # of any width
        made = re.fullmatch(r"(\d+(?:\.(\d+))?)\((\d+)\)", paper_tables._uncertain(value, (value - half, value + half)))
        assert made is None or half <= int(made[3]) / 10 ** len(made[2] or "") * (1 + 1e-9) < float(made[1])


def test_methods_name_techniques_in_effect_that_are_not_defaults() -> None:
    own = {"checkpointing": "full", "checkpointing_every": 2, "attention": "sdpa", "adapter": "none", "lora_r": 8}
    told = methods(synthetic.table(synthetic.curve((128, 256), **own)), [])
    assert "Techniques that are not at their defaults: checkpointing full (2 rows); checkpointing_every 2 (2 r" in told


@pytest.mark.slow
def test_the_folder_is_made_again_byte_for_byte_and_digests_tell_what_differs(
    paper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(paper, moved)
    monkeypatch.chdir(moved)
    cli.run(*json.loads((moved / "environment.json").read_text())["command"], "--out", "again")
    assert (moved / "again" / "SHA256SUMS").read_text() == (paper / "SHA256SUMS").read_text()
    tables = {str(file.relative_to(paper)) for file in (paper / "tables").iterdir()}
    figures = {str(file.relative_to(paper)) for file in (paper / "figures").glob("*.csv")}
    named = {line.split(maxsplit=1)[1] for line in (paper / "SHA256SUMS").read_text().splitlines()}
    assert {*tables, *figures, "methods.tex", "results.tex", "rows/journal.jsonl"} <= named

    def check() -> tuple[int, str]:
        done = subprocess.run(
            ["sha256sum", "--check", "--quiet", "SHA256SUMS"], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert check() == (0, "")
    (moved / "tables" / "fits_allocated_predicted.md").write_text("| other |\n")
    assert check() == (1, "tables/fits_allocated_predicted.md: FAILED\n")


@pytest.mark.slow
def test_what_a_paper_says_of_its_rows(paper: Path) -> None:
    results, rows = (paper / "results.tex").read_text(), pd.read_csv(paper / "rows.csv")
    assert results.count(r"(Table~\ref{tab:") == len(list((paper / "tables").glob("*.tex")))
    ran = rows[rows["device"].eq("simulated") & rows["outcome"].eq("ok")]
    ends = ran[ran["micro_batch"].eq(1)]["seq_len"].agg(["min", "max"])
    assert f"lengths from {ends['min']:,} to {ends['max']:,} tokens" in results
    assert f"to {ran['peak_allocated_bytes'].max() / 2**30:.2f} GiB" in results
    assert "The same numbers hold for allocated and active memory" in results  # which are in one table
    assert not list((paper / "tables").glob("fits_active*"))
    predicted = (paper / "tables" / "settings_predicted.tex").read_text()
    assert r"Predicted, not measured, for l4-24gb" in predicted and "unproven: adapter=lora" in predicted
    measured = next((paper / "tables").glob("settings_measured*.tex")).read_text()
    assert "Measured on" in measured and "flagged: wide spread" in measured and r"\toprule" in measured
    assert "Unproven, because no GPU has confirmed the prediction yet: adapter=lora." in (
        paper / "methods.txt"
    ).read_text(encoding="utf-8")
    assert json.loads((paper / "environment.json").read_text())["coverage"]["ok"] > 40
    readme = (paper / "README.md").read_text(encoding="utf-8")
    for file in (paper / "tables").glob("*.tex"):
        assert f"`tables/{file.name}`" in readme


@pytest.mark.slow
def test_what_is_the_users_stays(tmp_path: Path, cli: Cli) -> None:
    rows = synthetic.write(tmp_path / "sweep", synthetic.curve((128,)))
    mine = {name: tmp_path / "out" / name for name in ("README.md", "figures/own.pdf", "tables/own.tex", "rows/own")}
    for file in mine.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    for verb in ("paper", "report"):
        said = cli.refuse(verb, rows, "--out", tmp_path / "out")
        assert re.search("contains README.md, figures, rows and 1 more, but not the list .*\n.*--out", said)
    shutil.move(tmp_path / "out", tmp_path / "before")
    for _ in range(2):
        cli.run("paper", rows, "--out", tmp_path / "out")
        shutil.copytree(tmp_path / "before", tmp_path / "out", dirs_exist_ok=True)
    assert all(file.read_text() == "mine" for file in mine.values())
    assert (tmp_path / "out" / "README.md.kept").read_text() == "mine"
    cli.run("report", rows, "--images", "none")
    (rows / "report.html").write_text("mine")
    cli.run("report", rows / "rows.csv", "--images", "none")  # beside the rows that it reads
    assert (rows / "report.html.kept").read_text() == "mine"


def test_a_version_that_is_none_is_no_line_that_pip_reads() -> None:
    rows = synthetic.sweep((128,), (1,), repeats=1, torch_version="2.4.0\n--index-url=http://evil.example", seed=1)
    text = lock_text(from_frame(pd.DataFrame(rows), "x").frame)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+!_-]+", line) for line in lines)
    assert not any(line.startswith("torch==") for line in lines)
