"""Test that text from outside is shown, but not acted on by a terminal, browser, LaTeX, Markdown or spreadsheet."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import ROOT, cases, on_terminal, source, tiny
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table as RichTable
from rich.text import Text

from vramsweep import __main__ as front_door
from vramsweep.analysis.data import export, load
from vramsweep.analysis.report import latex
from vramsweep.analysis.report.content import collect
from vramsweep.harness.messages import terminal
from vramsweep.harness.messages.console import Console
from vramsweep.harness.rows.schema import COLUMNS, TEXT_LISTS, Row, complete_row

sys.path.insert(0, str(ROOT / "tests" / "analysis"))
import synthetic

OSC = "\x1b]0;owned\x07\x1b]8;;http://evil.example\x1b\\here\x1b]8;;\x1b\\"
EVIL = f"{OSC}\x1b[2K\x1b[8m\x9b31m\x85\u202eabc\u2066\U000e0041\r[red]x[/red]"
MARKUP = (
    "<script>evil()</script>\"><img src=x onerror=evil()>'</script><svg/onload=evil()>\u2028"
    '<a href="javascript:evil()">j</a>&lt;b&gt;'
)
ACTED_ON = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)
# What decides which rows are read, and in which world they are shown; the ids are made evil below.
KEPT = {"trial_id", "outcome", "device", "memory_source", "started_at", "runner", "foreign", "isolation"}


def rows(evil: str, device: str = "cuda", **over: Any) -> list[Row]:
    """A small sweep with this text in every column of texts, among them one that failed."""
    texts: dict[str, Any] = {c.name: evil for c in COLUMNS if c.type is str and c.name not in KEPT}
    texts |= {name: [evil] for name in TEXT_LISTS}
    texts |= {"environment": {evil: evil}, "trial": {"model": {"name": evil}, "runner": {"name": evil}, evil: evil}}
    made = synthetic.sweep((128, 256, 512, 1024, 2048), (1, 2), ("default",), 1, device=device, device_gib=80)
    made = [row | {k: v for k, v in texts.items() if k in row} | over for row in made]
    for number, row in enumerate(made):
        row["trial_id"] = f"{row['trial_id']}{evil}"
        row["allocator"] = f"{evil}{number % 2}"
    made[0] |= {"outcome": "crash", "terminal": True}
    return [complete_row(row) for row in made]


def shown_to_act(text: str) -> list[str]:
    """Return the parts of a text that a terminal would act on."""
    return ACTED_ON.findall(text)


@given(st.text(st.characters()))
def test_shown_text_holds_nothing_that_a_terminal_acts_on(text: str) -> None:
    assert shown_to_act(terminal.escape_text(text)) == []
    assert terminal.escape_text(terminal.escape_text(text)) == terminal.escape_text(text)
    plain = "".join(sign for sign in text if sign.isprintable())
    assert terminal.escape_text(plain) == plain  # é, 語 and “ stay


@pytest.mark.parametrize(
    "made",
    [
        lambda: EVIL,
        lambda: Text(EVIL),
        lambda: Text.from_ansi(EVIL),
        lambda: Text("x", style="link http://evil.example"),
        lambda: _table(EVIL),
    ],
    ids=["text", "Text", "ansi", "link", "table"],
)
def test_no_renderable_of_the_console_acts(made: Callable[[], Any]) -> None:
    stream = io.StringIO()
    Console(file=stream, width=200).print(made())
    assert shown_to_act(stream.getvalue().replace("\n", "")) == []
    coloured = io.StringIO()
    Console(file=coloured, width=200, force_terminal=True).print(made())
    own = re.sub(r"\x1b\[[\d;]*m", "", coloured.getvalue())  # colours are Rich's
    assert shown_to_act(own.replace("\n", "")) == []
    assert "[red]x[/red]" in stream.getvalue() or "evil" not in stream.getvalue()


def _table(text: str) -> RichTable:
    table = RichTable(text, title=text, caption=text)
    table.add_row(text)
    return table


def test_every_way_to_print_is_one_of_these() -> None:
    """Rich's own console, the streams behind ours and file descriptors evade what escapes."""
    imports = r"from rich\.console import [\w, (\n]*\bConsole\b|from rich import [\w, (\n]*\b(?:print|get_console)\b"
    evades = re.compile(rf"^\s*(?:{imports})|\.__std(?:out|err)__", re.MULTILINE)
    assert evades.search("from rich.console import (\n    Group,\n    Console,\n)") and evades.search("sys.__stdout__")
    packages = ("harness", "analysis", "vramsweep", "hydra_plugins")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    assert [str(file) for file in files if evades.search(file.read_text())] == []


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two results folders whose rows, plan and own names are evil; one measured, one predicted."""
    made = []
    for number, device in enumerate(("cuda", "simulated")):
        folder = synthetic.write(tmp_path / f"{EVIL.replace('/', '')}{number}", rows(EVIL, device))
        (folder / "plan.json").write_text(json.dumps({"command": [EVIL], "answer": EVIL, "run": EVIL}))
        made.append(folder)
    yield made[0], made[1]


VERBS = dict(cases("verbs_of_evil_text"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_prints_what_a_terminal_acts_on(
    verb: str, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"a": folders[0], "b": folders[1], "evil": EVIL, "python": sys.executable}
    try:
        status = front_door.main([word.format(**given) for word in VERBS[verb].split()])
    except SystemExit as end:  # argparse
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    assert shown_to_act(out + err) == []
    assert status in (0, 1, 2)
    assert "Traceback" not in err
    if verb not in ("export", "timeline", "draw", "errors", "replay", "explain", "calibrate"):
        assert r"\x1b" in out + err or r"\u202e" in out + err  # so it came that far


def test_what_python_says_of_an_error_that_nobody_caught_is_shown_too(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom vramsweep.harness.messages.terminal import escaped\n"
        "with escaped():\n    raise RuntimeError(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, EVIL], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert shown_to_act(done.stderr) == []


LIVE = source("evil_live_region.txt")


def test_a_live_region_prints_what_others_say_as_text() -> None:
    """On a terminal Rich takes the streams over while its region is there, and would read sequences in them."""
    status, text = on_terminal(LIVE, json.dumps([EVIL, tiny(model={"name": EVIL})]), columns=400)
    assert status == 0
    assert "\x1b[2K" in text  # the region is drawn: Rich's own sequences are not escaped
    assert "\x1b[8m" not in text
    own = re.sub(r"\x1b\[[?\d;]*[mKAhlGJ]", "", text)
    assert own.count(r"\x1b]0;owned") >= 6  # what began, two lines of others, a label and a reason, a last line
    assert shown_to_act(own.replace("\r", "")) == []


# Elements that no page of ours has, attributes that are code, and links that are none of ours.
ACTING = source("acting_elements.js")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The pages of a report on rows that hold markup everywhere."""
    folder = tmp_path_factory.mktemp("pages")
    synthetic.write(folder, [*rows(MARKUP), *rows(MARKUP, "simulated")])
    (folder / "plan.json").write_text(json.dumps({"command": [MARKUP], "answer": "claims"}))
    assert front_door.main(["report", str(folder), "--images", "none"]) == 0
    return [folder / "report.html", *sorted((folder / "figures").glob("*.html"))]


