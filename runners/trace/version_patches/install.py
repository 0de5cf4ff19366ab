"""Replaces installed code by what earlier versions did, while a run is traced (harness/spec/version_differences.py).

Each module next to this one has one part of the code; each function takes the trial and yields its replacements.
"""

import contextlib
import functools
import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.harness.spec import runner_table, version_differences
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.measure.patches import Replacement, patched


@contextlib.contextmanager
def applied(trial: Trial, leave_out: Callable[[str, str], object] = lambda *_: None) -> Iterator[dict[str, None]]:
    """Apply the differences that hold for a trial, until the context is left; yield the names of those used so far.

    Where only the user's code or a hub knows the model, they are applied for every type of model, and used where one
    of it runs. `leave_out` gets each type of model that is made and whose earlier code nobody has compared.
    """
    used: dict[str, None] = {}
    theirs = trial.runner.name in runner_table.USER_CODE
    own = None if theirs else version_differences.model_type(trial)
    if theirs and "deepspeed" in trial.versions and trial.sharding == "none":
        leave_out("earlier_versions", "deepspeed")
    with contextlib.ExitStack() as stack:
        with _disable_current_modes():  # imports may make tensors
            for one in version_differences.find_differences(trial):
                place = importlib.import_module(f"{__package__}.{one.place[0]}")
                note = functools.partial(used.setdefault, one.name)
                for kind in [kind for kind in one.models if own in (None, kind)] or (None,):
                    model = trial.model.model_copy(update={"model_type": kind or own})
                    replaced = getattr(place, one.place[1])(trial.model_copy(update={"model": model}))
                    made = [(owner, key, _noted(owner, key, value, note, kind)) for owner, key, value in replaced]
                    stack.enter_context(patched(made))  # may replace what an earlier one put there
            if "transformers" in trial.versions:
                stack.enter_context(patched([_unread(leave_out)]))
        yield used


def _unread(leave_out: Callable[[str, str], object]) -> Replacement:
    from transformers import PreTrainedModel

    read = {"", *(kind for one in version_differences.DIFFERENCES for kind in one.models)}
    original = PreTrainedModel.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if (kind := _kind(type(self).__module__)) not in read:
            leave_out("earlier_versions", kind)
        original(self, *args, **kwargs)

    return PreTrainedModel, "__init__", init


def _noted(owner: Any, key: Any, value: Any, note: Callable[[], Any], kind: str | None) -> Any:
    """Return the stand-in, which notes when it is called, set as a property, or read if it is true or false; others are
    noted now. Of what models share, models of other types than `kind` get the original."""
    if callable(value):
        original = owner[key] if isinstance(owner, dict) else getattr(owner, key)
        shared = kind and not _kind(getattr(owner, "__module__", "") or getattr(owner, "__name__", ""))

        @functools.wraps(original)  # the Trainer looks at its parameters
        def stand_in(*given: Any, **named: Any) -> Any:
            if shared and _running() != kind:
                return original(*given, **named)
            note()
            return value(*given, **named)

        return stand_in
    if isinstance(value, bool):  # read after the conditions that it depends on
        return type("Noted", (), {"__bool__": lambda _: note() or value})()
    if isinstance(value, property):
        return property(value.fget, lambda *_: note())
    note()
    return value


def _kind(module: str) -> str:
    """Return the type of model whose code in transformers a module is; "" if it is of none."""
    words = module.split(".")
    return words[2] if words[:2] == ["transformers", "models"] and words[2] != "auto" else ""


def _running() -> str:
    """Return the type of the innermost model of transformers whose code is running."""
    frames = traceback.walk_stack(sys._getframe())
    return next(filter(None, (_kind(frame.f_globals.get("__name__", "")) for frame, _ in frames)), "")
