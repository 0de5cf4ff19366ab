"""PNG, SVG and PDF: a browser draws them, in a process of its own that ends when its standard input does.

A terminal sends Ctrl-C to every process of its group. A browser in that group would be cut off in the middle of a word,
and what speaks with it would fail in threads that nobody hears; here it has a session of its own, and whoever waits for
it lets go of it, or is gone: with either, process and browser end at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
import psutil

from vramsweep.harness.files.bounded_reads import replaced
from vramsweep.harness.files.outputs import write
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import build_command


@dataclass(frozen=True)
class Picture:
    """A plot as a file, whose suffix says the format; pixels (None: the plot's own), drawn `scale` times as fine."""

    plot: go.Figure
    file: Path
    width: int | None = None
    height: int | None = None
    scale: float = 1


ASKED, WHY = "asked.json", "why"
SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")

SHORT = 60  # characters: sockets under a longer TMPDIR could have names that are too long for them
SPARE = 64 << 20  # bytes that a browser needs for its own files
NO_BROWSER = 2  # exit status
_NO_MARGIN = "<style>@page { margin: 0 }</style>"


class NotDrawn(RuntimeError):
    """Some pictures are not there; says in one line why."""


class NoBrowser(NotDrawn):
    """None is there: the browser is missing, or did not start."""


def draw(pictures: Sequence[Picture]) -> None:
    """Write the files, all in one browser session. Raises NotDrawn."""
    for picture in pictures:
        if picture.file.suffix not in SUFFIXES:
            raise NotDrawn(f"{picture.file.name}: allowed are {', '.join(SUFFIXES)}")
    try:
        code, why = _in_a_session_of_its_own([_as_json(picture) for picture in pictures])
    except OSError as error:
        raise NotDrawn(str(error)) from None
    if code:
        place = tempfile.gettempdir()
        if shutil.disk_usage(place).free < SPARE:
            raise NotDrawn(f"a browser needs {SPARE >> 20} MiB in {place}: free some, or set TMPDIR")
        kind = NoBrowser if code == NO_BROWSER else NotDrawn
        raise kind(why or f"the process of the browser ended with status {code}")


def draw_one(picture: Picture) -> None:
    """Write one file that a user named, a picture or a page. Raises UserError."""
    out = picture.file
    try:
        if out.suffix == ".html":
            return write(out, lambda place: picture.plot.write_html(place, config={"displaylogo": False}))
        out.parent.mkdir(parents=True, exist_ok=True)
        draw([picture])
    except (RuntimeError, ValueError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{out} was not drawn: {reason[:200]} (PNG, SVG and PDF need Chromium)") from None


def _in_a_session_of_its_own(asked: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """The exit status of `main` there, and the reason that it gives. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="vramsweep-browser-", ignore_cleanup_errors=True) as place:
        request, why = Path(place) / ASKED, Path(place) / WHY
        request.write_text(json.dumps(asked), encoding="utf-8")
        environ = os.environ | ({"TMPDIR": place} if len(place) < SHORT else {})
        with subprocess.Popen(
            build_command("vramsweep.analysis.figures.browser", place), stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                code = process.wait()
            finally:
                if process.stdin is not None:
                    process.stdin.close()
                process.wait()
        return code, why.read_text(encoding="utf-8").strip() if why.exists() else ""


def _as_json(picture: Picture) -> dict[str, Any]:
    own = picture.plot.layout
    size = {"width": picture.width or own.width, "height": picture.height or own.height, "scale": picture.scale}
    return {"plot": picture.plot.to_json(), "file": str(picture.file), **size}


def _draw(asked: Sequence[dict[str, Any]], place: Path) -> tuple[int, str]:
    """Draw what was asked for aside, then put what was drawn in its place; the exit status and why."""
    aside = [place / f"{number}{Path(one['file']).suffix}" for number, one in enumerate(asked)]
    try:
        _whole_pages()
        write_images: Any = getattr(plotly.io, "write_images")  # noqa: B009 (not in the stubs yet)
        write_images(
            [plotly.io.from_json(one["plot"]) for one in asked],
            aside,
            **{name: [one[name] for one in asked] for name in ("width", "height", "scale")},
        )
    except asyncio.CancelledError:
        return NO_BROWSER, "the browser ended while it drew"
    except (RuntimeError, ValueError, OSError) as error:
        said = str(next(iter(error.args), "")) or type(error).__name__
        return NO_BROWSER, said.strip().splitlines()[0]
    missing = [Path(one["file"]).name for one, drawn in zip(asked, aside, strict=True) if not drawn.exists()]
    problems = [f"the browser has not drawn {', '.join(missing)}"] if missing else []
    for one, drawn in zip(asked, aside, strict=True):
        if drawn.exists():
            try:
                with replaced(Path(one["file"])) as part:
                    shutil.copyfile(drawn, part)
            except OSError as error:
                problems.append(str(error))
    return int(bool(problems)), "; ".join(problems)


def _whole_pages() -> None:
    """A PDF's page is the picture: kaleido prints a margin of 0.1 in, for which the picture is shrunk and cut off."""
    from kaleido import PageGenerator

    if _NO_MARGIN not in PageGenerator.header:
        PageGenerator.header += _NO_MARGIN


def _end_with_the_input(place: Path, let_go: threading.Event) -> None:
    """Where whoever waits has let go, or is gone: end the browsers, which have sessions of their own, leave nothing."""
    os.read(0, 1)  # not through sys.stdin: its lock would be held when this process ends
    let_go.set()
    browsers = psutil.Process().children(recursive=True)
    for browser in browsers:
        with contextlib.suppress(psutil.Error):
            browser.kill()
    psutil.wait_procs(browsers, timeout=3)
    shutil.rmtree(place, ignore_errors=True)
    os._exit(1)


def main(place: Path) -> int:
    """Draw the pictures that a file of the folder asks for, and leave there why it could not be."""
    tempfile.tempdir = str(place)
    let_go = threading.Event()
    ender = threading.Thread(target=_end_with_the_input, args=(place, let_go), daemon=True)
    ender.start()
    code, why = _draw(json.loads((place / ASKED).read_text(encoding="utf-8")), place)
    if let_go.is_set():  # what failed has failed for that, and is being removed
        ender.join()
    if why:
        (place / WHY).write_text(why, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
