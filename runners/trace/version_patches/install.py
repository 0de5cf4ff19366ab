"""Replaces installed code by what earlier versions did, while a run is traced (harness/spec/version_differences.py).

Each module next to this one has one part of the code; each function takes the trial and yields its replacements.
"""

import contextlib
import importlib
from collections.abc import Iterator

from vramsweep.harness.spec import version_differences
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import patched


@contextlib.contextmanager
def applied(trial: Trial) -> Iterator[list[str]]:
    """Apply all differences that hold for the trial, until the context is left; yield their names."""
    found = version_differences.find_differences(trial)
    with contextlib.ExitStack() as stack:
        for one in found:
            module, function = one.place
            place = importlib.import_module(f"{__package__}.{module}")
            stack.enter_context(patched(getattr(place, function)(trial)))  # may replace what an earlier one put there
        yield [one.name for one in found]
