"""Draw the gallery of docs/results.md at column size, by running its commands, and write that section.

    python benchmarks/gallery.py [--work build/gallery] [--only memory_by_length]

Each command runs as the page shows it, in the folder --work, whose results/ has the reference rows. Sweeps are resumed,
so a second run only draws. It takes ten minutes on two cores without a GPU and needs Chromium (apt-get install
chromium). A new figure is an entry in PICTURES. A figure's rows give its machine, its versions, and whether it is
measured or predicted.

Figures of published_runs.md and of the published sweep take hours; the section shows the stored ones (`KEPT`).
"""

from __future__ import annotations

import argparse
import html
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramsweep.harness.rows import journal

ROOT = Path(__file__).resolve().parents[1]
IMAGES, PAGE = ROOT / "docs" / "images" / "gallery", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- gallery: python benchmarks/gallery.py -->\n", "<!-- end of gallery -->\n"
WIDTH, LARGEST = 800, 150_000  # pixels of a column of the site; bytes of a file

GPT2 = "vramsweep report results/reference/gpt2-cpu"
H100 = "vramsweep report results/reference/h100-80gb/rows.jsonl --out h100"
CARD = "Measured on an NVIDIA H100 80GB HBM3 and predicted for it"
QWEN = (
    "vramsweep sweep model=qwen0.5b gpu=l4-24gb seq_len=512,1024,2048,4096 micro_batch=1,4 "
    "allocator=default,expandable checkpointing=none,full name=qwen"
)
LENGTHS = (
    "vramsweep sweep model=gpt2 gpu=l4-24gb precision=bf16 seq_len=1024 micro_batch=8 "
    "\"data='lengths:lognormal(256,0.8)'\" protocol=long allocator=default,expandable,max_split_128 name=lengths"
)
COMPARE = "vramsweep compare results/qwen --by checkpointing=none,full --figure compare.svg"
STEP = "model=gpt2 seq_len=512 micro_batch=8 gpu=rtx4090-24gb"
TIMELINE = f"vramsweep timeline {STEP} --out timeline.html"
RECORDING = "tests/data/snapshots/silmont2000__b61be4_mem_snapshot.pickle"
REPLAY = f"vramsweep replay {RECORDING} --allocator expandable_segments:True --figure replay.html"


@dataclass(frozen=True)
class Picture:
    """A figure of the gallery: its command, the file that it is drawn from, its caption, its machine and versions."""

    name: str  # the stem of its file in docs/images/gallery
    title: str
    command: str  # one a line; the page shows a line only where it first occurs
    file: str  # the command's output, below the working folder: .svg, or .html whose first plot is taken
    caption: str
    rows: str | None = None  # the results folder with machine and versions
    made: str = ""  # machine and versions in words if `rows` is None


