"""The thin Hydra side: compose the grid once, hand all trials to harness.launch in one batch.

Hydra composes every job twice, for 57 ms each: minutes for thousands of trials. Here a configuration is composed once
for each combination of config groups; plain values are then set on copies of it with Hydra's own function. Lengths and
batches, of which there may be thousands, are set after a configuration is resolved, where nothing in it refers to them.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from vramsweep.harness import launch
from vramsweep.harness.errors import UserError
from vramsweep.harness.launch import Job

FREE = ("seq_len", "micro_batch")
# Interpolations that read no more than a setting beside them, or what our own resolvers do (ds_config, world_size).
OURS = re.compile(r"\$\{(\.\w+|vramsweep\.\w+:(\$\{oc\.select:runner\.target,null\}|[^${}]*))\}")


@dataclass
class LauncherConf:
    """hydra/launcher=vramsweep"""

    _target_: str = "hydra_plugins.vramsweep.launcher.VramsweepLauncher"


@dataclass
class SweeperConf:
    """hydra/sweeper=vramsweep: Hydra's basic sweeper without its own composing of every job."""

    _target_: str = "hydra_plugins.vramsweep.launcher.VramsweepSweeper"
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None


ConfigStore.instance().store(group="hydra/launcher", name="vramsweep", node=LauncherConf, provider="vramsweep")
ConfigStore.instance().store(group="hydra/sweeper", name="vramsweep", node=SweeperConf, provider="vramsweep")


class VramsweepSweeper(BasicSweeper):
    """The basic sweeper; the launcher composes, and so checks, each combination before anything is started."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: see the class."""


class VramsweepLauncher(Launcher):
    """Composes a batch of jobs and runs it as one sweep; each job returns what `launch.launch` says of it."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Hydra's call before `launch`. Raises UserError if the folder that the sweeper writes to cannot be made."""
        self.context, self.config = hydra_context, config
        folder = Path(config.hydra.sweep.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = f"cannot write {folder.parent}: {error.strerror}"
            raise UserError(f"{where}; choose a writable folder with results=DIR") from None

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; a failed trial is a row, not an exception, so that the batch always completes."""
        jobs = self.compose(job_overrides)
        sweeper = self.config.hydra.sweeper  # any other, and ours with a batch size, comes again
        whole = sweeper._target_ == SweeperConf._target_ and sweeper.max_batch_size is None
        answers = launch.launch(jobs, whole)
        return [
            JobReturn(overrides=list(overrides), cfg=config, status=JobStatus.COMPLETED, _return_value=answer)
            for overrides, (config, _), answer in zip(job_overrides, jobs, answers, strict=True)
        ]

    def compose(self, job_overrides: Sequence[Sequence[str]]) -> list[Job]:
        """Each job's configuration, without the `hydra` node. Raises Hydra's errors for unknown keys."""
        loader = self.context.config_loader
        parser = OverridesParser.create(config_loader=loader)
        parsed = {text: parser.parse_override(text) for text in {t for overrides in job_overrides for t in overrides}}
        keys = {text: override.key_or_group for text, override in parsed.items()}
        groups = {key for key in keys.values() if loader.list_groups(key) or loader.get_group_options(key)}
        plain = {text for text, override in parsed.items() if _plain(override) and keys[text] not in groups}
        free = {text: value for text in plain if keys[text] in FREE and type(value := parsed[text].value()) is int}
        composed: dict[tuple[str, ...], DictConfig] = {}
        changed: dict[tuple[str, ...], tuple[DictConfig, set[str]]] = {}
        jobs = []
        for overrides in job_overrides:
            rest = tuple(text for text in overrides if text not in plain)
            if rest not in composed:
                config = loader.load_sweep_config(self.config, list(rest))
                with open_dict(config):
                    del config["hydra"]
                composed[rest] = config
            fixed = tuple(text for text in overrides if text not in free)
            if fixed not in changed:
                config = copy.deepcopy(composed[rest])
                ConfigLoaderImpl._apply_overrides_to_config([parsed[t] for t in fixed if t in plain], config)
                changed[fixed] = config, _referred(config)
            config, referred = changed[fixed]
            point = {keys[text]: free[text] for text in overrides if text in free}
            if referred & point.keys():
                config, point = copy.deepcopy(config), {}
                ConfigLoaderImpl._apply_overrides_to_config([parsed[t] for t in overrides if t in free], config)
            jobs.append((config, point))
        return jobs


def _referred(config: DictConfig) -> set[str]:
    """Of `FREE`, the keys that something else in the configuration may refer to, or that are not in it."""

    def texts(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for value in node.values():
                yield from texts(value)
        elif isinstance(node, list):
            for value in node:
                yield from texts(value)
        elif isinstance(node, str) and "${" in node:
            yield node

    values = OmegaConf.to_container(config, resolve=False)
    assert isinstance(values, dict)
    found: set[str] = set()
    for key in FREE:
        others = [text for name, value in values.items() if name != key for text in texts(value)]
        if key not in values or any(key in text or not OURS.fullmatch(text) for text in others):
            found.add(key)
    return found


def _plain(override: Override) -> bool:
    """Whether it sets a value: "+" and "~" change how a configuration composes."""
    return not (override.is_add() or override.is_delete() or override.is_hydra_override())
