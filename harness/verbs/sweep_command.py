"""The command line of `sweep` and `plan`: from words to configurations (Hydra) to planned trials.

Hydra calls `launch` with every configuration at once (through hydra_plugins/vramsweep), or batch by batch where a
sweeper looks at what came out. Not covered: the words themselves (overrides.py), a configuration's plain values
(resolve_config.py), running the trials (run_trials.py), showing them (plan_preview.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import hydra.version
from hydra._internal.utils import _run_hydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vramsweep.harness.config import overrides, resolve_config
from vramsweep.harness.config.reproduce_command import CONF
from vramsweep.harness.config.resolve_config import Job
from vramsweep.harness.files import file_names
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.argument_parser import Parser, settings_parser
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import signals
from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.rows.journal_lock import Lock
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.sweep import plan, run_trials, shards, slurm_jobs, sweep_status
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.verbs import frontier, plan_preview

REPORTING = ".reporting"  # locked by the shard that writes the report


@dataclass(frozen=True)
class VerbAdapter:
    """How a verb shows a sweep: what its folder is called after, and what it says of all rows in the end.

    Where `suffix` is None it is the device. `instead` does something else with the planned trials, in the sweep's
    folder, and returns the exit status.
    """

    suffix: str | None = None
    closing: Callable[[Sequence[Row]], int] | None = None
    instead: Callable[[Sequence[Planned], Settings, Path, Launcher], int] | None = None


@dataclass
class Session:
    """What the batches of one command share; Hydra's main returns nothing, so what came of them is left here.

    `folder` is the first batch's: all are one sweep. `detected` is the device that `auto` stood for, if it was asked.
    `launcher` outlives a batch, as its templates are what takes time to start. `cases` are the configurations of the
    cases of `preset`, which wait here until all are there; None where the command has none. `options` are those of each
    group that the preset chooses. `words` are the command line's, without the verb.
    """

    folder: Path | None = None
    settings: Settings | None = None
    planned: dict[str, Planned] = field(default_factory=dict)
    status: int = 0
    detected: str | None = None
    launcher: Launcher | None = None
    front: VerbAdapter = field(default_factory=VerbAdapter)
    rows: dict[str, Row] = field(default_factory=dict)
    mistake: UserError | None = None
    preset: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    cases: list[dict[str, Any]] | None = None
    began_s: float = field(default_factory=time.monotonic)  # the budget is of the whole command
    words: Sequence[str] = ()


_session = Session()


def parser() -> Parser:
    """Return the options of `sweep`."""
    return settings_parser("sweep")


def main(argv: Sequence[str], action: str = "run", front: VerbAdapter | None = None, verb: str = "sweep") -> int:
    """`sweep` and `plan`, or only to know the trials: Hydra's command line.

    `front` is that of a verb that shows a sweep in its own way.

    Returns 0 if every trial has an answer, 1 if some failed, 2 if none can run, 130 if interrupted. Raises UserError
    for a mistake.
    """
    global _session
    _session = Session(front=front or VerbAdapter(), words=argv)
    args, parser = overrides.parse(argv, action, verb)
    if args.shell_completion:
        raise UserError("--shell-completion is for Hydra's own programs; vramsweep VERB --help lists the settings")
    if args.experimental_rerun is not None:
        raise UserError("--experimental-rerun is Hydra's for single jobs; the same command goes on where a sweep was")
    given = [name for name in ("run", "multirun", "cfg", "info") if getattr(args, name)]
    if len(given) > 1:
        raise UserError(f"--{' and --'.join(given)} do not go together; give one of them")
    if args.resolve and not (args.cfg or args.help):
        raise UserError("--resolve needs --cfg job")
    hydra.version.setbase("1.3")
    sys.argv = [parser.prog, *argv]  # what plan.json keeps as the command
    words, cases = list(args.overrides), list[str]()
    try:
        with overrides.explained(words):
            if not (args.help or args.hydra_help):
                overrides.check(args)
                args.overrides = _preset(args) + ([f"action={action}"] if action != "run" else [])
                _session.preset, cases = _cases(args) if not (args.cfg or args.info) else (None, [])
            if not cases:
                _run_hydra(args, parser, _single, str(CONF), "config")
        if cases:
            _session.cases = []
            for case in cases:
                _compose(args, parser, case)
            _launch(_session.cases, whole=True)
    except SystemExit as end:  # how Hydra ends after --help, and `launch` after a mistake or an interruption
        if _session.mistake is not None:
            raise _session.mistake from None
        if isinstance(end, run_trials.Interrupted) and not end.at_once:
            _report(_session)
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if _session.launcher is not None:
            _session.launcher.close()
    return _finish(_session)


def resolve(argv: Sequence[str], verb: str = "sweep") -> tuple[list[Planned], Settings | None]:
    """The trials that a command line names, none of which is run, and the sweep's settings; nothing where it only
    asks for help. Raises UserError for a mistake."""
    main(argv, action="resolve", verb=verb)
    return list(_session.planned.values()), _session.settings


def folder() -> Path | None:
    """The folder of the sweep that the last command was about."""
    return _session.folder


def launch(jobs: Sequence[Job], whole: bool = True) -> list[Row | float | None]:
    """Run, or only plan, the trials of the configurations; for each its terminal row, None if it was not run.

    With `objective` it is that column's value instead, the median over repeats: None where a repeat has none (out of
    memory, invalid, failed), which is how an optimising sweeper learns that the trial failed: Optuna's counts a
    value that is no number as a failure and goes on, while NaN ends its study. `whole`: these are all trials of the
    command. A UserError ends Hydra with status 2, as Hydra would bury it in a traceback; `main` raises it.
    """
    try:
        with overrides.variable(overrides.FULL_ERROR, None):  # which workers must not inherit
            configs = resolve_config.plain_values(jobs)
            if _session.cases is None:
                return _launch(configs, whole)
            if not whole:
                raise UserError("a preset of cases is run at once; a sweeper that comes in batches needs one without")
            _session.cases += configs
            return [None] * len(configs)
    except UserError as error:
        _session.mistake = error
        raise SystemExit(2) from None


def prepare_searches(jobs: Sequence[Job], axis: str, values: Sequence[int]) -> list[frontier.SearchPlan]:
    """What is known of each configuration before its first trial, for a sweeper that looks for edges along an axis.

    Edges are predicted where the trials are to run; `plan` says what would be tried without. Raises UserError.
    """
    session = _session
    with overrides.variable(overrides.FULL_ERROR, None):
        if session.cases is not None:
            raise UserError("a preset of cases is run at once; sweep=frontier is a preset of its own")
        configs = resolve_config.plain_values(jobs)
        settings = plan.settings(configs)
        frontier.check(settings)
        folder = _placed(session, settings, plan.order_trials(plan.expand_trials(configs, 1)), session.front.suffix)
        if settings.action != "run":
            return frontier.plan_search(configs, settings, axis, values, folder, None)
        signals.on_sigterm()
        run_trials.refuse_links(folder)
        return frontier.plan_search(configs, settings, axis, values, folder, _started(session, settings, folder))


def report_searches(searches: Sequence[frontier.Search], axis: str) -> None:
    """Show the edges that a sweeper has found, or what it would try."""
    settings = _session.settings
    if settings is None or settings.action == "resolve":
        return
    if settings.action == "run":
        status = frontier.show(searches, axis, settings.output == "json")
        _session.status = max(_session.status, status)
    elif settings.output != "json":
        print(frontier.announced(searches, axis))


def _placed(session: Session, settings: Settings, planned: Sequence[Planned], suffix: str | None) -> Path:
    """The folder of the command's sweep, which is called after its first trials."""
    name = settings.name or _name(planned, session.preset, suffix)
    session.folder = session.folder or Path(settings.results) / name
    return session.folder


