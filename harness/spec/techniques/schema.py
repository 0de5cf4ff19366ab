"""What an axis, a technique and an optional package are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

Rule = Callable[["Trial"], Iterator[str]]  # yields what speaks against the trial; the first reason is what is said


@dataclass(frozen=True)
class Axis:
    """A setting of a trial, a column of its row. `default` is what ids leave out, so it never changes.

    `of` names the axis, and its values, to which this one belongs: elsewhere only the default is allowed.
    """

    name: str
    kind: type
    default: Any
    meaning: str
    of: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class Package:
    """An optional package that a measured run imports; a prediction does without."""

    name: str
    least: str

    def missing(self) -> str | None:
        """What is wrong with what is installed; None if it will do."""
        found = version(self.name)
        if found is not None and numbers(found) >= numbers(self.least):
            return None
        have = "which is not installed" if found is None else f"at least {self.least}, and {found} is installed"
        return f"{self.name}, {have}: pip install '{self.name}>={self.least}'"


# What `proven` says: within 0.2 % of the predicted peak allocated there, and of reserved within 1 % or as it says.
H100 = "H100, torch 2.11 (docs/h100.md)"
H200 = "H200, torch 2.11 (docs/h200.md)"


@dataclass(frozen=True)
class Technique:
    """One value of an axis.

    `module` applies it (runners/model/apply_techniques.py says how). `packages` are what measuring needs, `preload` the
    modules that a template imports for it, `capability` the least CUDA compute capability, measured or simulated.
    `runners` and `shardings` are those that it works with (None: all); a user's code applies what it wants itself.
    `excludes` are values of other settings that do not go with it, each with the reason and the way out: (setting,
    values, text). `optim` is its name in TrainingArguments.

    `checked` says how the tests check it: "cpu" (trains real steps there), "simulated" (the size of the predicted
    effect), "gpu" (a test that needs a card). `proven` is on what card it was seen to behave as predicted, and where
    that is recorded; None is shown as unproven. `source` is where its behaviour is documented.
    """

    axis: str
    name: Any
    meaning: str
    module: str | None = None
    packages: tuple[Package, ...] = ()
    preload: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    runners: tuple[str, ...] | None = None
    shardings: tuple[str, ...] | None = None
    excludes: tuple[tuple[str, tuple[Any, ...], str], ...] = ()
    rules: tuple[Rule, ...] = ()
    optim: str | None = None
    checked: tuple[str, ...] = ()
    proven: str | None = None
    source: str = ""

    def __str__(self) -> str:
        return f"{self.axis}={text(self.name)}"


def text(value: Any) -> str:
    """A value as it is typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def version(package: str) -> str | None:
    """The installed version of a package, None if it is not there."""
    from importlib import metadata  # which takes as long as all else that a refusal needs

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """A version's numbers, to compare it by."""
    parts = text.split("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())
