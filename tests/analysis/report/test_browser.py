"""Pages in a real headless Chromium: they render and respond, nothing is fetched, nothing goes wrong.

The pages forbid to evaluate text, so that nothing here may wait for a function: selectors are waited for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import synthetic
from conftest import refusal, source, tiny

from vramsweep.analysis import cli
from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import load
from vramsweep.analysis.report import page as pages
from vramsweep.analysis.report.content import collect
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import plan

pytestmark = pytest.mark.slow
EVIL = "<b onclick=alert(1)>made-up</b>"
MB = 1_000_000
ROWS = "#rows-table tbody tr"


@dataclass
class Tab:
    """A page that was opened, and what went wrong or was asked for meanwhile."""

    page: Any
    problems: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def open(self, file: Path, fragment: str = "") -> None:
        self.page.goto("about:blank")  # or another fragment alone would not load it again
        self.page.goto(f"file://{file}{fragment}")
        self.page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)

    def shown(self) -> list[str]:
        """The first cells of the rows that the table of rows shows."""
        return list(self.page.locator(f"{ROWS} td:first-child").all_text_contents())

    def traces(self) -> list[Any]:
        """Return each trace of the first figure: its allocator, if it names one, and whether it is visible."""
        told = "t => [(t.meta && t.meta.settings || {}).allocator, t.visible !== false]"
        return list(self.page.evaluate(f"document.querySelector('#figure-0').data.map({told})"))


@pytest.fixture
def tab(chromium: Any) -> Iterator[Tab]:
    """Whatever a test does with it, no error is said and nothing but the page itself is asked for."""
    made = Tab(chromium.new_page(viewport={"width": 1100, "height": 900}, color_scheme="dark"))
    made.page.on("console", lambda message: made.problems.append(message.text) if message.type == "error" else None)
    made.page.on("pageerror", lambda error: made.problems.append(str(error)))
    made.page.on("request", lambda request: made.fetched.append(request.url))
    yield made
    made.page.close()
    assert made.problems == []
    assert [url for url in made.fetched if not url.startswith(("file:", "data:", "blob:", "about:"))] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 rows; the traces of their figures say which allocator they are of, some rows are flagged."""
    whole = plan.expand_trials([tiny(seq_len=128)], 1)[0][0].resolved  # so that there is a command
    rows = [row | {"trial": whole} for row in synthetic.sweep(model=EVIL)]
    for row in rows[:3]:
        row["flags"] = ["not_settled"]
    path = synthetic.write(tmp_path_factory.mktemp("results") / "sweep", rows)
    assert cli.main(["report", str(path), "--images", "none"]) == 0
    return path


@pytest.fixture(scope="module")
def chosen(folder: Path) -> Path:
    """Write a page of the rows of `folder` whose first figure's traces name their settings; return its path."""
    table = load(folder)
    content = collect(table)
    names = sorted({str(group.settings["allocator"]) for group in groups(table)})
    first = content.figures[0]
    for number, trace in enumerate(first.plot.data):
        trace.meta = {"settings": {"allocator": names[number % 2], "micro_batch": "1"}}
    file = folder / "chosen.html"
    file.write_text(pages.render(replace(content, figures=[first, *content.figures[1:3]])), encoding="utf-8")
    return file