def _started(session: Session, settings: Settings, folder: Path) -> Launcher:
    """The launcher of all the command's batches."""
    if session.launcher is None:
        logs = folder / "templates" / (shards.parse(settings.shard).writer or "")
        session.launcher = Launcher(settings.isolation, logs)
    return session.launcher


def resolve_jobs(jobs: Sequence[Job]) -> tuple[list[Planned], Settings]:
    """The trials of the configurations, the first repeat of each, and the sweep's settings, before any is run: for a
    sweeper that chooses among them. A UserError ends Hydra as in `launch`."""
    try:
        with overrides.variable(overrides.FULL_ERROR, None):
            configs = resolve_config.plain_values(jobs)
            settings = _session.settings = plan.settings(configs)
            if shards.slurm(settings.cluster) or settings.shard:
                _refuse_parts(whole=False)
            planned = [one for one, *_ in plan.expand_trials(configs, 1)]
            if settings.action == "run":
                _refuse_invalid(p.reason for p in run_trials.reject_too_many_ranks(planned))
            _placed(_session, settings, planned, _session.front.suffix)
            return planned, settings
    except UserError as error:
        _session.mistake = error
        raise SystemExit(2) from None


def rows_beside(planned: Sequence[Planned], suffix: str) -> dict[str, Row]:
    """Run trials that the sweep of `resolve_jobs` needs to know of in a folder beside its own, NAME-suffix; their rows
    by id."""
    settings, folder = _session.settings, _session.folder
    assert settings is not None and folder is not None
    signals.on_sigterm()
    place = folder.with_name(f"{folder.name}-{suffix}")
    alone = dataclasses.replace(settings, report=False, others=False, skip_dominated=False)
    return run_trials.run(planned, alone, place)[0]


