"""The documentation: its links lead somewhere, its commands exist, its tables are the code's, its site builds offline.

What a page shows of a command's output is what the command prints, where its block has a mark (docs/outputs.py) and the
command does not take minutes. Not covered: other blocks, and prose.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from conftest import ROOT
from markdown_it import MarkdownIt
from markdown_it.token import Token

from vramsweep import __main__ as front_door
from vramsweep.verbs import BY_NAME

PAGES = sorted((ROOT / "docs").glob("*.md"))
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "published" / "README.md", *PAGES]
HYDRA = ("sweep", "plan", "predict", "advise", "explain", "timeline", "run")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def script(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for its types
    spec.loader.exec_module(module)
    return module


@cache
def tokens(path: Path) -> list[Token]:
    """Every token of a page, also those within a line."""
    found: list[Token] = []
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        found += [token, *(token.children or ())]
    return found


@cache
def anchors(path: Path) -> set[str]:
    """Return what `#...` may name in a page: its headings, as code hosts and MyST write them."""
    found: set[str] = set()
    heading = False
    for token in tokens(path):
        if heading and token.type == "inline":
            text = "".join(part.content for part in token.children or () if part.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            count = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
            found.add(f"{slug}-{count}" if count else slug)
        heading = token.type == "heading_open"
    return found


@pytest.mark.parametrize("path", FILES, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for token in tokens(path):
        target = token.attrGet("href") or token.attrGet("src")
        if not isinstance(target, str) or re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        to = (path.parent / file).resolve() if file else path
        if not to.exists() or not to.is_relative_to(ROOT):
            wrong.append(f"{target}: there is no such file")
        elif anchor and anchor not in anchors(to):
            wrong.append(f"{target}: {to.name} has no such heading")
    assert not wrong


# Words that the glossary (CONTRIBUTING) replaces, where one reading alone is possible.
BANNED = (
    r"verbs?", "mended", r"go(?:es)? on with", "gone on with", r"passing faults?", r"leftovers?", "monotone",
    "reserved beyond", "hangs? on", "moves? with", "rests? on", "what stays", "whoever", "foreign files?",
)  # fmt: skip
OPENINGS = ("What", "Where", "Of", "Who", "Whoever")


def sentences(path: Path) -> Iterator[str]:
    """The sentences of a page's paragraphs and lists, code as `x`: neither headings nor tables, which may ask."""
    inside: list[str] = []
    for token in tokens(path):
        inside = [*inside, token.tag] if token.nesting == 1 else inside[:-1] if token.nesting == -1 else inside
        if token.type == "inline" and "table" not in inside and not {"h1", "h2", "h3", "h4"} & {*inside}:
            parts = token.children or ()
            text = "".join(
                "x" if part.type == "code_inline" else " " if part.type == "softbreak" else part.content
                for part in parts
                if part.type in ("text", "code_inline", "softbreak")
            )
            yield from re.split(r"(?<=[.!?]) +(?=[A-Z`*])", text)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_words_and_openings_are_those_of_the_glossary(path: Path) -> None:
    wrong = [
        f"{found[0]}: {sentence[:100]}"
        for sentence in sentences(path)
        for found in re.finditer(rf"(?i)\b(?:{'|'.join(BANNED)})\b", sentence)
    ]
    wrong += [one for one in sentences(path) if one.split(" ")[0] in OPENINGS and "?" not in one]
    assert not wrong


def test_the_documentation_stays_short() -> None:
    """At most 30 pages and 45,000 words, without tables and what the code writes."""
    words = sum(len(sentence.split()) for path in PAGES for sentence in sentences(path))
    assert len(PAGES) <= 30 and 20_000 < words <= 45_000


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_what_the_code_writes_is_up_to_date(path: Path) -> None:
    assert script("reference").filled(path.read_text()) == path.read_text(), "run: python docs/reference.py"


def test_every_part_is_in_a_page() -> None:
    texts = [path.read_text() for path in PAGES]
    for part in script("reference").PARTS:
        assert sum(f"<!-- {part.name} -->" in text for text in texts) == 1, part.name


outputs = script("outputs")
SHOWN = [(path, one) for path in outputs.pages() for one in outputs.shown(path.read_text())]
QUICK = sorted({one.command for _, one in SHOWN} - {one.command for _, one in SHOWN if one.by_hand})


def with_texts(command: str) -> str:
    """A test's name that is another one where a page shows something else: kept results are by name (unchanged.py)."""
    texts = "".join(one.text for _, one in SHOWN if one.command == command)
    return f"{command.split()[1]}-{hashlib.sha256(f'{command}{texts}'.encode()).hexdigest()[:12]}"


