"""hydra/sweeper=adaptive: measures those of the given lengths and batches that say most.

The grid is expanded as usual and falls into configurations: everything but seq_len and micro_batch. Each is predicted
first, if the simulated device can. Then all are measured in rounds, a batch of the launcher's each, until none needs
more (analysis/model/adaptive.py decides). The same command asks for the same points, so an interrupted sweep resumes
from its journal. Points that were not measured are written to inferred.jsonl next to the journal, never as rows. Time
is not inferred.
"""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser

from vramsweep.harness.config.overrides import FULL_ERROR, variable
from vramsweep.harness.files import sweep_folder
from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions import fit_prediction
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.search.axis_search import drive
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec.trial_identity import key_without
from vramsweep.harness.sweep.plan import Planned, plan_trial
from vramsweep.harness.sweep.resume import reject_too_many_ranks
from vramsweep.harness.sweep.session import Session, refuse_invalid

if TYPE_CHECKING:  # Hydra imports every plugin for every command, and these import pandas and scipy, or plugins
    from vramsweep.analysis.model.adaptive import Answer, Grid, Search
    from vramsweep.harness.config.compose import HydraTask


@dataclass
class AdaptiveConf:
    """Settings of hydra/sweeper=adaptive."""

    _target_: str = "hydra_plugins.vramsweep.adaptive.AdaptiveSweeper"
    most: int = 40  # measured points of a configuration, at most
    checks: int = 3  # check points in a row that have to agree
    together: int = 3  # uncertain points that a round asks for
    seed: int = 0  # of the check points
    allocated: float = 0.01  # largest error of allocated memory, as a share, everywhere
    reserved: float = 0.02  # largest error of reserved memory, at 95 % of the points
    max_batch_size: int | None = None
    params: dict[str, Any] | None = None  # of presets (conf/sweep): axes, as on the command line


ConfigStore.instance().store(group="hydra/sweeper", name="adaptive", node=AdaptiveConf, provider="vramsweep")


