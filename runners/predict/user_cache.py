"""What tracing has made, kept for one user: for every sweep and question, in a private folder of limited size.

It is in $VRAMSWEEP_CACHE (empty: nothing is kept), else $XDG_CACHE_HOME/vramsweep, else ~/.cache/vramsweep. A file's
name is a hash of all that its content depends on: what the caller names, our own code, the installed packages, the
variables that a row records. Nothing is kept that depends on files of the user's own. Not covered: what a file says,
and whether that can be believed (trace_cache.py, symbolic_candidate.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

from vramsweep.harness.files.bounded_reads import read_content, replaced
from vramsweep.harness.files.file_names import CACHE
from vramsweep.harness.process import worker_environment
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial import Trial

MOST = 2 << 30  # bytes of all files; those that were not used for longest make room
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft")


def load(name: str, trial: Trial) -> bytes | None:
    """Return what is kept under this name for the trial; None where nothing is, or may be."""
    with contextlib.suppress(OSError):
        if (place := place_of(name, trial)) is not None:
            content = read_content(place, links=False)
            os.utime(place, follow_symlinks=False)
            return content
    return None


def keep(name: str, trial: Trial, content: bytes) -> None:
    """Keep content under this name, where it may be kept; a disk that is full is no reason to fail."""
    with contextlib.suppress(OSError):
        if (place := place_of(name, trial)) is not None:
            with replaced(place) as aside:
                aside.touch(0o600, exist_ok=False)
                aside.write_bytes(content)
            _make_room(place.parent)


def place_of(name: str, trial: Trial) -> Path | None:
    """Return the file of this name; None where nothing is kept for the trial."""
    model = trial.model
    own = (model.path, trial.ds_config, trial.runner.target, trial.runner.command, model.trust_remote_code or None)
    if any(one is not None for one in own) or trial.data != "synthetic" or trial.runner.name in runner_table.USER_CODE:
        return None
    if (folder := _folder()) is None or (state := _installed_state()) is None:
        return None
    environment = worker_environment.recorded_variables(os.environ)
    text = json.dumps([name, state, environment], sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _folder() -> Path | None:
    """The folder, made if it is not there; None where it is switched off, or not this user's alone."""
    named = os.environ.get(CACHE)
    if named == "":
        return None
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vramsweep"
        folder = (Path(named) if named else base) / "traces"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError):  # there is no home
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if private else None


@cache
def _installed_state() -> str | None:
    """A hash of our code and of what is installed; None where a library's code may change under one version."""
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            origin = json.loads(metadata.distribution(name).read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):
                return None
    found = hashlib.sha256(sys.version.encode())
    for place in sys.path:
        with contextlib.suppress(OSError):  # their names have versions
            found.update(repr(sorted(one.name for one in Path(place or ".").glob("*.*-info"))).encode())
    root = Path(__file__).parents[2]  # not resolved: its folders may be links
    for part in ("harness", "runners"):
        for file in sorted((root / part).rglob("*.py")):
            found.update(f"{file.relative_to(root)} ".encode() + file.read_bytes())
    return found.hexdigest()


def _make_room(folder: Path) -> None:
    files = sorted((one.lstat().st_mtime, one.lstat().st_size, one) for one in folder.iterdir())
    beyond = sum(size for _, size, _ in files) - MOST
    for _, size, file in files:
        if beyond <= 0:
            return
        file.unlink(missing_ok=True)
        beyond -= size
