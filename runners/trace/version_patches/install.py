"""What code of earlier versions did, put in place of the installed code while a run is traced
(harness/spec/version_differences.py).

A module a part of the code; each function takes the trial and yields what it replaces.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from vramsweep.harness.spec import version_differences
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import patched


@contextlib.contextmanager
def applied(trial: Trial) -> Iterator[list[str]]:
    """All differences that hold for the trial, until the context is left; their names."""
    found = version_differences.find_differences(trial)
    with contextlib.ExitStack() as stack:
        for one in found:
            module, function = one.place
            place = importlib.import_module(f"{__package__}.{module}")
            stack.enter_context(patched(getattr(place, function)(trial)))  # what is there by now, earlier ones' too
        yield [one.name for one in found]
