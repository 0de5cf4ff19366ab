"""What other tools say that trials need, as it is kept beside a sweep's rows. Pure.

Not covered: asking them (ask_others.py), what is made of it (validate.py, analysis/answers/estimates.py).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramsweep.harness.files import content

FILE = "others.jsonl"
Answers = dict[str, int | None]  # bytes by tool; None where it says nothing


@dataclass(frozen=True)
class Said:
    """Answers by trial id, the ids whose answer is all that there will be, and where each tool is from."""

    found: dict[str, Answers] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)


def said(file: Path) -> Said:
    """What the file holds; nothing where there is none."""
    known = Said()
    text = b""
    with contextlib.suppress(OSError):
        text = content(file)
    for line in text.decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError, RecursionError):
            _add(known, json.loads(line))  # or it was cut off, or never one of ours
    return known


def _add(known: Said, one: Any) -> None:
    """What a line says, all of it or nothing."""
    sources = {str(tool): str(source) for tool, source in one.get("sources", {}).items()}
    if "trial_id" in one:
        answers = {str(tool): size for tool, size in one["others"].items()}
        if not all(size is None or (type(size) is int and 0 <= size < 1 << 63) for size in answers.values()):
            raise ValueError("no sizes")
        trial_id = str(one["trial_id"])
        complete = [trial_id] if one["tracked"] else []
        known.found[trial_id] = known.found.get(trial_id, {}) | answers
        known.complete.update(complete)
    known.sources.update(sources)
