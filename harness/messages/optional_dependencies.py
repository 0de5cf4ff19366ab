"""Packages that a light install leaves out: which extra of pyproject.toml brings a missing module.

Packages of single techniques are not listed: the techniques say what they need (spec/techniques/schema.py).
"""

import json
import shlex
import sys
from pathlib import Path

# The imported modules of each extra, by their names in an import.
EXTRAS: dict[str, list[str]] = json.loads(Path(__file__).with_name("extras.json").read_text("utf-8"))
MEASURING = ("sweep", "run")  # verbs that need all of a sweep's packages


def find_extra(module: str) -> str:
    """Return the extra that brings a module; "" for one that no extra brings."""
    return next((extra for extra, modules in EXTRAS.items() if module.partition(".")[0] in modules), "")


def missing_package(module: str, verb: str = "") -> str:
    """Say in one line what to install for a missing module; for verbs that measure, all that a sweep needs."""
    name, extra = module.partition(".")[0], find_extra(module)
    if extra in ("predict", "sweep", "deepspeed") and verb in MEASURING:
        extra = "all"
    root = Path(__file__).resolve().parents[2]
    editable = (root / "pyproject.toml").is_file()  # a checkout: `harness` is at its top
    what = shlex.quote((str(root) if editable else "vramsweep") + (f"[{extra}]" if extra else ""))
    kept = ", which keeps an installed torch" if extra in ("predict", "sweep", "all") else ""
    return f"{name} is not installed; {sys.executable} -m pip install {'-e ' * editable}{what}{kept}"
