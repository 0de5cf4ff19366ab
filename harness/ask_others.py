"""Asking other tools what trials need: once, in a process of their own (runners/others.py)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vramsweep.harness.attempt import environment
from vramsweep.harness.files import appended, replaced
from vramsweep.harness.interpreter import build_command
from vramsweep.harness.others import FILE, Said, said
from vramsweep.harness.plan import Planned
from vramsweep.harness.row import Row


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
    with replaced(request) as aside:
        aside.write_text(json.dumps({"trials": left, "tracked": list(tracked)}))
    print(f"asking other tools about {len(left)} runs; they say it in {file}", flush=True)
    with appended(folder / "others.log") as log:
        done = subprocess.run(
            build_command("vramsweep.runners.others", str(request), str(file)),
            env=environment("", "simulated", os.environ), stdout=log, stderr=log, check=False,
        )  # fmt: skip
    if done.returncode == 0:  # all had their time
        with appended(file) as answers:
            for name in left:
                answers.write(json.dumps({"trial_id": name, "tracked": name in slow, "others": {}}).encode() + b"\n")
    return said(file)
