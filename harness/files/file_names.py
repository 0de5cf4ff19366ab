"""Names that become files and folders: which names a sweep may have, and a safe file name for any text.

A name never leads out of the folder that it is made in. Not checked are folders that the user chooses (results=DIR,
--out), and links in them.
"""

from pathlib import Path

from vramsweep.harness.messages.terminal import escape_text

LONGEST = 200  # bytes; a file system takes 255, but names grow by .lock, .csv or a number

CACHE = "VRAMSWEEP_CACHE"  # variable: the user's cache folder for all sweeps; empty: no cache


def name_problem(name: str) -> str | None:
    """Return why a name is not allowed; None if it is."""
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
    """Return a file name for any text, unchanged if it is safe. Texts with different unsafe signs may share one."""
    kept = "".join(sign if sign.isprintable() and sign != "/" and escape_text(sign) == sign else "_" for sign in text)
    bare = kept.lstrip(".")
    whole = "_" * (len(kept) - len(bare)) + bare if bare.strip() else f"_{'_' * len(kept)}"
    return whole.encode()[:LONGEST].decode(errors="ignore")  # cut at bytes, but between characters


def is_inside(folder: Path, name: str) -> Path | None:
    """Return the path of a relative name in a folder; None if it leads out of the folder, also by a link."""
    place = folder / name
    try:
        there = place.resolve().is_relative_to(folder.resolve()) and not Path(name).is_absolute()
    except (OSError, ValueError, RuntimeError):  # a loop of links, a null byte
        return None
    return place if there else None