def refuse(reason: str) -> NoReturn:
    """End the command for a mistake that a sweeper has found."""
    _session.mistake = UserError(reason)
    raise SystemExit(2)


def _launch(resolved: Sequence[dict[str, Any]], whole: bool) -> list[Row | float | None]:
    session = _session
    settings = session.settings = plan.settings(resolved)
    slurm = shards.slurm(settings.cluster) if settings.action == "run" and settings.shard is None else None
    if slurm or settings.shard:
        _refuse_parts(whole)
    expanded = plan.expand_trials(resolved, settings.repeats)
    planned = plan.order_trials(expanded)
    earlier = list(session.planned.values())
    session.planned |= {p.trial_id: p for p in planned}
    devices = {config["device"]["name"] for config in resolved if isinstance(config.get("device"), Mapping)}
    auto = {session.detected} == devices  # of a list, Hydra composes the default too
    folder = _placed(session, settings, planned, "slurm" if slurm and auto else session.front.suffix)
    if settings.action == "run" and whole:  # before a folder is made: most likely a mistyped value
        _refuse_invalid(p.reason for p in (planned if slurm else run_trials.reject_too_many_ranks(planned)))
    if auto and devices == {"simulated"} and not earlier and not slurm:
        _refuse_blind_node(settings)
        print("no usable CUDA device: predicting memory on device=simulated (device=cpu measures)", file=sys.stderr)
    finished: dict[str, Row] = {}
    if settings.action == "plan":
        plan_preview.show(planned, settings, folder)
    elif slurm:
        session.settings = dataclasses.replace(settings, report=False)  # the jobs' last one writes it
        slurm_jobs.submit(planned, settings, slurm, folder, session.words, auto, main)
    elif settings.action == "run":
        signals.on_sigterm()
        once = dataclasses.replace(settings, report=False)
        launcher = _started(session, settings, folder)
        if session.front.instead is not None:
            status = session.front.instead(planned, settings, folder, launcher)
        else:
            finished, status = run_trials.run(planned, once, folder, earlier, launcher, session.began_s)
        session.rows |= finished
        session.status = max(session.status, status)
    return [_answer([finished.get(p.trial_id) for p in of_one], settings.objective) for of_one in expanded]


def _refuse_parts(whole: bool) -> None:
    """Raises UserError where a command cannot be divided: what it does next depends on rows of all its trials."""
    if not whole:
        raise UserError("a sweeper that comes in batches looks at all rows, so it runs whole: leave cluster, shard out")
    if _session.front != VerbAdapter():
        raise UserError("cluster= and shard= divide what sweep and run do; leave them out here")


def _refuse_blind_node(settings: Settings) -> None:
    """Raises UserError in a job for a card whose node has none: it would predict where all others measure."""
    slurm = shards.slurm(settings.cluster) if settings.shard else None
    if slurm and slurm.gpus != 0:
        raise UserError(
            f"device=auto: {platform.node()} has no usable CUDA device, and this is a job for GPUs: `vramsweep doctor`"
            " there says why (device=cpu measures without one, device=simulated predicts)"
        )


def _answer(rows: Sequence[Row | None], objective: str | None) -> Row | float | None:
    if objective is None:
        return rows[0]
    values = [row[objective] for row in rows if row is not None and row[objective] is not None]
    return float(statistics.median(values)) if len(values) == len(rows) else None


def _finish(session: Session) -> int:
    """After the last batch: the report, once. Raises UserError if no trial of any batch can run, or could."""
    if session.settings is None or session.folder is None:
        return 0
    if session.settings.action != "resolve":
        _refuse_invalid(p.reason for p in session.planned.values())
    if session.settings.action == "run" and session.settings.shard is None:
        rows = [session.rows.get(name, {}) for name in session.planned]
        invalid = (str(row["reason"]) if row.get("outcome") == Outcome.INVALID else None for row in rows)
        _refuse_invalid(invalid, "could", ", in the rows")
    if session.settings.action == "run" and session.front.closing is not None:
        session.status = max(session.status, session.front.closing(list(session.rows.values())))
    _report(session)
    return session.status


def _report(session: Session) -> None:
    """The report of a sweep that was run, where it is wanted. Raises KeyboardInterrupt, which ends it."""
    settings, folder = session.settings, session.folder
    if settings and folder and settings.action == "run" and settings.report and session.front.instead is None:
        if settings.shard is None:
            run_trials.report(folder)
        else:
            _report_once(folder)


def _report_once(folder: Path) -> None:
    """The report of a sweep in shards, by the one whose row was the last of all."""
    found = sweep_status.read_status(folder)
    if found.done != found.total:
        print(f"{found.done} of {found.total} trials have rows; the report comes with the last, or vramsweep report")
        return
    place = folder / REPORTING
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with contextlib.suppress(UserError):  # another shard saw the last row too, and reports
            lock = Lock(place, descriptor)
            run_trials.report(folder)
            lock.release()
    finally:
        os.close(descriptor)


