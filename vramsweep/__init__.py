"""vramsweep: how much GPU memory a training run takes, how fast it is, and which settings to pick.

The four packages live at the top of the repository and are linked here, so that what is installed has one name of its
own and collides with nobody's `analysis/` or `conf/`. In a checkout `harness`, `runners` and `analysis` are other names
for the same modules (alias.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vramsweep.runners.callback import TrainerCallback
    from vramsweep.runners.watching import Watch as watch

__all__ = ["TrainerCallback", "__version__", "watch"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """What a training script takes from here; it is imported only then, as torch is."""
    if name == "watch":
        from vramsweep.runners.watching import Watch

        return Watch
    if name == "TrainerCallback":
        from vramsweep.runners.callback import TrainerCallback

        return TrainerCallback
    raise AttributeError(f"module 'vramsweep' has no attribute {name!r}")
