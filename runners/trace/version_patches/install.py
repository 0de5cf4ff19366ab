"""Replaces installed code by what earlier versions did, while a run is traced (harness/spec/version_differences.py).

Each module next to this one has one part of the code; each function takes the trial and yields its replacements.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from vramsweep.harness.spec import version_differences
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import patched


@contextlib.contextmanager
def applied(trial: Trial) -> Iterator[dict[str, None]]:
    """Apply the differences that hold for a trial, until the context is left; yield the names of those used so far."""
    used: dict[str, None] = {}
    with contextlib.ExitStack() as stack:
        for one in version_differences.find_differences(trial):
            place = importlib.import_module(f"{__package__}.{one.place[0]}")
            note = functools.partial(used.setdefault, one.name)
            made = [(owner, key, _noted(value, note)) for owner, key, value in getattr(place, one.place[1])(trial)]
            stack.enter_context(patched(made))  # may replace what an earlier one put there
        yield used


def _noted(value: Any, note: Callable[[], object]) -> Any:
    """Return the stand-in, which notes when it is called, or read if it is true or false; others are noted now."""
    if callable(value):
        return functools.wraps(value)(lambda *given, **named: (note(), value(*given, **named))[1])
    if isinstance(value, bool):  # read after the conditions that it depends on
        return type("Noted", (), {"__bool__": lambda _: note() or value})()
    note()
    return value
