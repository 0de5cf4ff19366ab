"""Trials of a user's command, as several tests write them."""

import sys
from pathlib import Path
from typing import Any

from conftest import ROOT, tiny

PYTHON = sys.executable
BIN = Path(sys.executable).parent
SCRIPTS = ROOT / "tests" / "scripts"
NOTHING = {"seq_len": 1, "micro_batch": 1, "model": {"model_type": None, "config": {}, "parameters": None}}


def command(words: str, **over: Any) -> dict[str, Any]:
    """A trial of a command; PYTHON is this one, and SCRIPTS where ours lie."""
    runner = {"name": "script", "command": words.replace("PYTHON", PYTHON).replace("SCRIPTS", str(SCRIPTS))}
    runner |= over.pop("runner", {})
    return tiny(**(NOTHING | over), runner=runner)
