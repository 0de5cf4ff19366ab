"""What other tools say that trials need, as it is kept beside a sweep's rows. Pure.

Not covered: asking them (ask_others.py), what is made of it (validate.py, analysis/answers/estimates.py).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path

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
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # a line that was cut off
            one = json.loads(line)
            known.sources.update(one.get("sources", {}))
            if "trial_id" in one:
                known.found[one["trial_id"]] = known.found.get(one["trial_id"], {}) | one["others"]
                known.complete.update([one["trial_id"]] if one["tracked"] else [])
    return known