class AdaptiveSweeper(BasicSweeper):
    """The sweeper that asks the launcher for a few points at a time."""

    def __init__(self, max_batch_size: int | None, params: Any, **settings: Any) -> None:
        super().__init__(max_batch_size=max_batch_size, params=params)
        self.conf = AdaptiveConf(**settings)

    def check(self) -> None:
        """Raise UserError for a setting that is not allowed; Hydra would bury an error that the constructor raises."""
        if self.max_batch_size is not None:
            raise UserError("hydra.sweeper.max_batch_size: hydra/sweeper=adaptive sets its own batches; leave it out")
        for key, least in (("most", 3), ("checks", 1), ("together", 1), ("seed", 0)):
            if type(value := getattr(self.conf, key)) is not int or value < least:
                raise UserError(f"hydra.sweeper.{key}={value}: allowed is a whole number of at least {least}")
        for key, share in (("allocated", self.conf.allocated), ("reserved", self.conf.reserved)):
            if not isinstance(share, (int, float)) or not 0 < share < 1:
                raise UserError(f"hydra.sweeper.{key}={share}: allowed is a share between 0 and 1, such as 0.01")

    def sweep(self, arguments: list[str]) -> Any:
        """Run rounds of the launcher until every configuration has enough; return what it returns of each."""
        assert self.hydra_context is not None
        assert self.launcher is not None
        self.check()
        if (compose := getattr(self.launcher, "compose", None)) is None:
            raise UserError("hydra/sweeper=adaptive needs hydra/launcher=vramsweep, the default")
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        (jobs,) = self.split_arguments(parser.parse_overrides([*self._parse_config(), *arguments]), None)
        task: HydraTask = self.launcher.task  # type: ignore[attr-defined] # ours
        if task.of_cases:
            raise UserError("a preset with cases runs as a whole; hydra/sweeper=adaptive needs one without cases")
        session = task.session
        planned, settings = session.first_trials(task.plain_values(compose(jobs)))
        if settings.action == "run":
            refuse_invalid(p.reason for p in reject_too_many_ranks(planned))
        if settings.action == "resolve":
            return [self.launcher.launch(jobs, initial_job_idx=0)]
        if settings.objective is not None:
            raise UserError(f"objective={settings.objective}: hydra/sweeper=adaptive searches by memory; leave it out")
        groups = configurations(planned)
        impossible = [n for n, one in enumerate(planned) if one.trial is None]
        if settings.action == "plan":
            return self._planned(planned, session, jobs, groups, impossible)
        with variable(FULL_ERROR, None):  # which workers must not inherit
            searches = [self._search(planned, of_one, session) for of_one in groups]
        returns: list[Any] = []

        def launch(asked: Mapping[int, list[int]]) -> dict[int, dict[int, "Answer"]]:
            assert self.launcher is not None
            wanted = [*(() if returns else impossible), *(groups[n][at] for n, own in asked.items() for at in own)]
            done = self.launcher.launch([jobs[n] for n in wanted], initial_job_idx=sum(map(len, returns)))
            returns.append(done)
            rows = {n: one.return_value for n, one in zip(wanted, done, strict=True) if one.return_value is not None}
            known = {n: {at: rows.get(groups[n][at]) for at in own} for n, own in asked.items()}
            told = {n: {at: answer(row) for at, row in of_one.items() if row} for n, of_one in known.items()}
            return {n: answers for n, answers in told.items() if answers}

        ended = not drive(searches, launch, lambda: self._write(session.folder, planned, groups, searches))
        for of_one, search in zip(groups, searches, strict=True):
            print(said(planned[of_one[0]], search, ended))
        return returns

    def _planned(
        self, planned: Sequence[Planned], session: Session, jobs: Any, groups: Sequence[Sequence[int]],
        impossible: Sequence[int],
    ) -> Any:  # fmt: skip
        """Launch the points of the first round for a plan, as if nothing were predicted."""
        assert self.launcher is not None
        first = [of_one[at] for of_one in groups for at in self._search(planned, of_one, None).ask()]
        points = max(map(len, groups), default=0)
        session.notes.append(
            f"hydra/sweeper=adaptive measures at most {min(self.conf.most, points):,} of {points:,} points of each of "
            f"{len(groups)} configuration(s); this plan lists the first round, chosen without predictions"
        )
        return [self.launcher.launch([jobs[n] for n in (*impossible, *first)], initial_job_idx=0)]

    def _search(self, planned: Sequence[Planned], of_one: Sequence[int], session: Session | None) -> "Search":
        from vramsweep.analysis.model.adaptive import TOLERANCES, Search, Tolerance

        within = {"peak_allocated_bytes": self.conf.allocated, "peak_reserved_bytes": self.conf.reserved}
        limits = {name: Tolerance(share, TOLERANCES[name].of_points) for name, share in within.items()}
        grid = predicted_grid([planned[n] for n in of_one], session)
        return Search(grid, self.conf.most, self.conf.checks, self.conf.together, self.conf.seed, limits)

    def _write(
        self, folder: Path, planned: Sequence[Planned], groups: Sequence[Sequence[int]], searches: "Sequence[Search]"
    ) -> None:
        lines: list[dict[str, Any]] = []
        for of_one, search in zip(groups, searches, strict=True):
            lines += inferences([planned[n] for n in of_one], search)
        sweep_folder.write_inferred(folder, lines, {one.trial_id for one in planned})


def configurations(planned: Sequence[Planned]) -> list[list[int]]:
    """Return the positions of the possible trials of each configuration: equal but for length and batch."""
    found: dict[str, dict[tuple[int, int], int]] = defaultdict(dict)
    for n, one in enumerate(planned):
        if one.trial is not None:
            key = key_without(one.resolved, "seq_len", "micro_batch")
            found[key].setdefault((one.trial.seq_len, one.trial.micro_batch), n)
    return [list(of_one.values()) for of_one in found.values()]


def predicted_grid(planned: Sequence[Planned], session: Session | None) -> "Grid":
    """Return a configuration's points, with predictions if they can be made; without a session there are none."""
    import numpy as np

    from vramsweep.analysis.model.adaptive import Grid

    possible = [one.trial for one in planned if one.trial is not None]
    length, batch = (np.array([getattr(one, axis) for one in possible], float) for axis in ("seq_len", "micro_batch"))
    rows = None if session is None else predictions(possible, session)
    return Grid(length, batch) if rows is None else Grid.of(length, batch, rows)