def test_every_mark_of_an_output_has_a_block_that_is_filled() -> None:
    for path in outputs.pages():
        assert path.read_text().count("<!-- output") == sum(of == path for of, _ in SHOWN), name(path)
    for path, one in SHOWN:
        assert one.text.strip(), f"{name(path)}: run: python docs/outputs.py {path.name}"
        assert outputs.trimmed(one.text) == one.text, name(path)
    assert any(path.name == "README.md" for path, _ in SHOWN)


@pytest.mark.slow
@pytest.mark.deterministic
@pytest.mark.parametrize("command", QUICK, ids=with_texts)
def test_what_a_page_shows_of_an_output_is_what_the_command_prints(command: str) -> None:
    printed = outputs.run(command)
    for path, one in SHOWN:
        if one.command == command:
            assert one.text == outputs.trimmed(printed, one.lines), f"run: python docs/outputs.py {path.name}"


def test_outputs_are_written_without_progress_and_paths_and_cut_where_the_mark_says_so() -> None:
    page = "<!-- output of 2 lines: vramsweep x -->\n```\nold\n```\n<!-- output by hand: vramsweep y -->\n```\n```\nb\n"
    progress, paths = "1 trial, 0 finished before, 1 to do → results/x\n[1/1] ok\n", "report    results/x/report.html\n"
    printed = f"{progress}\none  \n\n\n\ntwo\n{paths}"
    new = outputs.filled(page, {"vramsweep x": printed}.get)
    assert new == page.replace("old\n", "one\n\n...\n")  # y was not run
    assert outputs.trimmed(printed) == "one\n\ntwo\n"
    assert [(one.lines, one.by_hand) for one in outputs.shown(page)] == [(2, False), (None, True)]


def cells(page: str, section: str, first: str) -> list[list[str]]:
    """The cells after those of `first`, of each line of a section of a page that begins with them."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    part = re.split(r"(?m)^## ", text.partition(f"\n## {section}\n")[2])[0]
    lines = [line.removesuffix(" |") for line in part.splitlines() if line.startswith(f"| {first}")]
    return [line.removeprefix(f"| {first}").removeprefix(" | ").split(" | ") for line in lines]


def errors(card: str, when: str, counter: str) -> tuple[str, ...]:
    """Readings, median, 90th percentile, within 1 % and worst of a card's page."""
    ((one, count, of, median, most, within, _, worst),) = [
        [when, *line] for line in cells(card, "Predicted and measured", when) if line[1] == counter
    ]
    assert (one, of) == (when, counter)
    return count, median, most, within, worst


def published(grade: str, counter: str) -> tuple[str, ...]:
    """Return the figures of `errors` for published readings whose peak depends on batch and length."""
    ((count, _, _, _, median, most, within, worst, *_),) = cells(
        "published_runs", f"Grade {grade}", f"{counter} | moves"
    )
    return count, median, most, within, worst


def test_the_accuracy_that_the_readme_states_is_its_sources() -> None:
    readme, rows = (ROOT / "README.md").read_text().replace("−", "-"), []
    for card in ("h100", "h200"):
        count, median, _, within, worst = errors(card, "blind", "reserved")
        rows.append(f"| {count} | {median} | {within} | {float(worst.split()[0]):+.{1 if card == 'h100' else 0}f} %")
    count, median, _, _, worst = published("A", "reserved")
    rows.append(f"| {count} | {float(median.split()[0]):.1f} % | | {float(worst.split()[0]):.0f} %")
    assert [row for row in rows if row not in readme] == []
    fitted, out, wrongly, missed = fits()
    assert missed == 0 and f"all {out} that ran out of memory" in readme
    assert f"{wrongly} of the {fitted + wrongly} that fitted" in readme


def fits() -> list[int]:
    """Published runs: fitted and predicted to, ran out and predicted to, fitted and predicted to run out, the other way
    round."""
    lines = [line[1:5] for line in cells("published_runs", "Which runs fit", "") if line[1].isdecimal()]
    return [sum(map(int, column)) for column in zip(*lines, strict=True)]