def _refuse_invalid(
    reasons: Iterable[str | None], could: str = "can", where: str = "; `vramsweep plan` lists them"
) -> None:
    """Raises UserError where every trial has a reason for which it cannot run, or was seen to be impossible."""
    first, *more = dict.fromkeys(reasons)
    if first is not None and None not in more:
        others = f" (and {len(more)} more reasons{where})" if more else ""
        raise UserError(f"no trial {could} run: {first}{others}")


@cache
def detect() -> str:
    """The device that `device=auto` stands for on this machine: cuda or simulated."""
    return machine.choose_device(os.environ)[0]


def _detected() -> str:
    _session.detected = detect()
    return _session.detected


# What conf/config.yaml refers to, as do resolve_config.py's
OmegaConf.register_new_resolver("vramsweep.device", _detected, replace=True)


def _preset(args: argparse.Namespace) -> list[str]:
    """The overrides without `device=auto`, which is the default, and with `sweep=auto` made the device's own preset.

    The default gives way to a file of the user's that chooses a device; an override would not.
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
        raise UserError(f"sweep=auto is the preset of one device, not of {device}; name one of them: sweep=cuda")
    return [*rest, f"sweep={device}"]


def _cases(args: argparse.Namespace) -> tuple[str | None, list[str]]:
    """The preset that these words name and its cases, each a line of words; none where it has none, or none is named.

    Raises UserError where they are something else.
    """
    named = [word for word in args.overrides if word.startswith("sweep=")]
    if not named:
        return None, []
    if "," in named[-1]:
        raise UserError(f"{named[-1]}: a preset is a sweep of its own, so one at a time: {named[-1].partition(',')[0]}")
    config = overrides.loader(args).load_configuration(
        args.config_name or "config", named, RunMode.MULTIRUN, validate_sweep_overrides=False
    )
    preset = str(config.hydra.runtime.choices.sweep)
    _session.options = {str(group): str(option) for group, option in config.hydra.runtime.choices.items()}
    own = next((word for word in args.overrides if word.startswith("cases=")), None)
    if own is not None and config.cases:
        raise UserError(f"{own}: sweep={preset} has cases of its own; leave one out")
    found = OmegaConf.to_container(config.cases) if OmegaConf.is_config(config.cases) else config.cases
    if not isinstance(found, list) or not all(isinstance(case, str) for case in found):
        raise UserError(f"sweep/{preset}.yaml: cases={found}: allowed is a list of lines, each the words of a command")
    return preset if found else None, found


def _compose(args: argparse.Namespace, parser: argparse.ArgumentParser, case: str) -> None:
    """Let Hydra expand one case, as with -m, into the session. The command line's own words win over the case's.

    Raises UserError for a mistake, which names the case unless it is about the command line's words.
    """
    own = args.overrides
    one = argparse.Namespace(**(vars(args) | {"multirun": True, "run": False}))
    try:
        one.overrides = _remaining_words(list(map(overrides.today, shlex.split(case))), own, _session.options) + own
        with overrides.explained(one.overrides):
            overrides.check(one)
            _run_hydra(one, parser, _single, str(CONF), "config")
    except (ValueError, UserError, SystemExit) as error:
        mistake = _session.mistake if isinstance(error, SystemExit) else error
        if mistake is None or any(str(mistake).startswith(word) for word in own):
            raise
        raise UserError(f"{mistake} (in sweep/{_session.preset}.yaml, case {case!r})") from None


def _remaining_words(case: Sequence[str], own: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """The words of a case that the command line's own leave: not those for the same settings, nor what lies below an
    option (device.gpu) where another one of its group is chosen; `options` are the preset's, a case may choose."""
    said = dict(map(_setting, own))
    options = {**options, **dict(map(_setting, case))}
    gone = {f"{key}." for key, value in said.items() if options.get(key) != value}
    return [word for word in case if (key := _setting(word)[0]) not in said and not key.startswith(tuple(gone))]


def _setting(word: str) -> tuple[str, str]:
    key, _, value = word.lstrip("+~").partition("=")
    return key, value


def _single(config: DictConfig) -> None:
    """Hydra's task function, for a call without -m: one trial is a sweep of one."""
    launch([(config, {})])


def _name(planned: Sequence[Planned], preset: str | None, suffix: str | None) -> str:
    """What a sweep's folder is called: after its preset of cases, else after its models and runners."""

    def of(key: str) -> str:
        return "+".join(sorted({str((p.resolved.get(key) or {}).get("name")) for p in planned}))

    return file_names.make_safe(f"{preset or of('model') + '-' + of('runner')}-{suffix or of('device')}")
