"""What commands print, as README.md and these pages show it: `python docs/outputs.py` runs them and writes it again.

A block that shows an output stands below a mark:

    <!-- output: vramsweep explain model=gpt2 seq_len=512 -->
    ```
    ...
    ```

`output of 12 lines` keeps the first 12 and says that there is more. `output by hand` takes minutes: `--quick` leaves it
out, and so does tests/test_docs.py, which runs every other command. Each command runs in an empty folder, once however
many pages show it, without a GPU. Progress and the paths of a report are left out: they are not the answer.

`python docs/outputs.py README.md fit.md` writes these pages alone; `--new` fills only blocks that are empty.
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
    """One block of a page: the command, the most lines of it that are shown, whether it takes minutes, its text now."""

    command: str
    lines: int | None
    by_hand: bool
    text: str


def shown(text: str) -> Iterator[Shown]:
    """The blocks of a page that show what a command prints."""
    for found in _BLOCK.finditer(text):
        yield _shown(found)


def _shown(found: re.Match[str]) -> Shown:
    lines = None if found["lines"] is None else int(found["lines"])
    return Shown(found["command"], lines, found["by_hand"] is not None, found["text"])


def run(command: str) -> str:
    """What the command prints to a file, in an empty folder. Raises RuntimeError where it is a mistake."""
    program, *words = shlex.split(command)
    if program != "vramsweep":
        raise RuntimeError(f"{command}: only vramsweep is run")
    if words[0] == "predict" and not any(word.startswith("report=") for word in words):
        words.append("report=false")  # figures take long, and are not shown
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
    """What a page shows of an output: without progress, paths and blanks at the end; so many lines at most."""
    kept = [line.rstrip() for line in printed.splitlines() if not _LEFT_OUT.match(line)]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n").split("\n")
    if lines is not None and len(text) > lines:
        text = [*text[:lines], "..."]
    return "\n".join(text) + "\n"


def filled(text: str, of: Callable[[str], str | None]) -> str:
    """A page with what `of` says that each command prints; where that is None the block stays."""

    def again(found: re.Match[str]) -> str:
        one = _shown(found)
        printed = of(one.command)
        return found[0] if printed is None else found["mark"] + trimmed(printed, one.lines) + found["end"]

    return _BLOCK.sub(again, text)


def pages(names: Iterable[str] = ()) -> list[Path]:
    """README.md and the pages of docs/, or those of these names. Raises FileNotFoundError."""
    every = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
    chosen = [page for name in names for page in every if page.name == Path(name).name]
    if len(chosen) < len(list(names)):
        raise FileNotFoundError(f"one of these is no page: {', '.join(names)}")
    return chosen or every


def main(words: list[str]) -> int:
    """Write the blocks again, and say what is run and what has changed; 1 where a command failed."""
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
        for page in chosen:  # at once, so that what was run is kept where a later one is interrupted
            if (new := filled(old := page.read_text(), printed.get)) != old:
                page.write_text(new)
                print(f"    {page.name}: written again", flush=True)
    return int(len(printed) < len(commands))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