PICTURES = (
    Picture("composition", "Memory by component", QWEN, "results/qwen/figures/composition.svg",
            "The parts of the peak: weights, gradients, optimizer state, activations and short-lived tensors. On top "
            "is memory that is reserved but unused. Lines show the limits of this GPU and others.",
            "results/qwen"),
    Picture("allocators", "Allocator settings", QWEN, "results/qwen/figures/allocators.svg",
            "Reserved memory under each allocator setting, and its ratio to that of the default setting. Settings "
            "differ little if all steps have one length.", "results/qwen"),
    Picture("frontier", "Maximum sequence length", QWEN, "results/qwen/figures/frontier.svg",
            "The longest sequence with each setting, on GPUs of three sizes. Lengths up to the end of the hatched bar "
            "are predicted to fit. The line leads to the next length, which is predicted not to fit.", "results/qwen"),
    Picture("compare", "Two settings compared", f"{QWEN}\n{COMPARE}", "compare.svg",
            "Peak memory with and without activation checkpointing, and the difference "
            "([verdicts](fits.md#how-compare-decides)).", "results/qwen"),
    Picture("measured", "Measured peaks and prediction", H100, "h100/figures/composition_predicted.svg",
            "Points show memory that a GPU reserved and allocated. The stack shows the prediction for the same "
            "settings.", made=CARD),
    Picture("residuals", "Predictions compared with measurements", H100, "h100/figures/residuals.svg",
            "Predicted minus measured memory for each counter, over 66 configurations.", made=CARD),
    Picture("memory_by_length", "Memory by length", GPT2, "results/reference/gpt2-cpu/figures/memory_by_length.svg",
            "The peak of GPT-2 is flat while weights, gradients and optimizer state determine it, then rises with the "
            "activations. Points are measured, and the line is the [fit](fits.md#kinds-of-curve). The plot below shows "
            "the residuals of the fit.", "results/reference/gpt2-cpu"),
    Picture("memory_by_phase", "Memory by phase", GPT2, "results/reference/gpt2-cpu/figures/memory_by_phase.svg",
            "The peak of each phase of a step, at each length. Grey is the peak of the whole run.",
            "results/reference/gpt2-cpu"),
    Picture("lengths", "Lengths that vary", LENGTHS, "results/lengths/figures/lengths.svg",
            "Reserved memory over 500 steps whose samples [differ in length](allocator_settings.md). Here the "
            "allocator setting changes how much is reserved.", "results/lengths"),
    Picture("timeline", "Timeline of a step", TIMELINE, "timeline.html",
            "The memory over one predicted step by component, with the peak marked ([more](explain.md)).",
            made="Predicted for an RTX 4090, not measured"),
    Picture("replay", "A recording, replayed", REPLAY, "replay.html",
            "A public recording of PyTorch's allocator, [replayed](allocator_settings.md) under another setting.",
            made="Replayed on a CPU; the recording is from a GPU ([origin](../tests/data/snapshots/README.md))"),
)  # fmt: skip

KEPT = """
#### Predictions of published runs

![Predicted and measured memory, and the errors by source](images/validation.png)

312 readings of memory from thirteen sources, predicted and measured ([all of them](published_runs.md)).

```
make validate
```

#### Every length of a published sweep

![Active and reserved memory of 2,048 lengths, and the prediction](images/published_sweep.png)

Others measured Qwen1.5-0.5B under ZeRO-3 at every length up to 2,048 on a 24 GB GPU. The prediction needed 30 traces
([more](published_runs.md)).

```
python benchmarks/published_sweep.py
```
"""


def prepared(work: Path) -> None:
    """Copy the reference rows and the recording into the folder that commands run in, at the repository's paths."""
    for name in ("results/reference/gpt2-cpu", "results/reference/h100-80gb", "tests/data/snapshots"):
        shutil.copytree(ROOT / name, work / name, dirs_exist_ok=True)


def run(command: str, work: Path) -> None:
    """Run a command as the page shows it, and draw its sweep's figures as SVG. Raises SystemExit if a command fails."""
    words = shlex.split(command)[1:]
    print(f"$ {command}", flush=True)
    if words[0] == "sweep":
        name = next(word.removeprefix("name=") for word in words if word.startswith("name="))
        _call([*words, "report=false"], work)
        words = ["report", f"results/{name}"]
    _call([*words, "--images", "svg"] if words[0] == "report" else words, work)


