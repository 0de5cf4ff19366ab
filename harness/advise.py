"""`vramsweep advise`: which changes make a run fit, what each costs, and which to take together.

Every figure is a prediction of its own, a row of the sweep results/MODEL-RUNNER-advice; times are estimates. Not
covered: the changes (remedies.py), how combinations are chosen (advice.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vramsweep.harness import advice, largest, launch, plan, sweep
from vramsweep.harness.advice import Advice, Option
from vramsweep.harness.attempt import Launcher
from vramsweep.harness.errors import UserError
from vramsweep.harness.gpus import memory_limit
from vramsweep.harness.plan import Planned, Settings
from vramsweep.harness.progress import Counts
from vramsweep.harness.remedies import LEVELS, Remedy, applicable, changed, words
from vramsweep.harness.row import Outcome, Row
from vramsweep.harness.trial import Trial

MIB = 1 << 20
GOALS = {"fastest": None, "longest": "seq_len", "largest-batch": "micro_batch"}  # and the axis that each is about
BYTES_A_PARAMETER = 16  # fp32 weights, gradients and two values of Adam's: Rajbhandari et al., arXiv:1910.02054, 3.1
HELP = """\
which changes make a run fit on a card, from predictions: each alone, then together, and what to take

  vramsweep advise model=gpt2 runner=trainer seq_len=512 micro_batch=8 precision=fp32 device.gpu=rtx2070-8gb
  vramsweep advise model=qwen0.5b seq_len=4096 device.memory_gib=12 device.capability=8.6 device.headroom_gib=0.5
  vramsweep advise --goal longest model=llama3-8b runner=torch precision=bf16 device.gpu=h100-80gb

Recommended is what changes least of the result (same, but for rounding, less precision, another training), and of
those the fastest that fits; with --goal longest or largest-batch what takes most. Other words are those of
`vramsweep sweep --help`; rows and traces are kept, so the same command is quick the second time.
Status: 0, there is something that fits; 1, nothing does; 2, a mistake; 130, interrupted."""


@dataclass(frozen=True)
class Reached:
    """How far some remedies together get along a goal's axis; None where nothing fits or nothing is known."""

    option: Option
    value: int | None


