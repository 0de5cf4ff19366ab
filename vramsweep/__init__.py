"""vramsweep: how much GPU memory a training run takes, how fast it is, and which settings to pick.

For notebooks: `load`, `predict`, `fit`, `frontier`, `compare`, `figure`, `report`, `gib`, `units` (docs/notebook.md);
for training scripts: `estimate`, `watch`, `TrainerCallback`; for custom targets: `Trial`. Each is imported when it is
first used, so that importing this costs nothing and needs neither torch nor pandas.

The four packages live at the top of the repository and are linked here, so the installed package has one name of its
own. It collides with nobody's `analysis/` or `conf/`. Modules are imported as `vramsweep.harness...`, by no other name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vramsweep.version import __version__

if TYPE_CHECKING:
    from vramsweep.analysis.notebook import compare, figure, fit, frontier, gib, load, predict, report, units
    from vramsweep.harness.messages.errors import UserError
    from vramsweep.harness.spec.trial import Trial
    from vramsweep.runners.estimate.estimate import estimate
    from vramsweep.runners.scripts.trainer_callback import TrainerCallback
    from vramsweep.runners.scripts.watch import Watch as watch

__all__ = [
    "TrainerCallback", "Trial", "UserError", "__version__", "compare", "estimate", "figure", "fit", "frontier", "gib",
    "load", "predict", "report", "units", "watch",
]  # fmt: skip

_FROM = {  # the others are in the notebook's module
    "estimate": "vramsweep.runners.estimate.estimate",
    "TrainerCallback": "vramsweep.runners.scripts.trainer_callback",
    "Trial": "vramsweep.harness.spec.trial",
    "UserError": "vramsweep.harness.messages.errors",
    "watch": "vramsweep.runners.scripts.watch",
}


def __getattr__(name: str) -> Any:
    """Import the attribute and return it. Raises AttributeError for a name that is not public."""
    if name not in __all__:
        raise AttributeError(f"module 'vramsweep' has no attribute {name!r}")
    module = importlib.import_module(_FROM.get(name, "vramsweep.analysis.notebook"))
    return getattr(module, "Watch" if name == "watch" else name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