def _call(words: list[str], work: Path) -> None:
    call = [sys.executable, "-m", "vramsweep", *words]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(call, cwd=work, env=environ, capture_output=True, text=True, check=False)
    if done.returncode not in ((0, 1) if words[0] == "compare" else (0,)):  # compare's exit status 1 is a verdict
        raise SystemExit(f"vramsweep {shlex.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def draw(wanted: Iterable[tuple[Path, Path]]) -> None:
    """Draw PNGs of SVG files and pages' first plots, as fine as LARGEST allows. Raises FileNotFoundError."""
    from playwright.sync_api import sync_playwright

    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for source, target in wanted:
            if not source.is_file():
                others = ", ".join(sorted(path.stem for path in source.parent.glob(f"*{source.suffix}")))
                raise FileNotFoundError(f"{source} is not there; in its folder: {others or 'nothing of its kind'}")
            for scale in (2, 1.5, 1.25, 1):
                page = browser.new_page(viewport={"width": WIDTH, "height": 700}, device_scale_factor=scale)
                if source.suffix == ".svg":
                    image = (
                        f'<img src="{html.escape(source.resolve().as_uri())}" style="width: {WIDTH}px; display: block">'
                    )
                    frame = source.with_suffix(".frame.html")
                    frame.write_text(f'<!doctype html><body style="margin: 0; background: #fff">{image}</body>')
                    page.goto(frame.resolve().as_uri())
                    shot = page.locator("img").screenshot()
                    frame.unlink()
                else:
                    page.goto(source.resolve().as_uri())
                    page.wait_for_selector(".js-plotly-plot .main-svg")
                    page.wait_for_timeout(1000)  # transitions
                    shot = page.locator(".js-plotly-plot").first.screenshot()
                page.close()
                if len(shot) < LARGEST:
                    break
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(shot)
            print(f"{target.relative_to(ROOT)}: {len(shot) / 1000:.0f} kB, {scale} pixels a pixel", flush=True)


def made(rows: Path) -> str:
    """Return whether the last row that ended ok was measured or predicted, its machine and its versions."""
    lines = [json.loads(line) for line in journal.files(rows)[0].read_text().splitlines()]
    row: dict[str, Any] = next(row for row in reversed(lines) if row["outcome"] == "ok")
    if row["device"] == "simulated":
        what = f"Predicted for {row['simulated_gpu']}, not measured"
    else:
        what = f"Measured on {row['gpu_name'] or row['cpu_name']}"
    versions = {"Python": "python", "torch": "torch", "transformers": "transformers", "DeepSpeed": "deepspeed"}
    said = [f"{name} {row[f'{key}_version']}" for name, key in versions.items() if row.get(f"{key}_version")]
    return f"{what}; {', '.join(said)}"


def page(work: Path) -> str:
    """Return the section of the page between BEGIN and END."""
    parts = [
        "`python benchmarks/gallery.py` draws all but the last two figures without a GPU, because the repository keeps "
        "the measurements. A figure without a command comes from the nearest command above it.",
    ]
    shown: set[str] = set()
    told = ""
    versions: list[str] = []
    for picture in PICTURES:
        how, _, version = (made(work / picture.rows) if picture.rows else picture.made).partition("; Python ")
        versions += [f"Python {version}"] * bool(version)
        new = [line for line in picture.command.splitlines() if line not in shown]
        shown |= {*new}
        parts += [
            f"#### {picture.title}",
            f"![{picture.title}](images/gallery/{picture.name}.png)",
            picture.caption + (f" {how}." if how != told else ""),
        ]
        told = how
        if new:
            lines = "\n".join(new)
            parts.append(f"```\n{lines}\n```")
    footer = "; ".join(dict.fromkeys(versions))
    return "\n\n".join(parts) + f"\n{KEPT}\n*Versions: {footer}; for the H100 see [its page](h100.md).*\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gallery", help="where commands run (build/gallery)"
    )
    parser.add_argument("--only", action="append", help="run and draw these alone, and leave the page")
    arguments = parser.parse_args()
    known = {picture.name: picture for picture in PICTURES}
    if unknown := set(arguments.only or ()) - set(known):
        parser.error(f"--only {', '.join(sorted(unknown))}: pictures are {', '.join(known)}")
    chosen = [known[name] for name in arguments.only or known]
    prepared(arguments.work)
    for command in dict.fromkeys(line for picture in chosen for line in picture.command.splitlines()):
        run(command, arguments.work)
    draw((arguments.work / picture.file, IMAGES / f"{picture.name}.png") for picture in chosen)
    if not arguments.only:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{page(arguments.work)}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
