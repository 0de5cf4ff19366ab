"""Command lines of our own processes, and the Python that a user's command runs in, which may be another than ours."""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from vramsweep.harness.messages.console import Activity
from vramsweep.harness.messages.errors import UserError

START = Path(__file__).absolute().with_name("start.py")  # not resolved: the folders under vramsweep/ may be links
PACKAGES = ("torch", "transformers")
_ASK = """
import sys
sys.path[:] = filter(None, sys.path)  # not from the current folder
import json, platform
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps([platform.python_version(), *map(version, %r)]))
"""
ANSWER_S = 20.0


def build_command(module: str, *words: str) -> list[str]:
    """Build the command line that runs a module of ours in an interpreter like this one.

    That interpreter imports nothing from the current folder. The package is this copy, installed or not (start.py).
    """
    return [sys.executable, "-P", str(START), "-m", module, *words]


def draw_page(data: str, out: Path) -> None:
    """Draw a page from `data`, the JSON of `timeline` or `replay`, in a process of the analysis.

    Raises UserError if that fails.
    """
    with tempfile.TemporaryDirectory() as folder, Activity("drawing the figure"):
        file = Path(folder) / "data.json"
        file.write_text(data)
        command = build_command("vramsweep", "draw", str(file), str(out))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        why = next(reversed(done.stderr.strip().splitlines()), "no reason given")
        raise UserError(f"the figure could not be drawn: {why}")


def interpreter_facts(command: str) -> dict[str, str | None]:
    """Return columns about the Python of a command: empty if it is ours, or unknown (a shell script)."""
    found = interpreter(command)
    if found is None or found.parent.resolve() == Path(sys.executable).parent.resolve():
        return {}
    told = _ask_interpreter(str(found))
    names = ("python_version", *(f"{package}_version" for package in PACKAGES))
    return dict(zip(names, told, strict=True)) if told else {}


def interpreter(command: str) -> Path | None:
    """Return the Python that a command's program is, or runs in by its first line; None if it is no Python."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    place = shutil.which(words[0]) if words else None
    if place is None:
        return None
    path = Path(place)
    if path.name.startswith("python"):
        return path
    try:
        with path.open("rb") as file:
            first = file.readline(512).decode(errors="replace").strip()
    except OSError:
        return None
    named = first.removeprefix("#!").split()
    if not first.startswith("#!") or not named:
        return None
    named = named[1:] if Path(named[0]).name == "env" else named
    found = shutil.which(named[0]) if named and Path(named[0]).name.startswith("python") else None
    return None if found is None else Path(found)


@cache
def _ask_interpreter(python: str) -> tuple[str | None, ...] | None:
    try:
        done = subprocess.run([python, "-c", _ASK % (PACKAGES,)], capture_output=True, timeout=ANSWER_S, check=True)
        return tuple(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
