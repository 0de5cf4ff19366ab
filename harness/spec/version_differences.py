"""Known differences of earlier versions of packages, by which a simulated run is predicted as it really ran.

A simulated run traces the installed code, but `versions` may name other versions. An entry applies if its range
contains the named version, but not the installed one. It then changes the trace as upstream's code of that version did
(runners/trace/version_patches/). Each entry was found by reading that code and cites it; none is a setting. Those of
transformers are tensors of a model that its code made, kept or copied. Behaviour that is not listed here is predicted
as that of the installed version.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vramsweep.harness.files import plain_json
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.shardings import ZERO
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial

When = Callable[[Trial], bool]


@dataclass(frozen=True)
class Difference:
    """One known difference of an earlier version of a package.

    `versions` is the range of `package` that it holds for. `source` is where upstream's code is, in that version and in
    the one that ended it. `place` is the module of runners/trace/version_patches and the function in it, whose
    replacements are active while a run is traced. `models` are the types of models whose code it is; if empty, any.
    `when` says which trials may meet that code at all.
    """

    name: str
    package: str
    versions: str
    source: str
    meaning: str
    place: tuple[str, str]
    models: tuple[str, ...]
    when: When


def uses_sdpa(trial: Trial) -> bool:
    """Return whether a trial uses torch's attention, whichever of its kernels is chosen."""
    return trial.attention.startswith("sdpa")


def model_type(trial: Trial) -> str | None:
    """Return the type of a model that we ship or that a local directory describes; None if only a hub knows it."""
    found = trial.model.model_type
    if found is None and trial.model.path is not None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no such file, or no such description in it
            found = plain_json.read((Path(trial.model.path) / "config.json").read_bytes()).get("model_type")
    return found


def _cache(trial: Trial) -> bool:
    """Return whether the cache is on; versions before 5.0 leave it on under the Trainer."""
    return trial.use_cache == "on" or (trial.use_cache == "default" and trial.runner.name == "trainer")


def _checkpointed(trial: Trial) -> bool:
    return trial.checkpointing != "none"


def _kept_cache(trial: Trial) -> bool:
    return _cache(trial) and not _checkpointed(trial)


def _maskless(trial: Trial) -> bool:
    """Return whether attention gets no mask; the Trainer gives a padding mask or a cache."""
    masked = trial.padding != 0 or trial.runner.name == "trainer" or _kept_cache(trial)
    return trial.attention != "flash_attention_2" and not masked


LIKE_LLAMA = ("llama", "qwen2", "mistral", "mixtral", "gemma", "gemma2", "phi", "phi3")
"""Models whose code in transformers follows Llama's."""

# Conditions of an entry on a trial, next to its model.
_WHEN: dict[str, When] = {
    "": lambda trial: True,
    "zero3": lambda trial: trial.sharding == "zero3",
    "zero_half": lambda trial: trial.sharding in ZERO and trial.precision in ("bf16", "fp16"),
    "sdpa": uses_sdpa,
    "eager": lambda trial: trial.attention == "eager",
    "no_mask": _maskless,
    "user_code": lambda trial: trial.runner.name in runner_table.USER_CODE,
    "loss": lambda trial: trial.loss == "default",
    "checkpointed": _checkpointed,
    "kept_cache": _kept_cache,
    "checkpointed_cache": lambda trial: _cache(trial) and _checkpointed(trial),
    "default_cache": lambda trial: trial.use_cache == "default" and _kept_cache(trial),
}


def _read(line: str) -> Difference:
    """Return the difference in a line of version_differences.tsv; if it names no model, it holds for any.
    Conditions are not asked of the user's code, which reaches what is replaced or does not."""
    name, package, versions, named, condition, place, source, meaning = line.split("\t")
    models, when = tuple(named.replace("like_llama", " ".join(LIKE_LLAMA)).split()), _WHEN[condition]
    module, function = place.split(".")

    def meets(trial: Trial) -> bool:
        theirs = trial.runner.name in runner_table.USER_CODE
        fits = not models or theirs or model_type(trial) in (None, *models)
        return fits and (when(trial) or (theirs and package != "deepspeed"))

    return Difference(name, package, versions, source, meaning, (module, function), models, meets)


_LINES = Path(__file__).with_name("version_differences.tsv").read_text("utf-8").splitlines()[1:]
DIFFERENCES = tuple(map(_read, _LINES))
_BY_NAME = {one.name: one for one in DIFFERENCES}


def find_differences(trial: Trial) -> list[Difference]:
    """Return the known differences between the versions that a simulated trial names and the installed ones."""
    named = [one for one in DIFFERENCES if one.package in trial.versions and one.when(trial)]
    asked = [one for one in named if _within(one.versions, trial.versions[one.package])]
    return [one for one in asked if not installed_has(one.name)]


def installed_has(name: str) -> bool:
    """Return whether the installed version is one that this known difference holds for; False if none is installed."""
    version = catalog.version(_BY_NAME[name].package)
    return version is not None and _within(_BY_NAME[name].versions, version)


def _within(versions: str, version: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def rule(trial: Trial) -> Iterator[str]:
    """Yield why the trial's `versions` cannot be followed."""
    if not trial.versions:
        return
    known = sorted({one.package for one in DIFFERENCES})
    if trial.device.name != "simulated":
        yield "versions can only be predicted; leave them out, or use device=simulated"
    for package, version in trial.versions.items():
        if package not in known:
            yield f"versions.{package}: no differences of its versions are known, only those of {', '.join(known)}"
        try:
            asked = Version(version)
        except InvalidVersion:
            yield f"versions.{package}={version} is not a version; write it like 0.14.2"
            continue
        installed = catalog.version(package)
        # "+cu130" and "+cpu" are builds of one version
        if installed is not None and Version(asked.public) > Version(Version(installed).public):
            yield (
                f"versions.{package}={version} is later than {installed}, which is installed and traced; "
                "install the later one and leave versions out"
            )
