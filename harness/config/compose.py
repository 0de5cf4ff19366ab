"""Composition by Hydra: from the words of a command line to the configurations of its trials; presets, cases, sweepers.

Hydra calls a `HydraTask`, either once with all configurations (through hydra_plugins/vramsweep), or batch by batch.
All at once are only collected. Batches come from a sweeper that looks at results; the sweep's session answers them.
Configurations become plain values here, and the resolvers that conf/ refers to are here.
"""

import argparse
import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra.version
from hydra._internal.utils import _run_hydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from vramsweep.harness.config import conf_files, overrides, typed_words
from vramsweep.harness.config.conf_files import CONF
from vramsweep.harness.files import plain_json, redaction
from vramsweep.harness.machine import hub_models, machine
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.console import Activity
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import worker_environment
from vramsweep.harness.spec import command_template, deepspeed_config
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import plan
from vramsweep.harness.sweep.session import Answer, Session

Job = tuple[DictConfig, dict[str, int]]  # a configuration, which several jobs may share, and values to set in it
DEVICE = "vramsweep.device"  # the resolver that conf/config.yaml refers to


class HydraTask:
    """The task that Hydra calls with the configurations of one command line; `session` answers those in batches.

    `configs` are those that came at once; `of_cases`: they are a preset's; `mistake` is the error that ended Hydra.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.configs: list[dict[str, Any]] = []
        self.mistake: UserError | None = None
        self.of_cases = False

    def __call__(self, config: DictConfig) -> None:
        """Take the one configuration of a command line without -m: one trial is a sweep of one."""
        self.take([(config, {})])

    def take(self, jobs: Sequence[Job], whole: bool = True) -> list[Answer]:
        """Collect the command's `whole` configurations, or let the session answer one batch; return the answers.

        A UserError becomes SystemExit(2), because Hydra would bury it in a traceback. `compose` raises it again.
        """
        try:
            configs = self.plain_values(jobs)
            _look_at_models(configs)
            if not whole and self.of_cases:
                raise UserError("a sweeper that runs batches of trials needs a preset without cases")
            if not whole:
                with overrides.variable(overrides.FULL_ERROR, None):  # which workers must not inherit
                    return self.session.answer(configs)
            if not configs:
                raise UserError(plan.EMPTY)
            self.configs += configs
            return [None] * len(configs)
        except UserError as error:
            self.mistake = error
            raise SystemExit(2) from None

    def plain_values(self, jobs: Sequence[Job]) -> list[dict[str, Any]]:
        """Return each job's plain values. Raises UserError for a missing value and for a key that is not ours."""
        with overrides.variable(overrides.FULL_ERROR, None):
            resolved = {id(one): _resolved(one) for one in {id(config): config for config, _ in jobs}.values()}
        return [resolved[id(config)] | values for config, values in jobs]

    def detect(self) -> str:
        """Return the device that `auto` stands for on this machine; record in the session that `auto` was used."""
        self.session.detected = detect()
        return self.session.detected


def _look_at_models(configs: Sequence[Mapping[str, Any]]) -> None:
    """Set missing `max_positions` from config.json. Raises UserError for a missing model, except on a cluster."""
    here = [one for one in configs if (one.get("cluster") or {}).get("name", "none") == "none"]
    for path in {one["model"].get("path"): None for one in here if isinstance(one["model"], Mapping)}:
        if path and (missing := _describe_missing_model(str(path))):
            raise UserError(missing)
    for model in (one["model"] for one in here if isinstance(one["model"], dict)):
        if model.get("path") and model.get("max_positions") is None:
            model["max_positions"] = read_positions(str(model["path"]), model.get("config") or {})


def read_positions(path: str, given: Mapping[str, Any]) -> int | None:
    """Return the number of positions in a model's config.json, where keys of `given` win; None if it is unknown."""
    file = hub_models.find_config(path)
    config = {**((file and plain_json.read_object(file)) or {}), **given}
    found = config.get("max_position_embeddings", config.get("n_positions"))  # n_positions: as in GPT-2
    return found if type(found) is int and found > 0 else None


@cache
def _describe_missing_model(path: str) -> str | None:
    """Return a message if `path` is neither a folder with config.json nor in the hub, which is queried; else None."""
    with Activity(f"looking for {path}"):
        why = hub_models.find_problem(path)
    if why is None:
        return None
    tails = {hub_id.rpartition("/")[2]: name for hub_id, name in conf_files.hub_ids().items()}
    near = [f"model={tails[one]}" for one in suggestions.find_nearest(path.rpartition("/")[2], tails, most=2)]
    more = f"; built in, with a similar name: {', '.join(near)}" if near else ""
    return f"model.path={path}: {why}{';' * (why[-1] != '?')} give a folder with its config.json: model=./FOLDER{more}"