def test_the_report_in_chromium(folder: Path, tab: Tab) -> None:
    page = tab.page
    tab.open(folder / "report.html")
    assert page.locator(".js-plotly-plot .main-svg").count() >= 12
    assert (folder / "report.html").stat().st_size < 6 * MB

    # figures respond: hovering a point shows its trial
    drawn = page.locator("#memory_by_length .plot")
    drawn.scroll_into_view_if_needed()
    point = drawn.locator(".scatterlayer .point").last
    box = point.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_selector("#memory_by_length .hovertext")
    assert "trial cu" in str(drawn.locator(".hovertext").first.text_content())

    # the first key reaches the skip link, Enter follows it
    page.evaluate("window.scrollTo(0, 0); document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.url.endswith("#findings")

    # dark background, light text; nothing wider than a phone
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    room = "document.querySelector('#figure-0')._fullLayout._size.b"
    wide = page.evaluate(room)
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_selector("#figure-0[data-narrow=true]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    page.wait_for_selector(ROWS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390  # nor what is folded
    assert page.locator("b", has_text="made-up").count() == 0
    page.set_viewport_size({"width": 1100, "height": 900})  # back: the legend's room goes with the legend
    page.wait_for_selector("#figure-0[data-narrow=false]")
    page.wait_for_timeout(300)
    assert page.evaluate(room) == wide
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_the_first_screen_answers_five_questions(folder: Path, tab: Tab) -> None:
    tab.page.set_viewport_size({"width": 1280, "height": 800})
    tab.open(folder / "report.html")
    tiles = tab.page.locator("#card .tile")
    assert tiles.count() == 6
    boxes = [tiles.nth(i).bounding_box() for i in range(6)]
    assert all(box is not None and box["y"] + box["height"] <= 800 for box in boxes)
    assert [text for text in tiles.locator(".value").all_text_contents() if not text or text == "–"] == []
    tab.page.set_viewport_size({"width": 390, "height": 844})
    last = tiles.last.bounding_box()
    assert last is not None and last["y"] + last["height"] <= 1.25 * 844  # where letters are wide


@pytest.mark.parametrize("width", [390, 1280])
def test_no_word_of_a_figure_is_cut_off(width: int, folder: Path, tab: Tab) -> None:
    tab.page.set_viewport_size({"width": width, "height": 844})
    tab.open(folder / "report.html")
    assert tab.page.evaluate(source("words_cut_off.js")) == []


def test_three_findings_stand_first_and_the_main_figure_is_of_the_answers(folder: Path, tab: Tab) -> None:
    tab.open(folder / "report.html")
    assert 1 <= tab.page.locator("#findings li:visible").count() <= 3
    told = tab.page.locator("#findings li").count()
    tab.page.locator("#findings summary").click()
    assert tab.page.locator("#findings li:visible").count() == told > 3
    chosen = str(tab.page.locator("#card .scope strong").text_content())
    shown = tab.page.evaluate("document.querySelector('#figure-0').data.map(t => t.meta.settings)")
    assert shown and all(f"batch {one['micro_batch']}" in chosen and one["allocator"] in chosen for one in shown)


def test_headings_are_in_order_and_every_field_has_a_name(folder: Path, tab: Tab) -> None:
    tab.open(folder / "report.html")
    levels = tab.page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    unnamed = "e => !(e.labels && e.labels.length) && !e.getAttribute('aria-label') && !e.textContent.trim()"
    assert tab.page.evaluate(f"[...document.querySelectorAll('select,input,button')].filter({unnamed}).length") == 0
    twice = "ids => ids.length - new Set(ids).size"
    assert tab.page.evaluate(f"({twice})([...document.querySelectorAll('[id]')].map(e => e.id))") == 0


CONTRAST = source("contrast.js")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str, folder: Path, tab: Tab) -> None:
    """WCAG 2.2, 1.4.3 (AA): 4.5 to 1."""
    tab.page.emulate_media(color_scheme=scheme)
    tab.open(folder / "report.html")
    assert tab.page.evaluate(CONTRAST) == []


def test_figures_and_tables_follow_what_is_chosen_and_a_link_keeps_it(chosen: Path, tab: Tab) -> None:
    page = tab.page
    tab.open(chosen)
    lines = page.locator("#tables tr[data-group]:visible")
    every = lines.count()
    assert all(visible for _, visible in tab.traces())
    page.locator("#picker select[name=allocator]").focus()
    page.keyboard.press("e")  # by the keyboard alone: expandable
    page.keyboard.press("Enter")
    assert page.locator("#picker select[name=allocator]").input_value() == "=expandable"
    assert page.url.endswith("#view?allocator=expandable")
    page.wait_for_timeout(300)
    assert {allocator for allocator, visible in tab.traces() if visible} == {"expandable"}
    assert lines.count() == every // 2
    assert all("expandable" in text for text in lines.all_text_contents())
    assert page.locator("#chosen").text_content() == "3 of 6 configurations"

    tab.open(chosen, "#view?allocator=default&micro_batch=2&other=1")
    assert page.locator("#picker select[name=micro_batch]").input_value() == "=2"
    assert lines.count() < every // 2
    assert page.locator("#figure-0").is_hidden()  # nothing in it is of a batch of 2, and it says so
    assert page.locator("figure .nothing").first.is_visible()
    page.locator("#picker button[type=reset]").click()
    page.wait_for_timeout(300)
    assert lines.count() == every and page.locator("#figure-0").is_visible()
    assert "#" not in page.url

    tab.open(chosen, "#view?allocator=<b>none</b>")  # no such value: all is shown
    assert lines.count() == every


def test_rows_are_searched_sorted_paged_and_copied(folder: Path, tab: Tab) -> None:
    page = tab.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.open(folder / "report.html")
    page.locator("#rows summary").first.click()
    page.wait_for_selector(ROWS)
    assert len(tab.shown()) == 50
    assert page.locator("#rows-count").text_content() == "1–50 of 120"
    page.locator("#after").click()
    assert page.locator("#rows-count").text_content() == "51–100 of 120"

    page.locator("#search").fill("8192 oom")
    page.wait_for_timeout(300)
    assert tab.shown() and all("-s8192-" in one for one in tab.shown())
    page.locator("#search").fill("<b>")
    page.wait_for_timeout(300)
    assert page.locator("#rows-count").text_content() == "None of 120 rows match."
    page.locator("#search").fill("")
    page.wait_for_timeout(300)

    speeds = page.locator(f"{ROWS} td:nth-child(8)")
    sort = page.locator("#rows-table th button", has_text="tokens/s")
    for way in ("ascending", "descending"):
        sort.click()
        assert page.locator("#rows-table th[aria-sort]", has_text="tokens/s").get_attribute("aria-sort") == way
        found = [float(text.split()[0].replace(",", "")) for text in speeds.all_text_contents() if text != "–"]
        assert found == sorted(found, reverse=way == "descending") and len(set(found)) > 20

    page.locator("#search").fill("not_settled")  # a flag is where the number is, for the keyboard too
    page.wait_for_timeout(300)
    badge = page.locator(f"{ROWS} td:nth-child(8) .badge").first
    assert len(tab.shown()) == 3 and page.locator(f"{ROWS} td:nth-child(7) .badge").count() == 0
    assert "warm-up was not over" in str(badge.get_attribute("aria-label"))
    badge.focus()
    assert "warm-up was not over" in str(page.locator("#tip").text_content()) and page.locator("#tip").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()

    page.locator(f"{ROWS} button").first.click()
    page.wait_for_timeout(200)
    assert page.locator("#said").text_content() == "The command is copied."
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.locator(f"{ROWS} .command").first.text_content()


def test_copying_works_where_the_clipboard_is_closed(folder: Path, tab: Tab) -> None:
    tab.page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    tab.open(folder / "report.html", "#view?search=b2")
    tab.page.wait_for_selector(ROWS)
    taken = "window.taken = String(document.activeElement.value)"
    tab.page.evaluate(f"document.addEventListener('copy', () => {{ {taken} }})")
    tab.page.locator(f"{ROWS} button").first.click()
    tab.page.wait_for_timeout(200)
    assert tab.page.evaluate("window.taken") == tab.page.locator(f"{ROWS} .command").first.text_content()
    assert tab.page.locator("#said").text_content() == "The command is copied."


def test_a_comparison_has_a_page(folder: Path, tab: Tab, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    cli.main(["compare", str(folder), "--by", "allocator=default,expandable", "--report", str(out)])
    tab.page.set_viewport_size({"width": 390, "height": 844})
    tab.open(out)
    assert "Smaller" in str(tab.page.locator("#card .tile .value").first.text_content())
    assert tab.page.locator(".sides .tile").count() == 12
    assert tab.page.locator("#verdicts td", has_text="SMALLER").count() >= 1
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
    words = ["compare", str(folder), "--by", "allocator=default,expandable", "--report", "x.pdf"]
    assert " must end in one of .html" in refusal(UserError, cli.main, words)


def test_a_page_of_twenty_thousand_rows_stays_small(tab: Tab, tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path / "many", many(20_000))
    assert cli.main(["report", str(folder), "--images", "none"]) == 0
    assert (folder / "report.html").stat().st_size < 10 * MB
    tab.open(folder / "report.html", "#view?search=b4-s2048")
    tab.page.wait_for_selector(ROWS)
    assert all("b4-s2048-" in one for one in tab.shown())


def many(count: int) -> list[Row]:
    """So many rows of 6 configurations, with whole trials, as a long sweep leaves them."""
    base = synthetic.sweep(repeats=1)
    every = ((base[number % len(base)], number // len(base)) for number in range(count))
    return [row | {"trial_id": f"{row['trial_id'].removesuffix('0')}{n}", "repeat": n} for row, n in every]
