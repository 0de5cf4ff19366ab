"""Run the commands whose output README.md and these pages show, and write it into them: `python docs/outputs.py`.

A block that shows an output follows a mark:

    <!-- output: vramsweep explain model=gpt2 seq_len=512 -->
    ```
    ...
    ```

`output of 12 lines` keeps the first 12 and marks that there are more. `output by hand` takes minutes: `--quick` skips
it, and so does tests/test_docs.py, which runs every other command. Each command runs once, even if several pages show
it, in an empty folder and without a GPU. Progress and a report's paths are left out, because they are not the answer.

`python docs/outputs.py README.md fit.md` writes only these pages; `--new` fills only empty blocks.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SECONDS = 1800
WIDTH = 100  # columns of a table
_BLOCK = re.compile(
    r"(?P<mark><!-- output(?P<by_hand> by hand)?(?: of (?P<lines>\d+) lines)?: (?P<command>.+?) -->\n+```\w*\n)"
    r"(?P<text>.*?)(?P<end>^```$)",
    re.DOTALL | re.MULTILINE,
)
_LEFT_OUT = re.compile(
    r"\[\d+/\d+\] |tracing |.*\bETA |\d+ trials?, \d+ finished before|(report|rows|figures|fits) +(results/|vramsweep )"
)


@dataclass(frozen=True)
class Shown:
    """One block of a page: the command, the most lines shown, whether it takes minutes, and the present text."""

    command: str
    lines: int | None
    by_hand: bool
    text: str


def shown(text: str) -> Iterator[Shown]:
    """Yield the blocks of a page that show the output of a command."""
    for found in _BLOCK.finditer(text):
        yield _shown(found)


def _shown(found: re.Match[str]) -> Shown:
    lines = None if found["lines"] is None else int(found["lines"])
    return Shown(found["command"], lines, found["by_hand"] is not None, found["text"])


def run(command: str) -> str:
    """Run the command in an empty folder; return what it prints. Raises RuntimeError if the command is a mistake."""
    program, *words = shlex.split(command)
    if program != "vramsweep":
        raise RuntimeError(f"{command}: only vramsweep is run")
    if words[0] == "predict" and not any(word.startswith("report=") for word in words):
        words.append("report=false")  # figures take long and are not shown
    environ = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(WIDTH), "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "vramsweep", *words],
            cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
    if done.returncode not in (0, 1):  # 1: the answer is no
        raise RuntimeError(f"{command}: status {done.returncode}: {done.stderr}")
    return done.stdout


def trimmed(printed: str, lines: int | None = None) -> str:
    """Return the part of an output that a page shows: no progress, paths or trailing blanks, at most `lines` lines."""
    kept = [line.rstrip() for line in printed.splitlines() if not _LEFT_OUT.match(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n").split("\n")
    if lines is not None and len(text) > lines:
        text = [*text[:lines], "..."]
    return "\n".join(text) + "\n"


def filled(text: str, of: Callable[[str], str | None]) -> str:
    """Fill a page's blocks with the outputs that `of` gives for their commands; a block stays if `of` gives None."""

    def again(found: re.Match[str]) -> str:
        one = _shown(found)
        printed = of(one.command)
        return found[0] if printed is None else found["mark"] + trimmed(printed, one.lines) + found["end"]

    return _BLOCK.sub(again, text)


def pages(names: Iterable[str] = ()) -> list[Path]:
    """Return README.md and the pages of docs/, or those named. Raises FileNotFoundError if a name is no page."""
    every = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
    chosen = [page for name in names for page in every if page.name == Path(name).name]
    if len(chosen) < len(list(names)):
        raise FileNotFoundError(f"one of these is no page: {', '.join(names)}")
    return chosen or every


def main(words: list[str]) -> int:
    """Write the blocks again and print what is run and what has changed; return 1 if a command failed."""
    chosen = pages([word for word in words if not word.startswith("--")])
    blocks = [one for page in chosen for one in shown(page.read_text())]
    if "--quick" in words:
        blocks = [one for one in blocks if not one.by_hand]
    if "--new" in words:
        blocks = [one for one in blocks if not one.text.strip()]
    commands = list(dict.fromkeys(one.command for one in blocks))
    printed: dict[str, str] = {}
    for number, command in enumerate(commands, 1):
        begun = time.monotonic()
        print(f"[{number}/{len(commands)}] {command}", flush=True)
        try:
            printed[command] = run(command)
            print(f"    {time.monotonic() - begun:.0f} s", flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"    stays as it was: {error}", flush=True)
        for page in chosen:  # at once, so that outputs are kept if a later command is interrupted
            if (new := filled(old := page.read_text(), printed.get)) != old:
                page.write_text(new)
                print(f"    {page.name}: written again", flush=True)
    return int(len(printed) < len(commands))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
