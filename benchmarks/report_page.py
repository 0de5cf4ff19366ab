"""Measure a report's page in a real browser: its size, its requests, and how soon it can be used. Prints a table.

    python benchmarks/report_page.py [--rows 200 20000] [--times 5] [--keep DIR]

The rows are generated, not measured. They are made from a row of results/reference/gpt2-cpu, so that they have all
columns and whole trials. They have 3 allocators and 2 batches; half say that they were measured, half that they were
predicted. Times are medians over `--times` loads from a file: until the answers can be read (first contentful paint),
until picker and links respond, until the main figure is drawn, and until all are. A click waits at most for the longest
task of the page. Other work on the machine slows all of them, so its load is printed too. Firefox, Safari and phones
are not measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
GIB = 2**30
MOST = {200: (6.0, 2.0), 20_000: (10.0, 5.0)}  # rows: MB of the page, seconds until the main figure
PARTS = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "communication", "temporaries",
         "workspaces", "rounding")  # fmt: skip
CONF = {
    "default": "", "expandable": "expandable_segments:True", "max_split_128": "max_split_size_mb:128",
}  # fmt: skip
WATCH = """
window.seen = {tasks: []};
const watch = (type, told) => new PerformanceObserver((list) => list.getEntries().forEach(told)).observe({type, buffered: true});
watch("paint", (one) => { if (one.name === "first-contentful-paint") seen.paint = one.startTime; });
watch("longtask", (one) => seen.tasks.push(one.duration));
new MutationObserver(() => {
  const said = document.documentElement.dataset, now = performance.now();
  if (said.ready && !seen.ready) seen.ready = now;
  if (!seen.main && document.querySelector(".plot .main-svg")) seen.main = now;
  if (said.drawn && !seen.drawn) seen.drawn = now;
}).observe(document, {attributes: true, childList: true, subtree: true});
"""  # noqa: E501


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Yield `count` generated rows, the same in every run."""
    line = (ROOT / "results" / "reference" / "gpt2-cpu" / "journal.jsonl").read_text(encoding="utf-8").splitlines()[0]
    base = json.loads(line) | {"sweep": "generated", "notes": ["generated, not a measurement"], "outcome": "ok"}
    settings = [
        (device, allocator, batch) for device in ("cuda", "simulated") for allocator in CONF for batch in (1, 4)
    ]
    for number in range(count):
        at = number // len(settings)
        length, repeat = 128 + 128 * (at % 400 * 37 % 64), at // 64
        yield _row(copy.deepcopy(base), number, settings[number % len(settings)], length, repeat)