def main(argv: Sequence[str]) -> int:
    """The verb; returns the exit status. Raises UserError for what the user can mend."""
    parser = argparse.ArgumentParser(
        prog="vramsweep advise",
        usage="%(prog)s [OPTION ...] [GROUP=OPTION ...] [KEY=VALUE ...]",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--goal", choices=tuple(GOALS), default="fastest", help="what is to be best (default: fastest)")
    parser.add_argument(
        "--most", type=int, default=advice.MOST, metavar="N", help=f"combinations to predict (default: {advice.MOST})"
    )
    parser.add_argument("--json", action="store_true", help="print the data instead of tables")
    options, given = parser.parse_known_args(argv)
    if options.most < 0:
        raise UserError(f"--most {options.most}: allowed is 0 or more")
    other = next((word for word in given if word.partition("=")[0] == "device" and word != "device=simulated"), None)
    if other is not None:
        raise UserError(f"{other}: advice is from predictions; leave it out, device.gpu=NAME says for which card")

    def instead(planned: Sequence[Planned], settings: Settings, folder: Path, launcher: Launcher) -> int:
        if len(planned) != 1:
            raise UserError(f"advise takes one trial, and these are {len(planned)}; give each setting one value")
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            asked = Asked(planned[0], settings, folder, launcher)
            axis = GOALS[options.goal]
            remedies = [one for one in applicable(planned[0].resolved) if axis not in one.change]
            found = advice.search(remedies, asked.predict, asked.limit, options.most)
            reached = [] if axis is None else asked.reach(found, axis)
        said = [word for word in given if word.partition("=")[0] != "device"]
        if options.json:
            print(json.dumps(record(asked, found, axis, reached)))
        else:
            show(asked, found, axis, reached, said, Console())
        return 0 if (best(found, reached) if axis else found.recommended) else 1

    named = any(word.partition("=")[0] == "device" for word in given)
    front = launch.Front("advice", instead=instead)
    return launch.main([*([] if named else ["device=simulated"]), *given], front=front)


class Asked:
    """What advice is asked about: a trial, and where its variants are predicted."""

    def __init__(self, base: Planned, settings: Settings, folder: Path, launcher: Launcher) -> None:
        assert base.trial is not None  # else the sweep would not have begun
        self.base, self.trial, self.folder, self.launcher = base, base.trial, folder, launcher
        self.settings = dataclasses.replace(settings, report=False)
        self.limit = memory_limit(self.trial.device.card)
        self._earlier: list[Planned] = []

    def planned(self, remedies: Sequence[Remedy]) -> Planned:
        """The trial with these remedies; without a trial where they do not go together."""
        [[found]] = plan.expand([changed(self.base.resolved, remedies)], 1)
        return found

    def predict(self, taken: Sequence[tuple[Remedy, ...]]) -> list[Option]:
        """What is predicted of each of these; each is a row of the folder's sweep."""
        planned = [self.planned(remedies) for remedies in taken]
        todo = list({item.trial_id: item for item in planned if item.trial is not None}.values())
        rows: dict[str, Row] = {}
        if todo:
            names = {item.trial_id: _name(remedies) for item, remedies in zip(planned, taken, strict=True)}
            rows, _ = sweep.run(
                todo,
                self.settings,
                self.folder,
                self._earlier,
                self.launcher,
                lambda total: Told(total, names, self.limit),
            )
            self._earlier += todo
        return [option(remedies, item, rows.get(item.trial_id)) for item, remedies in zip(planned, taken, strict=True)]

    def reach(self, found: Advice, axis: str) -> list[Reached]:
        """How far the run as it is gets along the axis, what is recommended, and what needs least in each level."""
        smallest = [
            min(own, key=lambda one: (one.need or 0, len(one.remedies)))
            for level in range(len(LEVELS))
            if (own := [one for one in found.tried if one.level == level and one.need is not None])
        ]
        wanted = [one for one in (found.base, found.recommended, *smallest) if one is not None]
        distinct = list({one.remedies: one for one in wanted}.values())
        planned = [self.planned(one.remedies) for one in distinct]
        answers = largest.find(planned, self.settings, self.folder, self.launcher, axis, None, every=False)
        return [
            Reached(one, answer["largest"] if answer["reason"] is None else None)
            for one, (_, answer) in zip(distinct, answers, strict=True)
        ]


class Told(Counts):
    """A line for each prediction, by the changes that it is of."""

    def __init__(self, total: int, names: Mapping[str, str], limit: int) -> None:
        super().__init__(total)
        self._names, self._limit = names, limit

    def show(self, row: Row, item: Planned) -> None:
        """Count the row and print its line."""
        self.add(row)
        need = needed(row)
        said = str(row["reason"]) if need is None else f"{need / MIB:,.0f} MiB{' fits' if need <= self._limit else ''}"
        print(f"[{self.done}/{self.total}] {self._names[item.trial_id]}: {said}", flush=True)

    def close(self) -> None:
        """Nothing."""


def option(remedies: tuple[Remedy, ...], item: Planned, row: Row | None) -> Option:
    """What a row says of these remedies; `row` is None where there is none."""
    if item.trial is None or row is None:
        return Option(remedies, None, None, item.reason or "there is no answer")
    need = needed(row)
    if need is None:
        return Option(remedies, None, None, str(row["reason"]))
    step = row.get("calibrated_step_s") or row.get("estimated_step_s")
    return Option(remedies, need, step and step / item.trial.tokens_per_step())


def needed(row: Row) -> int | None:
    """What a run reserves at most, in bytes, if need be without a limit; None where it is not known."""
    if row["outcome"] == Outcome.OOM:
        return row.get("unlimited_peak_reserved_bytes")
    found: int | None = row.get("peak_reserved_most_bytes") or row.get("peak_reserved_bytes")
    return found if row["outcome"] == Outcome.OK else None


def best(found: Advice, reached: Sequence[Reached]) -> Reached | None:
    """What gets furthest; of equals what changes least of the result."""
    known = [one for one in reached if one.value is not None]
    return max(known, key=lambda one: (one.value or 0, -one.option.level, -len(one.option.remedies)), default=None)


def record(asked: Asked, found: Advice, axis: str | None, reached: Sequence[Reached]) -> dict[str, Any]:
    """What `--json` prints; sizes in bytes, times in seconds a token."""

    def plain(one: Option | None) -> dict[str, Any] | None:
        if one is None:
            return None
        return {
            "change": [remedy.words for remedy in one.remedies],
            "reserved_bytes": one.need,
            "estimated_seconds_a_token": one.seconds,
            "fits": one.fits(found.limit),
            "result": LEVELS[one.level],
            "reason": one.reason,
        }

    goal = best(found, reached)
    return {
        "trial": asked.base.resolved,
        "memory_limit_bytes": found.limit,
        "as_it_is": plain(found.base),
        "alone": [plain(one) for one in found.singles],
        "front": [plain(one) for one in found.front],
        "recommended": plain(goal.option if goal else None) if axis else plain(found.recommended),
        "nearest": plain(found.nearest),
        "tried": len(found.tried),
        "combinations": found.space,
        **({axis: [{"largest": one.value} | (plain(one.option) or {}) for one in reached]} if axis else {}),
    }


def show(
    asked: Asked, found: Advice, axis: str | None, reached: Sequence[Reached], given: Sequence[str], console: Console
) -> None:
    """Print advice."""
    trial, card = asked.trial, asked.trial.device.card
    spare = f", {card.headroom_gib:g} GiB of headroom" if card.headroom_gib else ""
    console.print(f"\n[bold]{escape(trial.label())}[/]  {card.name}: {found.limit / MIB:,.0f} MiB{spare}")
    if found.base.need is None:
        console.print(f"cannot be predicted: {escape(str(found.base.reason))}\n{exact(trial)}")
        return
    console.print(_as_it_is(found))
    console.print(_alone(found))
    left_out = [one for one in found.singles if one.need is None]
    for one in left_out:
        console.print(f"[dim]left out: {escape(_name(one.remedies))}: {escape(str(one.reason))}[/]")
    if found.front:
        console.print(_front(found))
    if len(found.tried) + len(left_out) < found.space:
        rest = found.space - len(found.tried)
        console.print(f"[dim]Not tried: {rest:,} of {found.space:,} combinations (--most N predicts more).[/]")
    if axis:
        console.print(_reached(reached, axis))
    goal = best(found, reached)
    chosen = (goal.option if goal else None) if axis else found.recommended
    if chosen is None:
        console.print(_nearest(found))
        return
    more = [f"{axis}={goal.value}"] if axis and goal else []
    ours = (axis, "name", "results")
    said = [word for word in given if not word.startswith("device.") and word.partition("=")[0] not in ours]
    command = shlex.join(["vramsweep", "sweep", *words([*said, *more], chosen.remedies)])
    console.print(
        f"[bold]Recommended: {escape(_name(chosen.remedies))}[/] ({LEVELS[chosen.level]})\n"
        f"to be confirmed by measuring it: {escape(command)}",
        soft_wrap=True,
    )


def exact(trial: Trial) -> str:
    """What is known of a model that cannot be traced."""
    count = trial.model.parameters
    if count is None:
        return "How many parameters it has is not known either: nothing can be said without measuring."
    return (
        f"What is known without: {count:,} parameters, {BYTES_A_PARAMETER} bytes each in fp32 with gradients and "
        f"AdamW's state: {BYTES_A_PARAMETER * count / MIB:,.0f} MiB, and activations beside; measure the rest."
    )


def _as_it_is(found: Advice) -> str:
    need = found.base.need or 0
    if found.base.fits(found.limit):
        return f"fits as it is: {need / MIB:,.0f} MiB reserved at most"
    return f"does not fit: {need / MIB:,.0f} MiB, {(need - found.limit) / MIB:,.0f} too many"


def _alone(found: Advice) -> Table:
    table = Table(title="Each change alone", title_justify="left", box=SIMPLE_HEAD)
    for name in ("change", "MiB", "saves", "fits", "time, estimated", "changes of the result"):
        table.add_column(name, justify="right" if name in ("MiB", "saves", "time, estimated") else "left")
    known = [one for one in found.singles if one.need is not None]
    for one in sorted(known, key=lambda one: one.need or 0):
        table.add_row(_name(one.remedies), *_cells(one, found), _changes(one))
    return table


def _front(found: Advice) -> Table:
    table = Table(title="What fits and nothing beats in both, the fastest first", title_justify="left", box=SIMPLE_HEAD)
    for name in ("changes", "MiB", "saves", "fits", "time, estimated", "changes of the result"):
        table.add_column(name, justify="right" if name in ("MiB", "saves", "time, estimated") else "left")
    for one in found.front:
        table.add_row(_name(one.remedies), *_cells(one, found), _changes(one))
    return table


def _reached(reached: Sequence[Reached], axis: str) -> Table:
    table = Table(title=f"How far it goes: the largest {axis} that fits", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("changes")
    table.add_column(axis, justify="right")
    table.add_column("changes of the result")
    for one in sorted(reached, key=lambda one: -(one.value or 0)):
        value = "none" if one.value is None else f"{one.value:,}"
        table.add_row(_name(one.option.remedies), value, _changes(one.option))
    return table


def _cells(one: Option, found: Advice) -> tuple[str, str, str, str]:
    need, before = one.need or 0, found.base.need or 0
    ratio = one.seconds / found.base.seconds if one.seconds and found.base.seconds else None
    time = "not known" if ratio is None else f"x {ratio:.2f}"
    return f"{need / MIB:,.0f}", f"{(before - need) / MIB:+,.0f}", "yes" if one.fits(found.limit) else "no", time


def _changes(one: Option) -> str:
    return "; ".join(filter(None, (remedy.result for remedy in one.remedies))) or LEVELS[one.level]


def _nearest(found: Advice) -> str:
    nearest = found.nearest
    if nearest is None:
        return "nothing is known to fit"
    need, name = nearest.need or 0, escape(_name(nearest.remedies))
    over = (need - found.limit) / MIB
    return f"[bold]Nothing fits.[/] The nearest is {name}: {need / MIB:,.0f} MiB, {over:,.0f} too many"


def _name(remedies: Sequence[Remedy]) -> str:
    return " ".join(one.words for one in remedies) or "as it is"