def predictions(possible: Sequence[trials.Trial], session: Session) -> list[Row | None] | None:
    """Return the predicted row of each trial, or None if nothing is to be predicted; a failure is printed."""
    first, settings = possible[0], session.settings
    assert settings is not None
    if not settings.predict or first.device.name != "cuda" or runner_table.runner(first.runner.name).starts:
        return None
    card, problem = fit_prediction.choose_card(settings)
    if card is None:
        print(f"nothing is predicted: {problem}", file=sys.stderr)
        return None
    found: list[Planned | None] = []
    for trial in possible:
        try:
            found.append(plan_trial(fit_prediction.simulate(trial, card)))
        except trials.InvalidTrial:
            found.append(None)
    if not (asked := [one for one in found if one is not None]):
        return None
    print(f"predicting {len(asked):,} points for {card.name}; predict=false skips this", file=sys.stderr)
    try:
        rows = session.run_aside(asked, "predicted")
    except UserError as error:
        print(f"nothing is predicted: {error}", file=sys.stderr)
        return None
    return [rows.get(one.trial_id) if one is not None else None for one in found]


def answer(row: Mapping[str, Any]) -> "Answer":
    """Return what a row says to the search. Reserved is left out if the allocator had to free its cache first, because
    it is then only a bound. A skipped trial needs no less than one that ran out of memory."""
    from vramsweep.analysis.model.adaptive import TOLERANCES, Answer

    if row["outcome"] == Outcome.SKIPPED:
        return Answer(False, measured=False)
    if row["outcome"] == Outcome.HOST_OOM:
        return Answer(False)
    if row["outcome"] not in (Outcome.OK, Outcome.OOM):
        return Answer(None)
    total = row.get("device_total_bytes")
    limit = row.get("memory_limit_bytes") or (total - CONTEXT_BYTES if total else None)
    if row["outcome"] == Outcome.OOM:
        return Answer(False, limit=limit)
    no_allocator = row["device"] == "cpu"  # a process's resident set does not follow the length
    left_out = {"peak_reserved_bytes"} if row.get("alloc_retries") or no_allocator else set()
    return Answer(True, {name: row[name] for name in TOLERANCES if row.get(name) and name not in left_out}, limit)


def inferences(planned: Sequence[Planned], search: "Search") -> list[dict[str, Any]]:
    """Return a line of inferred.jsonl for each point that was not measured, or failed."""
    known, fits = search.inferred(), search.fits()
    ran = [planned[at].trial_id for at, one in search.answers.items() if one.fits]
    lines = []
    for at, one in enumerate(planned):
        told = search.answers.get(at)
        if (told and told.measured and told.fits is not None) or one.trial is None or not ran:
            continue
        line = {"trial_id": one.trial_id, "seq_len": one.trial.seq_len, "micro_batch": one.trial.micro_batch}
        line |= {"fits": fits[at], "configuration": ran[0]}
        for name, values in known.items():
            if fits[at] is not False:
                ends = (values.value[at], values.low[at], values.high[at])
                line |= {f"{name}{end}": round(float(v)) for end, v in zip(("", "_low", "_high"), ends, strict=True)}
                line[f"{name}_basis"] = "prediction+residual" if values.basis == "prediction" else "curve"
        lines.append(line)
    return lines


def said(first: Planned, search: "Search", ended: bool = False) -> str:
    """Say in a line how many points were measured, and how check points agree; `ended`: the budget ended the search."""
    assert first.trial is not None
    total, told = len(search.grid.length), search.answers.values()
    done = sum(one.measured and one.fits is not None for one in told)
    head = f"{first.trial.model.name} · {first.trial.runner.name} · {first.trial.allocator.name}"
    text = f"{head}: {done:,} of {total:,} points measured"
    failed, skipped = sum(one.fits is None for one in told), sum(not one.measured for one in told)
    text += f", {failed} failed" * bool(failed) + f", {skipped} skipped" * bool(skipped)
    if done == total:
        return text
    worst = []
    for name in search.inferred():
        if off := [abs(check.off(name)) for check in search.compared if name in check.measured]:
            worst.append(f"{max(off):.2%} ({name})")
    checks = (
        f"{len(search.compared)} check points: errors up to {', '.join(worst)}" if worst else "no check points measured"
    )
    full = sum(check.full for check in search.compared)
    checks += f", and {full} did not fit although inferred to fit" if full else ""
    if not search.inferred():
        return f"{text}; no row has measured memory, so nothing is inferred"
    why = ", because the budget ended the search" if ended else "; hydra.sweeper.most= allows more points"
    end = "the last check points agree" if search.enough else f"the tolerance is not reached{why}"
    return f"{text}, the others inferred (inferred.jsonl); {checks}; {end}"