def _row(one: dict[str, Any], number: int, of: tuple[str, str, int], length: int, repeat: int) -> dict[str, Any]:
    device, allocator, batch = of
    predicted, tokens = device == "simulated", batch * length
    peak = 512 * int((3 * GIB + tokens * 900_000) // 512)
    over = {"default": 1.15, "expandable": 1.02, "max_split_128": 1.09}[allocator]
    reserved = 2**21 * int(peak * over // 2**21)
    step = 0.05 + tokens * 2e-5 + 1e-3 * (number * 7919 % 97) / 97
    one |= {
        "trial_id": f"{number:016x}", "device": device, "precision": "bf16", "allocator": allocator,
        "micro_batch": batch, "seq_len": length, "repeat": repeat, "gpu_name": None if predicted else "NVIDIA L4",
        "simulated_gpu": "l4-24gb" if predicted else None, "device_total_bytes": 23 * GIB, "memory_limit_bytes": None,
        "memory_source": "simulator" if predicted else "cuda_allocator", "flags": [], "host": "generated",
        "peak_allocated_bytes": peak, "peak_active_bytes": peak, "peak_reserved_bytes": reserved,
        "load_peak_allocated_bytes": GIB, "forward_peak_allocated_bytes": int(0.8 * peak),
        "backward_peak_allocated_bytes": peak, "optimizer_peak_allocated_bytes": 3 * GIB,
        "step_times_s": None if predicted else [step] * 10, "step_median_s": None if predicted else step,
        "tokens_per_s": None if predicted else tokens / step, "mfu": None if predicted else tokens / step * 1e-5,
        "estimated_tokens_per_s": 2 * tokens / step if predicted else None, "step_peak_reserved_bytes": [reserved] * 10,
        "step_peak_allocated_bytes": [peak] * 10, "allocator_conf": CONF[allocator],
    }  # fmt: skip
    if predicted:
        held = dict.fromkeys(PARTS, 0) | {"parameters": GIB, "optimizer_state": GIB, "gradients": GIB // 2}
        rest = peak - sum(held.values())
        held |= {"activations": rest * 3 // 4, "temporaries": rest - rest * 3 // 4}
        one |= {f"peak_{part}_bytes": size for part, size in held.items()}
    one["trial"] |= {"seq_len": length, "micro_batch": batch, "precision": "bf16", "repeat": repeat}
    return one


def made(count: int, folder: Path) -> dict[str, Any]:
    """Write a report of `count` rows in the folder; return its seconds and the MB of its page."""
    from vramsweep.analysis.data.load import load
    from vramsweep.analysis.report.write import write_report

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "journal.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows(count))
    begin = time.perf_counter()
    write_report(load(folder), folder, ())
    return {
        "rows": count,
        "written (s)": round(time.perf_counter() - begin, 1),
        "page (MB)": round((folder / "report.html").stat().st_size / 1e6, 2),
    }


def opened(page: Path, times: int) -> tuple[dict[str, Any], str]:
    """Load the page `times` times in a browser; return the medians, and the browser's name and version. Raises
    RuntimeError if the page requests anything but itself, or reports an error."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    seen, wrong = [], []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(times):
            tab = browser.new_page(viewport={"width": 1280, "height": 800})
            tab.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
            tab.on("pageerror", lambda error: wrong.append(str(error)))
            tab.on("request", lambda request: None if request.url == f"file://{page}" else wrong.append(request.url))
            tab.add_init_script(WATCH)
            tab.goto(f"file://{page}")
            tab.wait_for_selector("html[data-drawn]", state="attached", timeout=120_000)
            tab.wait_for_timeout(200)
            seen.append(tab.evaluate("({...seen, figures: document.querySelectorAll('.plot .main-svg').length})"))
            tab.close()
        called = browser.version
        browser.close()
    if wrong := [one for one in wrong if not one.startswith(("data:", "blob:"))]:
        raise RuntimeError(f"{page}: {wrong[:5]}")
    names = {"paint": "readable (s)", "ready": "responds (s)", "main": "main figure (s)", "drawn": "all figures (s)"}
    found: dict[str, Any] = {told: round(_median(one[key] for one in seen) / 1000, 2) for key, told in names.items()}
    found["longest task (s)"] = round(_median(max(one["tasks"], default=0.0) for one in seen) / 1000, 2)
    return found, f"Chromium {called}"


def _median(values: Iterator[float]) -> float:
    return statistics.median(list(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 20_000])
    parser.add_argument("--times", type=int, default=5, help="loads of each page")
    parser.add_argument("--wait", type=float, default=0, help="seconds between writing a page and loading it")
    parser.add_argument("--keep", type=Path, help="folder to keep the reports in")
    arguments = parser.parse_args()
    lines, browser, missed = [], "", []
    with tempfile.TemporaryDirectory() as temporary:
        for count in arguments.rows:
            folder = (arguments.keep or Path(temporary)).resolve() / f"rows-{count}"
            line = made(count, folder)
            time.sleep(arguments.wait)
            told, browser = opened(folder / "report.html", arguments.times)
            lines.append(line | told)
            size, seconds = MOST.get(count, (float("inf"), float("inf")))
            missed += [f"{count} rows: over {size} MB"] if line["page (MB)"] > size else []
            missed += [f"{count} rows: main figure after {seconds} s"] if told["main figure (s)"] > seconds else []
    print("| " + " | ".join(lines[0]) + " |\n|" + "---:|" * len(lines[0]))
    for line in lines:
        print("| " + " | ".join(f"{value:,}" for value in line.values()) + " |")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    busy = f"load {os.getloadavg()[0]:.1f} in the last minute"
    print(f"\n{machine}, {busy}, plotly {version('plotly')}, {browser}")
    print("\n".join(f"MISSED: {one}" for one in missed) or "All goals are met.")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
