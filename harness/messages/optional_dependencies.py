"""What a light install leaves out: which extra of pyproject.toml brings a module that was not found.

Not covered: packages of single techniques, which say themselves what they need (spec/techniques/schema.py).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

# The modules of each extra that are imported, by the name that an import says.
EXTRAS: dict[str, tuple[str, ...]] = {
    "predict": ("torch", "transformers", "accelerate", "hydra", "omegaconf"),
    "sweep": ("pynvml", "submitit"),
    "deepspeed": ("deepspeed",),
    "png": ("py_mini_racer", "vl_convert"),
    "data": ("datasets",),
    "techniques": ("peft", "bitsandbytes", "torchao", "liger_kernel"),
    "scripts": ("lightning", "trl"),
}
MEASURING = ("sweep", "run")  # verbs that all of a sweep's packages are for


def missing_package(module: str, verb: str = "") -> str:
    """What to install where a module was not found, in one line; the whole of a sweep's for verbs that measure."""
    name = module.partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if name in modules), "")
    if extra in ("predict", "sweep", "deepspeed") and verb in MEASURING:
        extra = "all"
    root = Path(__file__).resolve().parents[2]
    editable = (root / "pyproject.toml").is_file()  # a checkout: `harness` is at its top
    what = shlex.quote((str(root) if editable else "vramsweep") + (f"[{extra}]" if extra else ""))
    kept = ", which keeps an installed torch" if extra in ("predict", "sweep", "all") else ""
    return f"{name} is not installed; {sys.executable} -m pip install {'-e ' * editable}{what}{kept}"
