"""Search for the largest value that fits, of many configurations: predictions beforehand, the searches, the table.

The trials are a sweep's own, with the whole protocol; a sweeper (hydra_plugins) asks for them round by round.
`vramsweep frontier` tells what the rows of any sweep say of this limit.
"""

import json
import os
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vramsweep.harness.machine import machine
from vramsweep.harness.messages.console import Console, make_table
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.questions import fit_prediction, largest_prediction
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.search.axis_search import Bisection, Edge, Kind, Probe, most_trials
from vramsweep.harness.sweep import plan
from vramsweep.harness.sweep.labels import OPTIONS, Labels
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.sweep.resume import refuse_links, reject_too_many_ranks
from vramsweep.harness.sweep.session import Session

NOT_STARTED = Probe("failed", "the budget has no time for the next trial")
_PROBES: dict[str, Kind] = {"ok": "fits", "oom": "full", "host_oom": "full", "skipped": "inferred", "invalid": "beyond"}
MARGIN = 0.01  # of a measured run's predicted value: the first stride next to it. A simulated run's is exact


@dataclass(frozen=True)
class SearchPlan:
    """A configuration before its first trial.

    `values` are those along the axis up to the first that is no trial, for the reason in `beyond`; None: all are
    trials. `predicted` is the largest that is predicted to fit: 0 if none is, None if nothing is predicted, for the
    reason in `remark`. Up to `every`, all are predicted to fit. `margin` is in values.
    """

    label: str
    values: Sequence[int]
    beyond: str | None = None
    predicted: int | None = None
    every: int | None = None
    margin: int = 1
    remark: str | None = None


@dataclass
class Search:
    """A configuration's bisection, which rows answer, and the trials that showed the results of its values."""

    ahead: SearchPlan
    trial_ids: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ahead = self.ahead
        beyond = {} if ahead.beyond is None else {ahead.values[-1]: Probe("beyond", ahead.beyond)}
        self.bisection = Bisection(ahead.values, ahead.predicted, ahead.margin, beyond)

    def ask(self) -> list[int]:
        """Return the value to try next; none once the largest is known."""
        return self.bisection.ask()

    def tell(self, answers: Mapping[int, Row]) -> None:
        """Learn from terminal rows of trials, by value; a value that was asked for and is missing was not run."""
        self.bisection.tell({value: probe_result(answers.get(value)) for value in self.ask()})
        self.trial_ids |= {value: row["trial_id"] for value, row in answers.items()}

    def found(self) -> Edge:
        """Return the largest value that fits and the next one, as far as they are known."""
        return self.bisection.found()

    def trials(self) -> int:
        """Count the trials, without those that could not run, were not started or were skipped."""
        known = self.bisection.known.values()
        return sum(one.kind in ("fits", "full", "failed") and one != NOT_STARTED for one in known)


def probe_result(row: Row | None) -> Probe:
    """Return what a trial's row says about its value."""
    if row is None:
        return NOT_STARTED
    kind, reason = row["outcome"], row["reason"]
    if kind in _PROBES:
        return Probe(_PROBES[kind], None if kind == Outcome.OK else reason)
    again = "" if outcome.runs_again(kind, asked=False) else "; retry_failed=true runs it again"
    return Probe("failed", f"{kind}: {reason}{again}")


def prepare_searches(
    session: Session, configs: Sequence[Mapping[str, Any]], axis: str, values: Sequence[int]
) -> list[SearchPlan]:
    """Return what is known of each configuration before its first trial, for a sweeper that searches the largest value.

    Values are predicted only if the trials are to run; a plan says what would be tried without. Raises UserError, also
    for settings with which a search makes no sense.
    """
    _, settings = session.first_trials(configs)
    if settings.objective is not None:
        raise UserError("objective= is for sweepers that optimise; sweep=frontier takes none, so leave it out")
    if settings.repeats != 1:
        raise UserError(f"repeats={settings.repeats}: sweep=frontier tries each value once; allowed is repeats=1")
    if settings.action != "run":
        return plan_search(configs, settings, axis, values, session.folder, None)
    refuse_links(session.folder)
    return plan_search(configs, settings, axis, values, session.folder, session.start())


