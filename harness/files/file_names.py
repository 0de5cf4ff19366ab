"""Names that become files and folders: what a sweep may be called, and a file's name of anything at all.

A name never leads out of the folder that it is made in. Not covered: places, which are the user's to choose
(results=DIR, --out), and links in them.
"""

from __future__ import annotations

from pathlib import Path

from vramsweep.harness.messages.terminal import escape_text

LONGEST = 200  # bytes; a file system takes 255, and names grow: .lock, .csv, a number

CACHE = "VRAMSWEEP_CACHE"  # variable: the folder of what is kept for a user, for all sweeps; empty: none is


def name_problem(name: str) -> str | None:
    """Why nothing can be called so; None for a name that is one."""
    if not name.strip():
        return "it is empty"
    if "/" in name:
        return "it has a /"
    if name.startswith("."):
        return "it begins with a dot"
    if not name.isprintable() or escape_text(name) != name:
        return "it has a character that cannot be printed"
    if len(name.encode()) > LONGEST:
        return f"it has {len(name.encode())} bytes, more than {LONGEST}"
    return None


def make_safe(text: str) -> str:
    """A file's name of any text, its own where it is one; others that differ in what no name may have get the same."""
    kept = "".join(sign if sign.isprintable() and sign != "/" and escape_text(sign) == sign else "_" for sign in text)
    bare = kept.lstrip(".")
    whole = "_" * (len(kept) - len(bare)) + bare if bare.strip() else f"_{'_' * len(kept)}"
    return whole.encode()[:LONGEST].decode(errors="ignore")  # as far as there is room: of characters, not bytes


def is_inside(folder: Path, name: str) -> Path | None:
    """The file of that relative name in a folder; None where it would be elsewhere, by links too."""
    place = folder / name
    try:
        there = place.resolve().is_relative_to(folder.resolve()) and not Path(name).is_absolute()
    except (OSError, ValueError, RuntimeError):  # a loop of links, a null byte
        return None
    return place if there else None
