"""vramsweep: how much GPU memory a training run takes, how fast it is, and which settings to pick.

For notebooks: `load`, `predict`, `fit`, `frontier`, `compare`, `figure`, `report`, `gib`, `units` (docs/notebook.md);
for training scripts: `watch`, `TrainerCallback`. Each is imported when it is first used, so that importing this costs
nothing and needs neither torch nor pandas.

The four packages live at the top of the repository and are linked here, so that what is installed has one name of its
own and collides with nobody's `analysis/` or `conf/`. In a checkout `harness`, `runners` and `analysis` are other names
for the same modules (alias.py).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vramsweep.analysis.notebook import compare, figure, fit, frontier, gib, load, predict, report, units
    from vramsweep.harness.errors import UserError
    from vramsweep.runners.callback import TrainerCallback
    from vramsweep.runners.watching import Watch as watch

__all__ = [
    "TrainerCallback",
    "UserError",
    "__version__",
    "compare",
    "figure",
    "fit",
    "frontier",
    "gib",
    "load",
    "predict",
    "report",
    "units",
    "watch",
]
__version__ = "0.2.0"

_FROM = {  # module and name there
    "TrainerCallback": ("vramsweep.runners.callback", "TrainerCallback"),
    "UserError": ("vramsweep.harness.errors", "UserError"),
    "watch": ("vramsweep.runners.watching", "Watch"),
    **{
        name: ("vramsweep.analysis.notebook", name)
        for name in ("compare", "figure", "fit", "frontier", "gib", "load", "predict", "report", "units")
    },
}


def __getattr__(name: str) -> Any:
    """What is asked for, imported only then."""
    if name not in _FROM:
        raise AttributeError(f"module 'vramsweep' has no attribute {name!r}")
    module, attribute = _FROM[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
