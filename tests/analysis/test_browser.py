"""The report in a real headless Chromium: it renders, figures respond, nothing is fetched, nothing goes wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import synthetic

from vramsweep.analysis import cli

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install playwright)")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (apt-get install chromium)")
def test_the_report_in_chromium(tmp_path: Path) -> None:
    evil = "<b onclick=alert(1)>made-up</b>"
    folder = synthetic.write(tmp_path, synthetic.sweep(model=evil))
    assert cli.main(["report", str(folder), "--images", "none"]) == 0
    problems: list[str] = []
    fetched: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900}, color_scheme="dark")
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: fetched.append(request.url))
        page.goto(f"file://{folder / 'report.html'}")
        page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length >= 12")

        # figures respond: hovering a point shows its trial
        page.locator("#figure-0").scroll_into_view_if_needed()
        point = page.locator("#figure-0 .scatterlayer .point").last
        box = point.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.wait_for_selector("#figure-0 .hovertext")
        assert "trial cu" in str(page.locator("#figure-0 .hovertext").first.text_content())

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
        page.set_viewport_size({"width": 400, "height": 800})
        page.wait_for_function("document.querySelector('#figure-0').dataset.narrow === 'true'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.locator("b", has_text="made-up").count() == 0
        page.set_viewport_size({"width": 1100, "height": 900})  # back: the legend's room goes with the legend
        page.wait_for_function("document.querySelector('#figure-0').dataset.narrow === 'false'")
        page.wait_for_function(f"{room} === {wide}", timeout=5000)
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
        browser.close()
    assert problems == []
    assert [url for url in fetched if not url.startswith(("file:", "data:", "blob:"))] == []
    assert len([url for url in fetched if url.startswith("file:")]) == 1
