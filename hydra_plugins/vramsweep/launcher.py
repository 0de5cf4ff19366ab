"""The thin Hydra side: composes the grid once, and hands all trials to the task (harness/config/compose.py) in a batch.

Hydra composes every job twice, for 57 ms each: minutes for thousands of trials. Here a configuration is composed once
for each combination of options of config groups. Plain values are then set on copies of it with Hydra's own function.
Lengths and batches may be thousands, so they are set after a configuration is resolved, if nothing in it refers to
them.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from vramsweep.harness.messages.console import Activity
from vramsweep.harness.messages.errors import UserError

if TYPE_CHECKING:
    from vramsweep.harness.config.compose import HydraTask, Job

FREE = ("seq_len", "micro_batch")
# Interpolations that read only a setting next to them, or what our own resolvers read (ds_config, world_size).
OURS = re.compile(r"\$\{(\.\w+|vramsweep\.\w+:(\$\{oc\.select:runner\.target,null\}|[^${}]*))\}")


@dataclass
class LauncherConf:
    """Settings of hydra/launcher=vramsweep."""

    _target_: str = "hydra_plugins.vramsweep.launcher.VramsweepLauncher"


@dataclass
class SweeperConf:
    """Settings of hydra/sweeper=vramsweep: Hydra's basic sweeper without its own composing of every job."""

    _target_: str = "hydra_plugins.vramsweep.launcher.VramsweepSweeper"
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None


ConfigStore.instance().store(group="hydra/launcher", name="vramsweep", node=LauncherConf, provider="vramsweep")
ConfigStore.instance().store(group="hydra/sweeper", name="vramsweep", node=SweeperConf, provider="vramsweep")


class VramsweepSweeper(BasicSweeper):
    """Hydra's basic sweeper; the launcher composes, and so checks, each combination before anything is started.

    It leaves no multirun.yaml, which would say where the user's folders are, and otherwise no more than the rows do.
    """

    def sweep(self, arguments: list[str]) -> Any:
        """Launch all combinations, in one batch or in those of max_batch_size; return what the launcher returns."""
        assert self.hydra_context is not None
        assert self.launcher is not None
        words = [*self._parse_config(), *arguments]
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        self.overrides = self.split_arguments(parser.parse_overrides(words), self.max_batch_size)
        returns, index = [], 0
        while not self.is_done():
            batch = self.get_job_batch()
            returns.append(self.launcher.launch(batch, initial_job_idx=index))
            index += len(batch)
        return returns


class VramsweepLauncher(Launcher):
    """The launcher that composes a batch of jobs and hands it to the task; each job returns the task's answer."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the sweeper's folder; Hydra calls this before `launch`. Raises UserError if it cannot be made."""
        self.context, self.config, self.task = hydra_context, config, cast("HydraTask", task_function)
        folder = Path(config.hydra.sweep.dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            where = f"cannot write {folder.parent}: {error.strerror}"
            raise UserError(f"{where}; choose a writable folder with results=DIR") from None

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all jobs; a failed trial is a row, not an exception, so that the batch always completes."""
        with Activity(f"reading the settings of {len(job_overrides):,} trials"):
            jobs = self.compose(job_overrides)
        sweeper = self.config.hydra.sweeper  # any other, and ours with a batch size, calls again
        whole = sweeper._target_ == SweeperConf._target_ and sweeper.max_batch_size is None
        answers = self.task.take(jobs, whole)
        return [
            JobReturn(overrides=list(overrides), cfg=config, status=JobStatus.COMPLETED, _return_value=answer)
            for overrides, (config, _), answer in zip(job_overrides, jobs, answers, strict=True)
        ]

    def compose(self, job_overrides: Sequence[Sequence[str]]) -> "list[Job]":
        """Compose each job's configuration, without the `hydra` node. Raises Hydra's errors for unknown keys."""
        loader = self.context.config_loader
        parser = OverridesParser.create(config_loader=loader)
        parsed = {text: parser.parse_override(text) for text in {t for overrides in job_overrides for t in overrides}}
        keys = {text: override.key_or_group for text, override in parsed.items()}
        groups = {key for key in set(keys.values()) if loader.list_groups(key) or loader.get_group_options(key)}
        changing = {t for t, o in parsed.items() if o.is_add() or o.is_delete() or o.is_hydra_override()}
        plain = {text for text in parsed.keys() - changing if keys[text] not in groups}
        free = {text: value for text in plain if keys[text] in FREE and type(value := parsed[text].value()) is int}
        rests = [tuple(text for text in overrides if text not in plain) for overrides in job_overrides]
        composed = {rest: self._load(rest) for rest in dict.fromkeys(rests)}
        changed: dict[tuple[str, ...], tuple[DictConfig, set[str]]] = {}
        jobs = []
        for overrides, rest in zip(job_overrides, rests, strict=True):
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

    def _load(self, words: Sequence[str]) -> DictConfig:
        """Return a configuration as Hydra composes it, without the `hydra` node."""
        config = self.context.config_loader.load_sweep_config(self.config, list(words))
        with open_dict(config):
            del config["hydra"]
        return config


def _referred(config: DictConfig) -> set[str]:
    """Return the keys of `FREE` that something else in the configuration may refer to, or that are not in it."""

    def texts(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            for value in node.values():
                yield from texts(value)
        elif isinstance(node, list):
            for value in node:
                yield from texts(value)
        elif isinstance(node, str) and "${" in node:
            yield node

    values = OmegaConf.to_container(config, resolve=False)  # as they are written, interpolations included
    assert isinstance(values, dict)
    found: set[str] = set()
    for key in FREE:
        others = [text for name, value in values.items() if name != key for text in texts(value)]
        if key not in values or any(key in text or not OURS.fullmatch(text) for text in others):
            found.add(key)
    return found
