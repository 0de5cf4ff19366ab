"""What code of earlier versions did, put in place of the installed code while a run is traced (harness/differences.py).

A module a part of the code; each function takes the trial and is a context manager.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from vramsweep.harness import differences
from vramsweep.harness.trial import Trial


@contextlib.contextmanager
def applied(trial: Trial) -> Iterator[list[str]]:
    """All differences that hold for the trial, until the context is left; their names."""
    found = differences.holding(trial)
    with contextlib.ExitStack() as stack:
        for one in found:
            module, function = one.place
            place = importlib.import_module(f"{__name__}.{module}")
            stack.enter_context(getattr(place, function)(trial))
        yield [one.name for one in found]