def test_the_accuracy_page_states_what_its_sources_do() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    known = {}
    for card in ("h100", "h200"):
        for when, words in (("blind", ", before it was measured"), ("now", ", with the fixes that followed")):
            for counter in ("allocated", "reserved"):
                known[card.upper(), words, counter] = errors(card, when, counter)
    for grade in "AB":
        for counter in ("allocated", "active", "reserved", "device"):
            known["published runs", f", grade {grade}", counter] = published(grade, counter)
    lines = re.findall(r"(?m)^\| (?:one |\[one |\[)([\w ]+?)(?:\]\(\w+\.md\))?(, [\w ]+) \| (\w+) \| (.*) \|$", page)
    assert {(of, words, counter): tuple(rest.split(" | ")) for of, words, counter, rest in lines} == known
    blind = [known[card, ", before it was measured", "reserved"] for card in ("H100", "H200")]
    total, within = (sum(int(line[n]) for line in blind) for n in (0, 3))
    text = " ".join(page.split())
    assert f"predicted {total} training runs of one GPU" in text and f"within 1 % in {within} of them" in text
    grade_a = known["published runs", ", grade A", "reserved"]
    assert f"reserved memory is {float(grade_a[1].split()[0]):.1f} % off in the median" in text
    fitted, out, wrongly, missed = fits()
    assert missed == 0 and f"All {out} published runs that ran out of memory" in text
    assert f"Among the {fitted + wrongly} that fitted, {wrongly} are wrongly predicted" in text
    for card in ("h100", "h200"):
        (ratios,) = re.findall(
            r"A step took (\S+ to \S+) times .*?is (\S+)\.\n", (ROOT / "docs" / f"{card}.md").read_text()
        )
        assert f"{ratios[0]} times in nine" in text and f"{ratios[1]} times as long" in text
    ((*_, middle, far),) = cells("published_runs", "Speed", "all")
    assert f"are {middle} off in the median; the 90th percentile is {far}." in text


def largest(source: str, counter: str, run: str = "") -> tuple[int, float, float]:
    """Readings, least and worst error in percent, without signs, of a source's group with the largest error."""
    groups = []
    for of, kind, count, least, worst, _, _, name, *_ in cells("published_runs", "Large errors", ""):
        if (of, kind) == (source, counter) and run in name:
            small, large = (float(one.split()[0].lstrip("+-–") or 0) for one in (least, worst))
            groups.append((int(count), small, large))
    return max(groups, key=lambda group: group[2])


def test_known_failures_are_as_large_as_their_sources_say() -> None:
    text = " ".join((ROOT / "docs" / "accuracy.md").read_text().split())
    active, reserved = (largest("fine-tune-2024-04", counter)[2] for counter in ("active", "reserved"))
    assert f"active memory is up to {active} % too low, and reserved up to {reserved} %" in text
    with (ROOT / "results" / "reference" / "validation" / "every_reading.csv").open(newline="") as file:
        kept = [row for row in csv.DictReader(file) if row["world_size"] == "8" and row["peak"] == "moves"]
    bounded = {
        counter: [row["between_bounds"] for row in kept if row["counter"] == counter and row["between_bounds"]]
        for counter in ("active", "reserved")
    }
    ((all_active, inside, of),) = re.findall(r"All (\d+) active peaks and (\d+) of (\d+) reserved peaks", text)
    assert bounded["active"] == ["True"] * int(all_active)
    assert (bounded["reserved"].count("True"), len(bounded["reserved"])) == (int(inside), int(of))
    low = [
        line[-1].split()[0].lstrip("-") for line in cells("h200", "Predicted and measured", "") if "fsdp1" in line[0]
    ]
    assert len(low) == 2 and f"{low[0]} % and {low[1]} % below" in text
    assert f"up to {largest('torchtitan', 'reserved')[2]} % too high" in text
    assert f"up to {largest('fms-acceleration', 'device', 'SantaCoder')[2]} % too low" in text
    for source, counter, words in (("litgpt", "allocated", "too high"), ("milabench", "device", "too low")):
        count, least, most = largest(source, counter)
        assert f"{count} {counter} peaks are {least:.0f} to {most:.0f} % {words}" in text


def test_other_tools_are_next_to_what_the_readings_say_of_them() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    names = {
        "16 bytes a parameter": "16 bytes",
        "accelerate estimate-memory": "[`accelerate",
        "DeepSpeed estimate_zero": "DeepSpeed's",
        "training_hub": "training_hub",
        "torch MemTracker": "`MemTracker",
    }
    for name, begins in names.items():
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {begins}")]
        *_, theirs, ours = line.removesuffix(" |").split(" | ")
        said = re.findall(r"(\d\S*) % of (\w+) \((\d+)\)", theirs)
        assert len(said) == len(ours.split(", ")) > 0
        for (off, counter, count), own in zip(said, ours.split(", "), strict=True):
            (known,) = cells("published_runs", "Next to other tools", f"{counter} | moves | {name}")
            readings, _, median, _, same, _ = known
            assert count == readings, line
            for stated, source in ((off, median), (own.split()[0], same)):
                digits = len(stated.partition(".")[2])
                assert float(stated) == round(float(source.split()[0]), digits), line


