"""What a verb writes: a file that a user named, or a folder that is the verb's own.

`LIST` in a folder names what a verb made there (`INDEX_LIST` what an index is), each file with its SHA-256. Only what
is on it, and still as it was made, is replaced or deleted; and as a folder may be somebody else's, with its list, only
what the verb makes (`MAKES`). Nothing is written through a link. Not covered: what others write into it meanwhile.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from vramsweep.harness.files.bounded_reads import error_reason, replaced
from vramsweep.harness.messages.errors import UserError

LIST = ".vramsweep.json"
INDEX_LIST = ".vramsweep-index.json"
DRAFT = ".vramsweep-"  # what the name of a folder begins with in which everything is made first
MOST = 16 << 20  # bytes of a list
MAKES = {
    "report": (
        *("README.txt", "rows.csv", "report.html", "figures/*"),
        *("fits.csv", "residuals.csv", "answer.csv", "answer.md"),  # where earlier versions wrote them
    ),
    "index": ("index.html",),
    "paper": (
        *("rows/*", "rows.csv", "residuals.csv", "figures/*", "tables/*", "methods.t*", "environment.json", "lock.txt"),
        *("SHA256SUMS", "reproduce.py", "README.md", "example.tex", "results.tex"),
    ),
}
Made = dict[str, list[str]]  # of each file's relative name the digests that it may have


def write(path: Path, what: str | Callable[[Path], object]) -> None:
    """Write a text, or what a function writes, to a file that the user named; make its folder. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as place:
            place.write_text(what, encoding="utf-8") if isinstance(what, str) else what(place)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error_reason(error)}") from None


def refuse_input(out: Path, source: Path) -> None:
    """Raise UserError where the file to write is the one that is read."""
    if out.resolve() == source.resolve():
        raise UserError(f"{out} is the file that is read, and would be lost; name another one to write")


@contextlib.contextmanager
def into_folder(folder: Path, verb: str, beside: bool = False, source: str = "") -> Iterator[tuple[Path, list[str]]]:
    """Yield an empty folder, whose files take the place of those that the verb made in `folder` before, and a list that
    is filled with remarks at the end.

    A folder that holds anything must have the verb's list, unless the files go `beside` others, as in a sweep's folder.
    What is called `source` there is what was read: it stays as it is.
    A file that stands in the way and is not on the list, or was edited, is kept under another name, as one that an
    earlier version left. Raises UserError, and OSError with names in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not beside:
        _refuse(folder, verb)
    draft, notes = Path(tempfile.mkdtemp(prefix=DRAFT, dir=folder)), list[str]()
    try:
        yield draft, notes
        notes += _put(draft, folder, verb, source)
    except OSError as error:
        part = max(draft.rglob("*.*"), key=lambda file: file.lstat().st_mtime_ns, default=folder)
        error.filename = str(error.filename2 or error.filename or part).replace(str(draft), str(folder))
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _refuse(folder: Path, verb: str) -> None:
    there = sorted(place.name for place in folder.iterdir() if not place.name.startswith(DRAFT))
    if there and _listed(folder, verb) is None:
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        raise UserError(
            f"{folder} holds {', '.join(there[:3])}{more}, and no list ({_list(verb)}) by which "
            f"vramsweep {_verb(verb)} made them;\n"
            "choose a folder that is empty or not there yet with --out, or move what is in it away"
        )


def _listed(folder: Path, verb: str) -> Made | None:
    """Read what is on the verb's list, of what it can have made; None where there is no list of the verb's."""
    place = folder / _list(verb)
    try:
        if place.is_symlink() or not place.is_file() or place.stat().st_size > MOST:
            return None
        found = json.loads(place.read_bytes())
        made = {n: list(one) for n, one in found["made"].items() if ".." not in n.split("/")}
        own = {n: one for n, one in made.items() if any(fnmatchcase(n, pattern) for pattern in MAKES[verb])}
        return own if found["verb"] == verb else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _put(draft: Path, folder: Path, verb: str, source: str) -> list[str]:
    """Move what was made into the folder, and delete what was not made again; remarks on what was kept."""
    made = {file.relative_to(draft).as_posix(): [_digest(file)] for file in sorted(draft.rglob("*")) if file.is_file()}
    before, kept = _listed(folder, verb) or {}, list[Path]()
    made |= {source: before[source]} if source in before else {}
    for name in (_list(verb), *before, *made):
        place = next(
            (p for p in (folder / name, *(folder / name).parents) if p.is_symlink() and folder in p.parents), None
        )
        if place is not None:
            raise UserError(
                f"{place} is a link to {place.readlink()}, which vramsweep {_verb(verb)} does not write through; "
                "remove it, or choose a folder with --out"
            )
    _write_list(folder, verb, {name: [*before.get(name, ()), *made.get(name, ())] for name in before | made})
    for name, new in made.items():
        if name == source:
            continue
        place = folder / name
        if place.is_file() and _digest(place) not in (*before.get(name, ()), *new):
            names = (place.with_name(f"{place.name}.kept{number or ''}") for number in itertools.count())
            kept.append(next(name for name in names if not os.path.lexists(name)))
            place.rename(kept[-1])
        place.parent.mkdir(parents=True, exist_ok=True)
        (draft / name).replace(place)
    for name in before.keys() - made.keys():
        place = folder / name
        if place.is_file() and _digest(place) in before[name]:
            place.unlink()
            with contextlib.suppress(OSError):  # others are in it
                place.parent.rmdir()
    _write_list(folder, verb, made)
    more = f", and {len(kept) - 1} more *.kept," * (len(kept) > 1)
    return [f"{kept[0]}{more} is what was there and not as vramsweep {_verb(verb)} had left it" for _ in kept[:1]]


def _write_list(folder: Path, verb: str, made: Mapping[str, list[str]]) -> None:
    with replaced(folder / _list(verb)) as place:
        place.write_text(json.dumps({"verb": verb, "made": made}, indent=1), encoding="utf-8")


def _list(verb: str) -> str:
    return INDEX_LIST if verb == "index" else LIST


def _verb(what: str) -> str:
    return "report" if what == "index" else what


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
