"""The documentation: its links lead somewhere, its commands exist, its tables are the code's, its site builds offline.

What a page shows of a command's output is what the command prints, where its block has a mark (docs/outputs.py) and the
command does not take minutes. Not covered: other blocks, and prose.
"""

import contextlib
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


@pytest.mark.parametrize("path", FILES, ids=name)
def test_words_and_openings_are_those_of_the_glossary(path: Path) -> None:
    assert script("words").offences(path) == [], "python docs/words.py lists them"


def test_the_documentation_stays_short() -> None:
    """At most 30 pages and 45,000 words, without tables and what the code writes."""
    words = sum(len(sentence.split()) for path in PAGES for sentence in script("words").sentences(path))
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


numbers = script("accuracy_numbers")


def test_numbers_of_accuracy_are_those_of_their_sources() -> None:
    for page, statements in numbers.statements().items():
        text = " ".join((ROOT / page).read_text().replace("−", "-").split())
        assert len(statements) >= 5 and [one for one in statements if one not in text] == [], page


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
