"""The output of a verb: a file that a user named, or a folder that is the verb's own.

`LIST` in a folder names the files that a verb made there, each with its SHA-256 (`INDEX_LIST`: those of an index). Only
files on the list that are unchanged are replaced or deleted. They must also be among those that the verb makes
(`MAKES`), because a folder, with its list, may come from somebody else. Nothing is written through a link. There is no
protection against others who write into the folder at the same time.
"""

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
DRAFT = ".vramsweep-"  # beginning of the name of the folder in which everything is made first
MOST = 16 << 20  # most bytes of a list
# By verb; fits.csv, residuals.csv and the answer are where earlier versions of `report` wrote them.
MAKES: dict[str, list[str]] = json.loads(Path(__file__).with_name("made_files.json").read_text("utf-8"))
Made = dict[str, list[str]]  # the digests that a file may have, by its relative name


def write(path: Path, what: str | Callable[[Path], object]) -> None:
    """Write a text, or let a function write, to a file that the user named; make its folder. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as place:
            place.write_text(what, encoding="utf-8") if isinstance(what, str) else what(place)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error_reason(error)}") from None


def refuse_input(out: Path, source: Path) -> None:
    """Raise UserError if the file to write is the one that is read."""
    if out.resolve() == source.resolve():
        raise UserError(f"{out} is the input file and would be overwritten; name another output file")


@contextlib.contextmanager
def into_folder(folder: Path, verb: str, beside: bool = False, source: str = "") -> Iterator[tuple[Path, list[str]]]:
    """Yield an empty draft folder, and a list that is filled with remarks at the end.

    At the end its files replace those that the verb made in `folder` before. A folder that is not empty must have the
    verb's list, unless the files go next to others (`beside`), as in a sweep's folder. The file `source` there was
    read, and stays as it is. A file in the way that was edited, or is not on the list (left by an earlier version), is
    kept under another name. Raises UserError, and OSError with names in `folder`.
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
            f"{folder} contains {', '.join(there[:3])}{more}, but not the list ({_list(verb)}) that "
            f"vramsweep {_verb(verb)} writes;\n"
            "choose an empty or new folder with --out, or move these files away"
        )


def _listed(folder: Path, verb: str) -> Made | None:
    """Read the verb's list, without files that the verb never makes; None if there is no list of this verb."""
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
    """Move the draft into the folder, delete old files that were not made again, and return remarks on kept files."""
    made = {file.relative_to(draft).as_posix(): [_digest(file)] for file in sorted(draft.rglob("*")) if file.is_file()}
    before, kept = _listed(folder, verb) or {}, list[Path]()
    made |= {source: before[source]} if source in before else {}
    for name in (_list(verb), *before, *made):
        links = [p for p in (folder / name, *(folder / name).parents) if p.is_symlink() and folder in p.parents]
        if links:
            raise UserError(
                f"{links[0]} is a link to {links[0].readlink()}, which vramsweep {_verb(verb)} does not write through; "
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
            with contextlib.suppress(OSError):  # other files are in it
                place.parent.rmdir()
    _write_list(folder, verb, made)
    more = f" and {len(kept) - 1} more *.kept" * (len(kept) > 1)
    return [f"kept as {kept[0]}{more}, because vramsweep {_verb(verb)} did not write that content" for _ in kept[:1]]


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
