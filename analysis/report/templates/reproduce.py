#!/usr/bin/env python3
"""Make every table and figure of this folder again, from the rows in it, and compare them with those that are here.

    python reproduce.py [OUT] [--any-version]

OUT is where they are made, by default again/ in this folder. Tables, methods and the data of figures must come out
the same, byte for byte; the exit status is 1 where they do not. lock.txt names the versions; vramsweep must be the one
named in environment.json, unless --any-version is given.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(words: list[str]) -> int:
    """Check, make, compare; returns the exit status."""
    said = json.loads((HERE / "environment.json").read_text(encoding="utf-8"))
    places = [word for word in words if not word.startswith("-")]
    out = Path(places[0]).resolve() if places else HERE / "again"
    try:
        from vramsweep import __version__
    except ImportError:
        return wrong(
            f"vramsweep is not installed in {sys.executable}; it takes version {said['vramsweep']}, see lock.txt"
        )
    if __version__ != said["vramsweep"] and "--any-version" not in words:
        return wrong(
            f"this is vramsweep {__version__}, and the folder was made by {said['vramsweep']}; --any-version goes on"
        )
    for name, digest in said["rows"].items():
        file = HERE / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            return wrong(f"{name} is not the file that the tables were made of")
    verb, *rest = said["command"]
    made = subprocess.run(
        [sys.executable, "-P", "-m", "vramsweep", verb, *rest, "--out", str(out)], cwd=HERE, check=False
    )
    if made.returncode != 0:
        return made.returncode
    apart = [name for name in said["files"] if not same(HERE / name, out / name)]
    for name in apart:
        print(f"differs: {name}")
    print(f"{len(said['files']) - len(apart)} of {len(said['files'])} files are the same, byte for byte; made in {out}")
    return 1 if apart else 0


def same(one: Path, other: Path) -> bool:
    """Whether both files are there and hold the same."""
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


def wrong(text: str) -> int:
    """Say it; the exit status of what the user can mend."""
    print(f"reproduce: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
