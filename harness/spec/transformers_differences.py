"""Known differences of earlier versions of transformers: tensors of a model that their code made, kept or copied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vramsweep.harness.files import plain_json
from vramsweep.harness.spec import runner_table

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial

When = Callable[["Trial"], bool]


@dataclass(frozen=True)
class Difference:
    """One known difference of an earlier version of a package.

    `versions` is the range of `package` that it holds for. `source` is where upstream's code is, in that version and in
    the one that ended it. `place` is the module of runners/trace/version_patches and the function in it, whose
    replacements are active while a run is traced. `when` says which trials meet that code at all.
    """

    name: str
    package: str
    versions: str
    source: str
    meaning: str
    place: tuple[str, str]
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


def _with_loss(trial: Trial) -> bool:
    return trial.runner.name not in runner_table.TARGETED and trial.loss == "default"


def _maskless(trial: Trial) -> bool:
    """Return whether attention gets no mask; the Trainer gives a padding mask or a cache."""
    masked = trial.padding != 0 or trial.runner.name == "trainer" or _kept_cache(trial)
    return trial.attention != "flash_attention_2" and not masked


LIKE_LLAMA = ("llama", "qwen2", "mistral", "mixtral", "gemma", "gemma2", "phi", "phi3")
"""Models whose code in transformers follows Llama's."""

# Conditions of an entry on a trial, next to its model.
_WHEN: dict[str, When] = {
    "": lambda trial: True,
    "sdpa": uses_sdpa,
    "eager": lambda trial: trial.attention == "eager",
    "no_mask": _maskless,
    "loss": _with_loss,
    "checkpointed": _checkpointed,
    "kept_cache": _kept_cache,
    "checkpointed_cache": lambda trial: _cache(trial) and _checkpointed(trial),
    "default_cache": lambda trial: trial.use_cache == "default" and _kept_cache(trial),
}


def _read(line: str) -> Difference:
    """Return the difference in a line of transformers_differences.tsv; if it names no model, it holds for any."""
    name, versions, named, condition, place, source, meaning = line.split("\t")
    models, when = named.replace("like_llama", " ".join(LIKE_LLAMA)).split(), _WHEN[condition]
    module, function = place.split(".")

    def meets(trial: Trial) -> bool:
        return (not models or model_type(trial) in models) and when(trial)

    return Difference(name, "transformers", versions, source, meaning, (module, function), meets)


_LINES = Path(__file__).with_name("transformers_differences.tsv").read_text("utf-8").splitlines()[1:]
TRANSFORMERS = tuple(map(_read, _LINES))
