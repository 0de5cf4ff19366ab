"""What other tools say that trials need, asked once and kept beside a sweep's rows.

Not covered: the tools (runners/others.py, a process of its own), what is made of it (validate.py, and
analysis/estimates.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vramsweep.harness.attempt import environment
from vramsweep.harness.plan import Planned
from vramsweep.harness.row import Row

FILE = "others.jsonl"
Answers = dict[str, int | None]  # bytes by tool; None where it says nothing


@dataclass(frozen=True)
class Said:
    """Answers by trial id, the ids whose answer is all that there will be, and where each tool is from."""

    found: dict[str, Answers] = field(default_factory=dict)
    complete: set[str] = field(default_factory=set)
    sources: dict[str, str] = field(default_factory=dict)


def question(item: Planned, row: Row | None) -> dict[str, Any] | None:
    """What the tools are told of a trial; None where it is not known how many parameters it has."""
    whole = item.trial.model.parameters if item.trial is not None and item.trial.adapter == "none" else None
    count = (row or {}).get("parameters") or whole
    trainable = (row or {}).get("trainable_parameters") or count
    return None if count is None else {"trial": item.resolved, "parameters": count, "trainable": trainable}


def ask(wanted: Mapping[str, Any], tracked: Collection[str], folder: Path) -> Said:
    """What other tools say of these trials, by id; the tool that takes minutes is asked about the `tracked` ones.

    What was asked before, in this folder, is not asked again, nor what had no answer within the deadline.
    """
    file = folder / FILE
    known, slow = said(file), set(tracked)
    left = {name: one for name, one in wanted.items() if name not in known.found or name in slow - known.complete}
    if not left:
        return known
    request = folder / "others.json"
    request.write_text(json.dumps({"trials": left, "tracked": list(tracked)}))
    print(f"asking other tools about {len(left)} runs; they say it in {file}", flush=True)
    with (folder / "others.log").open("a") as log:
        done = subprocess.run(
            [sys.executable, "-m", "vramsweep.runners.others", str(request), str(file)],
            env=environment("", "simulated", os.environ), stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if done.returncode == 0:  # all had their time
        with file.open("a") as answers:
            for name in left:
                answers.write(json.dumps({"trial_id": name, "tracked": name in slow, "others": {}}) + "\n")
    return said(file)


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