@pytest.mark.slow
def test_pages_of_evil_rows_do_nothing_in_a_browser(pages: list[Path], chromium: Any) -> None:
    report = pages[0].read_text(encoding="utf-8")
    assert len(pages) > 4 and "&lt;script&gt;evil()" in report and "Content-Security-Policy" in report
    assert not any("<script>evil()" in page.read_text(encoding="utf-8") for page in pages)
    problems: list[str] = []
    for file in pages:
        page = chromium.new_page()
        page.expose_function("evil", lambda: problems.append("ran"))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto(f"file://{file}")
        page.wait_for_selector(".js-plotly-plot .main-svg")  # a page may forbid to evaluate text
        if file.name == "report.html":
            page.wait_for_selector("html[data-drawn]", state="attached")
            page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
            page.wait_for_selector("#rows-table tbody tr")
        assert page.evaluate(ACTING) == [], file
        page.close()
    assert problems == []


@pytest.mark.slow
def test_a_figure_s_texts_are_no_markup() -> None:
    """Plotly reads a little HTML in names, labels and what hovering shows: a link would be one."""
    link = "<a href='https://evil.example'>click</a><br>"
    made = [row | {"trial_id": f"{link}{n}", "model": link} for n, row in enumerate(synthetic.curve((512, 1024, 2048)))]
    table = load.from_frame(pd.DataFrame(made), "x")
    figures = collect(table).figures
    assert len(figures) >= 4
    for figure in figures:
        assert "<a href" not in figure.plot.to_json().replace(r"<", "<"), figure.name


TEX = "\\input{/etc/passwd} 50% $x$ a&b _c_ #1 {y} ~ ^^5cinput{x}\n\n\\end{table}\x1b\u202e\r"
SAFE = (  # what text may become
    r"\\(?:text(?:backslash|ascii(?:tilde|circum|grave)|less|greater|bar)|dots|allowbreak)\{\}|\\textsuperscript\{2\}|"
    r"\\ensuremath\{(?:\^\{\\circ\}|\\mu|\\cdot|-)\}|\\[&%$#_{}]|\{[\[\]*]\}"
)
OURS = (
    r"\\(?:begin|end)\{(?:table|tabular|minipage)\*?\}|\\(?:centering|toprule|midrule|bottomrule|footnotesize|scriptsize|par|"
    r"smallskip|raggedright|arraybackslash|linewidth|textwidth|columnwidth|caption|label|setlength|tabcolsep|unit|percent|"
    r"(?:above|below)captionskip)\b|\\\\"
)


