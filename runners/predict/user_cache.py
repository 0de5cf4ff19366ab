"""Cache of what tracing has made, for one user's sweeps and questions: a private folder of limited size.

It is in $VRAMSWEEP_CACHE (empty: nothing is kept), else $XDG_CACHE_HOME/vramsweep, else ~/.cache/vramsweep. A file's
name hashes all that its content depends on: what the caller names, our own code, installed packages, the variables
that a row records. Callers decide of which trials anything is kept, what a file contains, and whether it is valid
(trace_cache.py, symbolic_candidate.py).
"""

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

MOST = 2 << 30  # bytes of all files; the least recently used are deleted first
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft")


def load(place: Path) -> bytes:
    """Return the content of a file of `place_of`, and mark it as used now. Raises OSError."""
    content = read_content(place, links=False)
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(place, follow_symlinks=False)
    return content


def keep(place: Path, content: bytes) -> None:
    """Keep content in a file of `place_of`; a write that fails, as on a full disk, is ignored."""
    with contextlib.suppress(OSError):
        with replaced(place) as aside:
            aside.touch(0o600, exist_ok=False)
            aside.write_bytes(content)
        _make_room(place.parent)


def place_of(name: str) -> Path | None:
    """Return the file of this name; None if nothing is kept."""
    if (folder := _folder()) is None or (state := _installed_state()) is None:
        return None
    environment = worker_environment.recorded_variables(os.environ)
    text = json.dumps([name, state, environment], sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _folder() -> Path | None:
    """Return the folder, made if needed; None if it is switched off, cannot be made, or is not this user's alone."""
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
    """Hash our code and tables, and what is installed; None if a library may change under one version (editable)."""
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
        for file in sorted(file for kind in ("py", "json", "tsv") for file in (root / part).rglob(f"*.{kind}")):
            found.update(f"{file.relative_to(root)} ".encode() + file.read_bytes())
    return found.hexdigest()


def _make_room(folder: Path) -> None:
    files = []
    for file in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process deletes files too
            found = file.stat(follow_symlinks=False)
            files.append((found.st_mtime, found.st_size, file.path))
    beyond = sum(size for _, size, _ in files) - MOST
    for _, size, path in sorted(files) if beyond > 0 else ():
        if beyond > 0:
            Path(path).unlink(missing_ok=True)
            beyond -= size
