"""PNG, SVG and PDF: a browser draws them, in a process of its own that ends when its standard input does.

A terminal sends Ctrl-C to every process of its group. A browser in that group would be cut off in the middle of a word,
and what speaks with it would fail in threads that nobody hears; here it has a session of its own, and whoever waits for
it lets go of it, or is gone: with either, process and browser end at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
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


@dataclass(frozen=True)
class Picture:
    """A plot as a file, whose suffix says the format; pixels of the page, drawn `scale` times as fine."""

    plot: go.Figure
    file: Path
    width: int | None = None
    height: int | None = None
    scale: int = 1


SUFFIXES = (".png", ".svg", ".pdf", ".jpg", ".jpeg", ".webp")


class NotDrawn(RuntimeError):
    """No browser, one that does not start, or a file that cannot be written; says so in one line."""


def draw(pictures: Sequence[Picture]) -> None:
    """Write the files, all in one browser session. Raises NotDrawn."""
    for picture in pictures:
        if picture.file.suffix not in SUFFIXES:
            raise NotDrawn(f"{picture.file.name}: allowed are {', '.join(SUFFIXES)}")
    try:
        code, said = _in_a_session_of_its_own([_as_json(picture) for picture in pictures])
    except OSError as error:
        raise NotDrawn(str(error)) from None
    if code:
        lines = [line for line in said.splitlines() if line.strip()]
        raise NotDrawn(lines[-1].strip() if lines else f"the process of the browser ended with status {code}")


def _in_a_session_of_its_own(asked: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """The exit status of `main` there, and what it said. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix="vramsweep-browser-", ignore_cleanup_errors=True) as place:
        request, said = Path(place) / "asked.json", Path(place) / "said"
        request.write_text(json.dumps(asked), encoding="utf-8")
        # Imports from where this process does, and from nowhere else: the working folder may be one that somebody sent.
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        with said.open("wb") as out, subprocess.Popen(
            [sys.executable, "-P", "-m", "vramsweep.analysis.figures.browser", request], stdin=subprocess.PIPE,
            stdout=out, stderr=subprocess.STDOUT, env=environ, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                code = process.wait()
            finally:
                if process.stdin is not None:
                    process.stdin.close()
                process.wait()
        return code, said.read_text(errors="replace")


def _as_json(picture: Picture) -> dict[str, Any]:
    size = {"width": picture.width, "height": picture.height, "scale": picture.scale}
    return {"plot": picture.plot.to_json(), "file": str(picture.file), **size}


def _drawn(asked: Sequence[dict[str, Any]]) -> str | None:
    """Draw what was asked for; returns why it was not."""
    aside = [Path(tempfile.gettempdir()) / f"{number}{Path(one['file']).suffix}" for number, one in enumerate(asked)]
    try:
        write_images: Any = getattr(plotly.io, "write_images")  # noqa: B009 (not in the stubs yet)
        write_images(
            [plotly.io.from_json(one["plot"]) for one in asked],
            aside,
            **{name: [one[name] for one in asked] for name in ("width", "height", "scale")},
        )
        for one, drawn in zip(asked, aside, strict=True):
            if not drawn.exists():  # of one among several the library does not say why
                return f"{Path(one['file']).name}: the browser has not drawn it"
            shutil.copyfile(drawn, one["file"])
    except (RuntimeError, ValueError, OSError) as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__)
    return None


def _end_with_the_input(place: str) -> None:
    """Where whoever waits has let go, or is gone: end the browsers, which have sessions of their own, leave nothing."""
    os.read(0, 1)  # not through sys.stdin: its lock would be held when this process ends
    browsers = psutil.Process().children(recursive=True)
    for number in (signal.SIGTERM, signal.SIGKILL):  # asked, a browser removes what it has written
        for browser in browsers:
            with contextlib.suppress(psutil.Error):
                browser.send_signal(number)
        _, browsers = psutil.wait_procs(browsers, timeout=3)
    shutil.rmtree(place, ignore_errors=True)
    os._exit(1)


def main(request: Path) -> int:
    """Draw the pictures of a JSON file; the last line said tells why it could not be."""
    tempfile.tempdir = str(request.parent)  # not by TMPDIR: a browser's sockets have short names
    threading.Thread(target=_end_with_the_input, args=(tempfile.tempdir,), daemon=True).start()
    why = _drawn(json.loads(request.read_text(encoding="utf-8")))
    if why is not None:
        print(why, flush=True)
    return int(why is not None)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