@cache
def detect() -> str:
    """Return the device that `device=auto` stands for on this machine: cuda or simulated."""
    return machine.choose_device(os.environ)[0]


def compose(argv: Sequence[str], verb: str, action: str, session: Session) -> list[dict[str, Any]]:
    """Return the configurations of a command line; none if the words only ask for help, or if they came in batches.

    The session has answered such batches. Raises UserError for a mistake, and whatever the session's answer raises.
    """
    args, parser = overrides.parse(argv, action, verb)
    if args.shell_completion:
        raise UserError("--shell-completion is for Hydra's programs; vramsweep COMMAND --help-all lists the settings")
    if args.experimental_rerun is not None:
        raise UserError("--experimental-rerun is for Hydra's single jobs; run the same command again to resume a sweep")
    given = [name for name in ("run", "multirun", "cfg", "info") if getattr(args, name)]
    if len(given) > 1:
        raise UserError(f"--{' and --'.join(given)} do not go together; give one of them")
    if args.resolve and not (args.cfg or args.help):
        raise UserError("--resolve needs --cfg job")
    hydra.version.setbase("1.3")
    task = HydraTask(session)
    OmegaConf.register_new_resolver(DEVICE, task.detect, replace=True)
    try:
        with overrides.explained(list(args.overrides)):
            if not (args.help or args.hydra_help):
                overrides.check(args)
                args.multirun |= not given and overrides.several_trials(args.overrides)
                args.overrides = _preset(args) + ([f"action={action}"] if action != "run" else [])
            cases, options = (
                ([], {}) if args.help or args.hydra_help or args.cfg or args.info else _cases(args, session)
            )
            if not cases:
                _run_hydra(args, parser, task, str(CONF), "config")
        task.of_cases = bool(cases)
        for case in cases:
            _compose_case(args, parser, case, options, task)
    except SystemExit as end:  # Hydra ends so after --help, and a task after a mistake
        if task.mistake is not None:
            raise task.mistake from None
        if end.code:
            raise
    finally:
        OmegaConf.register_new_resolver(DEVICE, detect, replace=True)
    return task.configs


def resolve(argv: Sequence[str], verb: str = "sweep", action: str = "resolve", suffix: str | None = None) -> Session:
    """Return a session with the trials that a command line names, their settings and their folder; run none of them.

    It has no trials if the words only ask for help. `suffix` ends the folder's name. Raises UserError.
    """
    session = Session(argv, suffix, verb=verb)
    if configs := compose(argv, verb, action, session):
        session.add(configs)
    return session


def _preset(args: argparse.Namespace) -> list[str]:
    """Return the overrides without `device=auto`, the default, and with `sweep=auto` replaced by the device's preset.

    A user's file that chooses a device replaces the default; it could not replace an override. Raises UserError for
    `sweep=auto` with several devices.
    """
    words = [word for word in args.overrides if word != "device=auto"]
    if "sweep=auto" not in words:
        return words
    rest = [word for word in words if word != "sweep=auto"]
    config = overrides.loader(args).load_configuration(
        args.config_name or "config", rest, RunMode.MULTIRUN, validate_sweep_overrides=False
    )
    device = next((o for o in reversed(rest) if o.startswith("device=")), f"={config.hydra.runtime.choices.device}")
    device = device.partition("=")[2]
    if "," in device:
        raise UserError(f"sweep=auto is the preset of one device, not of {device}; name a preset, such as sweep=cuda")
    return [*rest, f"sweep={device}"]


def _cases(args: argparse.Namespace, session: Session) -> tuple[list[str], dict[str, str]]:
    """Return the cases of the preset that these words name, each a line of words, and the options that it chooses.

    Both are empty if no preset is named. If the preset has cases, the session gets its name. Raises UserError for cases
    that are no list of lines, for several presets, and for `cases=` next to a preset's own.
    """
    if not (named := [word for word in args.overrides if word.startswith("sweep=")]):
        return [], {}
    if "," in named[-1]:
        raise UserError(f"{named[-1]}: each preset is its own sweep; give one at a time: {named[-1].partition(',')[0]}")
    config = overrides.loader(args).load_configuration(
        args.config_name or "config", named, RunMode.MULTIRUN, validate_sweep_overrides=False
    )
    preset = str(config.hydra.runtime.choices.sweep)
    own = next((word for word in args.overrides if word.startswith("cases=")), None)
    if own is not None and config.cases:
        raise UserError(f"{own}: sweep={preset} has its own cases; leave one out")
    found = OmegaConf.to_container(config.cases) if OmegaConf.is_config(config.cases) else config.cases
    if not isinstance(found, list) or not all(isinstance(case, str) for case in found):
        raise UserError(f"sweep/{preset}.yaml: cases={found}: allowed is a list of lines with a command's settings")
    session.preset = preset if found else None
    return found, {str(group): str(option) for group, option in config.hydra.runtime.choices.items()}


