"""The types of the tables here: an axis, a technique and an optional package; and the reader of the tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramsweep.harness.spec import shardings
from vramsweep.harness.spec.shardings import tuples

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

Rule = Callable[["Trial"], Iterator[str]]  # yields reasons against the trial; the first one is shown


@dataclass(frozen=True)
class Axis:
    """A setting of a trial, a column of its row. `default` is what ids leave out, so it never changes.

    `of` names another axis, and the values of it with which this one has a meaning; else only the default is allowed.
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
        """Return what is wrong with the installed version; None if it will do."""
        from packaging.version import Version  # a script's environment may lack it

        found = version(self.name)
        if found is not None and Version(found).release >= Version(self.least).release:
            return None
        have = "which is not installed" if found is None else f"at least {self.least}, and {found} is installed"
        return f"{self.name}, {have}: pip install '{self.name}>={self.least}'"


# Meaning of `proven`: peak allocated was within 0.2 % of its prediction there, reserved within 1 % or as it says.
_PROVEN = {"H100": "H100, torch 2.11 (docs/h100.md)", "H200": "H200, torch 2.11 (docs/h200.md)"}


@dataclass(frozen=True)
class Technique:
    """One value of an axis.

    `module` applies it (runners/model/apply_techniques.py says how). `packages` are what measuring needs. `preload` are
    the modules that a fork server imports for it. `capability` is the least CUDA compute capability, measured or
    simulated. `runners` and `shardings` are those that it works with (None: all); a user's code applies techniques
    itself. `excludes` are values of other settings that do not go with it: (setting, values, text), where the text has
    the reason and the way out. `optim` is its name in TrainingArguments.

    `checked` says how the tests check it: "cpu" (trains real steps there), "simulated" (the size of the predicted
    effect), "gpu" (a test that needs a GPU). `proven` is the GPU on which it behaved as predicted, and the page that
    records it; None is shown as unproven. `source` is where its behaviour is documented.
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


def read_table(name: str, rules: Mapping[str, Rule]) -> tuple[tuple[Axis, ...], tuple[Technique, ...]]:
    """Return the axes and the techniques of a JSON file of this folder; its entries name rules, of the file or of
    `rules`. A rule of the file refuses trials with one of the values of each setting (or with another one, after a !).

    An exclusion of several techniques stands in `shared`, and the techniques give its name, a text. Where names of
    shardings are expected, a text names a constant of shardings.py.
    """
    read = json.loads(Path(__file__).with_name(name).read_text("utf-8"))
    kinds = {kind.__name__: kind for kind in (int, float, str, bool)}
    axes = (Axis(**axis | {"kind": kinds[axis["kind"]], "of": tuples(axis.get("of"))}) for axis in read["axes"])
    known = {**rules, **{name: _make_rule(*rule) for name, rule in read.get("rules", {}).items()}}
    return tuple(axes), tuple(_read_technique(entry, read.get("shared", {}), known) for entry in read["techniques"])


def _make_rule(refused: dict[str, list[Any]], why: str) -> Rule:
    def rule(trial: Trial) -> Iterator[str]:
        if all((value_of(trial, name.rstrip("!")) in of) != name.endswith("!") for name, of in refused.items()):
            yield why.format(trial=trial)

    return rule


def value_of(trial: Trial, setting: str) -> Any:
    """Return a trial's value of a setting; of a node (runner, device), its name."""
    value = getattr(trial, setting)
    return getattr(value, "name", value)


def _read_technique(entry: dict[str, Any], shared: dict[str, Any], rules: Mapping[str, Rule]) -> Technique:
    excludes = (shared[one] if isinstance(one, str) else one for one in entry.pop("excludes", ()))
    return Technique(
        packages=tuple(Package(*package.split(">=")) for package in entry.pop("packages", ())),
        shardings=_constant(entry.pop("shardings", None)),
        excludes=tuple((setting, _constant(values), why) for setting, values, why in excludes),
        rules=tuple(rules[rule] for rule in entry.pop("rules", ())),
        proven=_PROVEN[entry.pop("proven")] if "proven" in entry else None,
        **{field: tuples(value) for field, value in entry.items()},
    )


def _constant(values: Any) -> Any:
    return getattr(shardings, values) if isinstance(values, str) else tuples(values)


def text(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    from importlib import metadata  # it takes as long as all else that a refusal needs

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