def report_searches(session: Session, searches: Sequence[Search], axis: str) -> None:
    """Show the largest values that a sweeper has found, or note what it would try."""
    settings = session.settings
    if settings is not None and settings.action == "run":
        session.status = max(session.status, show(searches, axis, settings.output == "json"))
    elif settings is not None and settings.action == "plan":
        session.notes.append(announced(searches, axis))


def plan_search(
    configs: Sequence[Mapping[str, Any]],
    settings: Settings,
    axis: str,
    values: Sequence[int],
    folder: Path,
    launcher: Launcher | None,
) -> list[SearchPlan]:
    """Return each resolved configuration before its first trial, its largest value predicted if a launcher is given.

    If a prediction fails, `remark` says why.
    """

    def at(config: Mapping[str, Any], value: int) -> Planned:
        if not axis.startswith(OPTIONS):
            return plan.expand_trials([{**config, axis: value}], 1)[0][0]
        runner = config["runner"]
        options = {**runner["options"], axis.removeprefix(OPTIONS): str(value)}
        return plan.expand_trials([{**config, "runner": {**runner, "options": options}}], 1)[0][0]

    def count(config: Mapping[str, Any]) -> int:
        """Return how many values there are before the first that is no trial."""
        return bisect_left(values, True, lo=1, key=lambda value: at(config, value).trial is None)

    found: list[SearchPlan] = []
    asked: dict[int, list[tuple[int, Planned]]] = defaultdict(list)  # by how many values there are
    firsts = reject_too_many_ranks([at(config, values[0]) for config in configs])
    labels = _labels(firsts, axis)
    for number, (config, first) in enumerate(zip(configs, firsts, strict=True)):
        if first.trial is None:  # its row says why
            found.append(SearchPlan(labels[number], values[:1], remark=first.reason))
            continue
        most = count(config)
        beyond = at(config, values[most]).reason if most < len(values) else None
        item, remark = _predictable(first, settings)
        found.append(SearchPlan(labels[number], values[: most + 1], beyond, remark=remark))
        if item is not None and launcher is not None:
            asked[most].append((number, item))
    for most, items in asked.items():
        assert launcher is not None
        try:
            answers = largest_prediction.predict_edges(
                [i for _, i in items], settings, folder, launcher, axis, values[:most], False
            )
        except UserError as error:
            answers = [(item, largest_prediction.NO_ANSWER | {"reason": str(error)}) for _, item in items]
        for (number, item), (_, answer) in zip(items, answers, strict=True):
            measured = firsts[number].trial != item.trial
            found[number] = predicted(found[number], answer, MARGIN if measured else 0.0)
    return found


def predicted(before: SearchPlan, answer: largest_prediction.Answer, margin: float) -> SearchPlan:
    """Add the answer of `largest_prediction.predict_edges` to a plan; `margin` is a share of the value."""
    if answer["reason"] is not None or (answer["unanswered"] and not answer["looked_at"]):
        return replace(before, remark=answer["reason"] or "no value could be traced")
    most = answer["largest"] or 0
    stride = bisect_right(before.values, most * (1 + margin)) - bisect_right(before.values, most)
    return replace(before, predicted=most, every=answer["all_up_to"] or 0, margin=max(stride, 1))


def _predictable(item: Planned, settings: Settings) -> tuple[Planned | None, str | None]:
    """Return the trial on the GPU to predict for (another one if `predict` names it), or why there is none."""
    assert item.trial is not None
    if item.trial.runner.command is not None:  # each value is a trace of its own
        return None, None
    if settings.predict is False:
        return None, "predict=false"
    device = item.trial.device.name
    if device == "simulated":
        return item, None
    if device != "cuda" and not isinstance(settings.predict, str):
        return None, f"device={device} is not a GPU; predict=GPU predicts for one"
    if settings.predict is True and not machine.visible_gpus(os.environ):
        return None, "no GPU is visible here; predict=GPU predicts for one"
    card, problem = fit_prediction.choose_card(settings)
    if card is None:
        return None, problem
    found = fit_prediction.predictable(item, card)
    return (None, found.reason) if found.trial is None else (found, None)