def _compose_case(
    args: argparse.Namespace, parser: argparse.ArgumentParser, case: str, options: Mapping[str, str], task: HydraTask
) -> None:
    """Let Hydra expand one case, as with -m, into the task. The command line's words win over the case's.

    Raises UserError for a mistake. The message names the case unless it is about the command line's words.
    """
    own = args.overrides
    one = argparse.Namespace(**(vars(args) | {"multirun": True, "run": False}))
    try:
        words, _ = typed_words.understand("case", shlex.split(case), parser, closed=False)
        one.overrides = _remaining_words(list(map(overrides.today, words)), own, options) + own
        with overrides.explained(one.overrides):
            overrides.check(one)
            _run_hydra(one, parser, task, str(CONF), "config")
    except (ValueError, UserError, SystemExit) as error:
        mistake = task.mistake if isinstance(error, SystemExit) else error
        if mistake is None or any(str(mistake).startswith(word) for word in own):
            raise
        raise UserError(f"{mistake} (in sweep/{task.session.preset}.yaml, case {case!r})") from None


def _remaining_words(case: Sequence[str], own: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return the words of a case that the command line's `own` words do not override.

    An own word overrides the same setting. An own option also overrides words below the option that it replaces
    (device.gpu). `options` are the preset's choices by group; a case may choose others.
    """
    said = dict(map(_setting, own))
    options = {**options, **dict(map(_setting, case))}
    gone = {f"{key}." for key, value in said.items() if options.get(key) != value}
    return [word for word in case if (key := _setting(word)[0]) not in said and not key.startswith(tuple(gone))]


def _setting(word: str) -> tuple[str, str]:
    key, _, value = word.lstrip("+~").partition("=")
    return key, value


def _resolved(config: DictConfig) -> dict[str, Any]:
    """Return the configuration's plain values. Raises UserError for a missing value, an unknown key and a secret."""
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key} is not set: give {error.full_key}=VALUE") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]}") from None
    assert isinstance(values, dict)
    if said := redaction.secrets_problem(values):
        raise UserError(said)
    if redaction.contains_secret(values, worker_environment.secrets(os.environ)):  # by ${oc.env:NAME}, in a file
        raise UserError(
            "a setting holds the value of an environment variable that may be a secret (*TOKEN*, *KEY*, ...) and would "
            "be written into the results; leave it out, because workers have the variable anyway"
        )
    required = {*plan.SETTINGS, *(name for name, kind in Trial.model_fields.items() if kind.is_required())}
    if gone := sorted(required - values.keys()):
        raise UserError(f"{gone[0]} was removed from the configuration, but is needed; give {gone[0]}=VALUE")
    known = {*plan.SETTINGS, *Trial.model_fields}
    if unknown := [str(key) for key in values if key not in known]:
        allowed = [*(known - {"repeat", "fingerprints"}), *overrides.options()]
        text = suggestions.unknown_key(unknown[0], None, allowed, overrides.keys())
        raise UserError(f"{text}; a group of your own (+GROUP=OPTION) needs --config-dir DIR")
    return {str(key): value for key, value in values.items()}


def _target(target: str | None) -> str:
    """Return the model name file.build of `path/to/file.py:build`; a missing target is refused by another rule."""
    path, _, function = (target or "").rpartition(":")
    return f"{Path(path).stem}.{function}" if path else "target"


def _from_deepspeed(axis: str, otherwise: Any, *, _root_: Any) -> Any:
    """Return the ds_config's value of an axis that is left alone, or `otherwise` without a readable one."""
    with contextlib.suppress(UserError):
        if path := _root_.get("ds_config"):
            return deepspeed_config.axes(deepspeed_config.read(str(path)), _root_.world_size).get(axis, otherwise)
    return otherwise


OmegaConf.register_new_resolver(DEVICE, detect, replace=True)
OmegaConf.register_new_resolver("vramsweep.said", _from_deepspeed, replace=True)
OmegaConf.register_new_resolver("vramsweep.target", _target, replace=True)
OmegaConf.register_new_resolver("vramsweep.program", lambda of: command_template.program(of or ""), replace=True)