@given(st.text(st.sampled_from("\\%$&_#{}~^[*a\n\r\x1b\u202e²°µ·")) | st.just(TEX))
def test_latex_is_text(text: str) -> None:
    columns = (*latex.columns(pd.DataFrame({text: [text]})), latex.Column(text, (text,), unit=text))
    made = latex.latex(latex.Table("t", text, columns, notes=(text,)), f"tab:{latex.slug(text)}")
    plain = re.sub(SAFE, "", made)
    assert "\\" not in re.sub(OURS, "", plain)
    assert not re.search(r"[%$#^\x1b\u202e]", plain)
    assert plain.count("&") == len(re.findall(r"\\\\$", plain, re.MULTILINE))  # two columns in each line
    assert "\n\n" not in made  # an empty line would end a caption
    assert not re.search(r"\\\\\s*[\[*]", made)
    assert plain.count("{") == plain.count("}")


MARKDOWN = "a|b\\|c`d`\n# head\r\n<script>x</script>[l](javascript:x)![i](http://x)"


@given(st.text(st.sampled_from("|\\`\n\r<>[]!(a# \x1b\u2028")) | st.just(MARKDOWN))
def test_a_markdown_table_keeps_its_cells(text: str) -> None:
    made = export.markdown(pd.DataFrame({"name": [text, "x"], text or "_": ["y", text]}))
    lines = made.rstrip("\n").split("\n")
    assert len(lines) == 4
    assert shown_to_act(made) == []
    for line in lines:
        bare = re.sub(r"\\[\\|`<\[]", "", line)  # what is escaped is text
        assert bare.count("|") == 3
        assert not set("\\`<[") & set(bare)


def test_a_sentence_of_an_answer_is_no_markup() -> None:
    said = export.prose(f"of `device=cuda`: {MARKDOWN}{EVIL}")
    assert shown_to_act(said) == []
    assert "\n" not in said
    assert "`device=cuda`" in said
    assert not re.search(r"(?<!\\)[<\[]", said)


FORMULAS = ['=HYPERLINK("http://evil")', "+1+cmd|' /C calc'!A0", "-2+3+cmd|' /C calc'!A0", "@SUM(1)", "\t=1", "\r=1"]


@pytest.mark.slow
def test_a_spreadsheet_finds_no_formula(tmp_path: Path) -> None:
    made = [row for text in FORMULAS for row in rows(text)]
    table = load.from_frame(pd.DataFrame(made), "x")
    export.write_csv(table.frame, tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as stream:
        cells = [cell for line in csv.reader(stream) for cell in line]
    assert cells
    assert [cell for cell in cells if cell[:1] in tuple("=@\t\r") and cell] == []
    assert [cell for cell in cells if re.match(r"[+-](?!\d[\d.,]*$)", cell)] == []
    back = load.load(tmp_path / "rows.csv").frame
    assert set(back["model"]) == set(FORMULAS)  # and reading it again gives what it was


@pytest.mark.parametrize("text", ["-3", "+5.2 %", "-1,024", "-0.5 GiB", "–", "−3", "a=b", "lengths:x", "'quoted'"])
def test_what_is_no_formula_stays(text: str, tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [text]})
    export.write_csv(frame, tmp_path / "x.csv")
    assert list(csv.reader((tmp_path / "x.csv").open()))[1] == [text]
    assert export.as_it_was(export.guarded(text)) == text


@pytest.mark.slow
@given(st.text())
def test_a_guarded_cell_can_be_read_back(text: str) -> None:
    assert export.as_it_was(export.guarded(text)) == text


@pytest.mark.slow
def test_all_csv_files_of_a_report_and_a_paper_are_guarded(tmp_path: Path) -> None:
    text = FORMULAS[0]
    folder = synthetic.write(tmp_path / "s", [*rows(text), *rows(text, "simulated")])
    assert front_door.main(["report", str(folder), "--images", "none", "--answer", "claims"]) == 0
    assert front_door.main(["paper", str(folder)]) == 0
    files = sorted(folder.rglob("*.csv"))
    assert len(files) > 8
    for file in files:
        with file.open(newline="") as stream:
            bad = [cell for line in csv.reader(stream) for cell in line if cell.startswith("=")]
        assert bad == [], file
    for file in folder.rglob("*.tex"):
        assert not shown_to_act(file.read_text())
