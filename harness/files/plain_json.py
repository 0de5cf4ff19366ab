"""JSON of users, refused if a number or the depth would make a library fail; whole JSON objects of other processes.

Python's own reader takes any whole number, even one that fits neither a float nor a tensor. It also takes nesting until
its stack ends, and a copy of the same value then overruns the stack.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.files.bounded_reads import read_content

DEEPEST = 50  # lists and objects in one another
MOST = 10**36  # bound of whole numbers; for "no limit" transformers writes int(1e30)


def read(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text. Raises ValueError, which says in one line what is not allowed."""
    try:
        found = json.loads(text, **options)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {DEEPEST} lists and objects, the most that is allowed") from None
    if (why := json_problem(found)) is not None:
        raise ValueError(why)
    return found


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None if the file cannot be read, or holds something else."""
    with contextlib.suppress(OSError):
        return _parse_object(read_content(path))
    return None


def read_objects(text: bytes) -> Iterator[dict[str, Any]]:
    """Return an iterator over the objects of a text, one a line; lines that hold something else are left out."""
    return (found for line in text.splitlines() if (found := _parse_object(line)) is not None)


def _parse_object(text: bytes) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        return found if isinstance(found, dict) else None
    return None


def is_finite(value: Any) -> bool:
    """Return whether all numbers in a value of dicts, lists and tuples are finite."""
    if isinstance(value, float):
        return math.isfinite(value)
    nested = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return all(map(is_finite, nested))


def json_problem(value: Any, most: int = MOST) -> str | None:
    """Return why libraries cannot take a value of dicts and lists; None if they can."""
    level, deep = [("", value)], 0
    while level:
        if deep > DEEPEST:
            return f"it is nested deeper than {DEEPEST} lists and objects, the most that is allowed"
        below: list[tuple[str, Any]] = []
        for name, one in level:
            if isinstance(one, dict):
                below += [(str(key), inner) for key, inner in one.items()]
            elif isinstance(one, list):
                below += [(name, inner) for inner in one]
            elif isinstance(one, int) and abs(one) >= most:
                digits = len(str(abs(one)))
                return f"{name or 'it'} is a whole number of {digits} digits; allowed is less than {most:.1e}"
            elif isinstance(one, float) and math.isnan(one):
                return f"{name or 'it'} is NaN; write a number or null"
        level, deep = below, deep + 1
    return None