_COMMAND = re.compile(r"(?:^|[\s(])(?:(?:python3? -m )?(vramsweep|harness|analysis)|(make)) +[a-z]")
_BEGINS = re.compile(r"\s*(\$ |nohup |until )?(vramsweep|python|make)")  # a line of a block that is a command


def commands(path: Path) -> Iterator[list[str]]:
    """The words of every `vramsweep ...` and `make ...` in code, comments and what follows `--` left out."""
    for token in tokens(path):
        if token.type not in ("fence", "code_block", "code_inline"):
            continue
        for line in token.content.replace("\\\n", " ").splitlines():
            found = _COMMAND.search(line)
            if found is None or (token.type != "code_inline" and not _BEGINS.match(line)):
                continue
            text = re.sub(r"\s+#.*|[>&|;].*|\s--\s.*", "", line[found.start() :].strip(" (\n"))
            with contextlib.suppress(ValueError):  # a quote that goes on elsewhere
                words = shlex.split(text)
                yield words[2:] if words[:2] in (["python", "-m"], ["python3", "-m"]) else words


@cache
def usage(verb: str) -> str:
    """Return what `vramsweep VERB --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        front_door.main([verb, "--help"])
    return out.getvalue()


def knows(verb: str, option: str) -> bool:
    return option == "--help" or re.search(rf"{re.escape(option)}\b", usage(verb)) is not None


@pytest.mark.parametrize("path", FILES, ids=name)
def test_commands_exist(path: Path) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    keys = set(re.findall(r"(?m)^([a-z_]+):", (ROOT / "conf" / "config.yaml").read_text()))
    groups = {folder.name: {file.stem for file in folder.glob("*.yaml")} for folder in (ROOT / "conf").iterdir()}
    wrong = []
    for program, verb, *words in (found for found in commands(path) if len(found) > 1):
        said = shlex.join([program, verb, *words])
        if program == "make":
            wrong += [f"{said}: no such target"] * (verb not in targets)
            continue
        if verb not in BY_NAME:
            wrong.append(f"{said}: no such verb")
            continue
        wrong += [
            f"{said}: {word} is unknown"
            for word in words
            if word.startswith("--") and not knows(verb, word.split("=")[0])
        ]
        for key, value in re.findall(r"(?:^| )\+?([a-z_]+)=(\S*)", " ".join(words)) if verb in HYDRA else ():
            if (
                key not in keys | set(groups) | {"experiment", "gpu"} and verb != "run"
            ):  # a command may have names of its own
                wrong.append(f"{said}: {key} is no setting")
            options = set(value.split(",")) - {"auto"}  # of device and sweep: what the machine has
            if key in groups and options - groups[key] and re.fullmatch(r"[a-z0-9_.,-]+", value):
                wrong.append(f"{said}: {key} cannot be {value}")
    assert not wrong


class Resources(HTMLParser):
    """The resources that a browser would fetch for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") in ("index", "search", "next", "prev", "canonical"):
            return
        wanted = [values.get("src"), values.get("srcset"), values.get("href") if tag == "link" else None]
        self.found += [value for value in wanted if value]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="the site needs furo (pip install 'vramsweep[docs]')")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--quiet", "-b", "html", ROOT / "docs", tmp_path]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {page.stem: page for page in tmp_path.glob("*.html")}
    assert {path.stem for path in PAGES} <= set(pages)
    for page in pages.values():
        seen = Resources()
        seen.feed(page.read_text())
        assert seen.found and not [url for url in seen.found if re.match(r"(?i)(https?:)?//", url)], page.name
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", style.read_text()), style.name
    assert '"nf4"' in (tmp_path / "searchindex.js").read_text()  # search needs no server
    front = pages["index"].read_text()
    for path in PAGES:  # the menu has every page
        assert path.stem == "index" or f'href="{path.stem}.html"' in front, path.name
    assert "conf/config.yaml" in pages["settings"].read_text()
    assert "](../" not in "".join(page.read_text() for page in pages.values())


def test_every_promise_of_the_security_page_names_a_test_and_a_place() -> None:
    rows = re.findall(r"^\| (?!what|---)(.*) \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for row in rows:
        *_, places, tests = (re.findall(r"`([^`]+)`", cell) for cell in row.split(" | "))
        assert tests and [place for place in places if not (ROOT / place).is_file()] == [], row
        for file, _, function in (test.partition("::") for test in tests):
            assert f"\ndef {function}(" in (ROOT / file).read_text(), (file, function)