def show(searches: Sequence[Search], axis: str, as_json: bool) -> int:
    """Print what was found; return the exit status: 1 if a largest value is not known."""
    edges = [(one, one.found()) for one in searches if not one.ask()]
    status = int(len(edges) < len(searches) or any(edge.unknown for _, edge in edges))
    if as_json:
        print(json.dumps([_plain(one, edge, axis) for one, edge in edges]))
        return status
    console = Console()
    called = axis.replace(OPTIONS, "") + "=" * axis.startswith(OPTIONS)
    sides = (f"largest {called} that fits", "smallest that does not", "trials")
    table = make_table(("configuration", *sides, "predicted", "confirmed"), numbers=sides)
    for one, edge in edges:
        nothing = "unknown" if edge.unknown or _cannot(edge) else "none"
        table.add_row(one.ahead.label, f"{edge.largest:,}" if edge.largest is not None else nothing, _smallest(edge),
                      str(one.trials()), _predicted(one.ahead), "yes" if edge.confirmed else "no")  # fmt: skip
    console.print(table)
    for one, edge in edges if axis.startswith(OPTIONS) else ():
        nothing = "unknown" if edge.unknown or _cannot(edge) else "none"
        found = f"{edge.largest:,}" if edge.largest is not None else nothing
        console.print(f"{one.ahead.label}: the largest {called} that fits is {found}")
    for line in (f"{one.ahead.label}: {line}" for one, edge in edges for line in remarks(one.ahead, edge)):
        console.print(line)
    return status


def remarks(known: SearchPlan, edge: Edge) -> list[str]:
    """Return sentences on why a largest value is not confirmed, and why it was not predicted."""
    lines = []
    if edge.unknown:
        lines.append(f"the search stopped: {edge.unknown}")
    elif edge.bound is None:
        lines.append(f"all values of the range fit, up to {edge.largest:,}; larger ones may fit too")
    elif edge.bound.kind in ("beyond", "inferred"):
        lines.append(str(edge.bound.reason))
    if edge.either_way:
        first, last = edge.either_way
        lines.append(f"results from {first:,} to {last:,} contradict each other: {first:,} did not fit, {last:,} did")
    if known.remark and not _cannot(edge):
        lines.append(f"no maximum was predicted: {known.remark}")
    return lines


def announced(searches: Sequence[Search], axis: str) -> str:
    """Return a line on what a search is going to do, for a sweep that is only planned."""
    most = sum(most_trials(len(one.ahead.values), one.ahead.predicted is not None) for one in searches)
    plural = "s" * (len(searches) != 1)
    return f"the largest {axis} of {len(searches)} configuration{plural}: up to {most} trials, chosen as results come"


def _cannot(edge: Edge) -> bool:
    return edge.largest is None and edge.bound is not None and edge.bound.kind == "beyond"


def _smallest(edge: Edge) -> str:
    if edge.bound is None or edge.smallest is None:
        return "unknown"
    said = {"inferred": " (not run)", "beyond": " (cannot run)"}
    return f"{edge.smallest:,}{said.get(edge.bound.kind, '')}"


def _predicted(known: SearchPlan) -> str:
    if known.predicted is None:
        return "unknown"
    if not known.predicted:
        return "none fits"
    every = f" (all up to {known.every:,})" if known.every != known.predicted else ""
    return f"{known.predicted:,}{every}"


def _plain(one: Search, edge: Edge, axis: str) -> dict[str, Any]:
    sides = [one.trial_ids.get(value) for value in (edge.largest, edge.smallest) if value is not None]
    return {
        "configuration": one.ahead.label,
        "axis": axis,
        **asdict(edge),
        "confirmed": edge.confirmed,
        "trials": one.trials(),
        "predicted": one.ahead.predicted,
        "predicted_every": one.ahead.every,
        "remark": one.ahead.remark,
        "trial_ids": [name for name in sides if name is not None],
    }


def _labels(items: Sequence[Planned], axis: str) -> list[str]:
    """Return a text for each configuration; to equal texts, add what tells them apart."""
    texts, named = [largest_prediction.label(item, axis) for item in items], Labels(items, but=(axis,))
    pairs = zip(texts, items, strict=True)
    return [text if texts.count(text) == 1 else f"{text} · {named(item)}" for text, item in pairs]
