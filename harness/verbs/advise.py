"""`vramsweep advise`: the changes that make a run fit, the cost of each, and the best combination.

Every figure is a prediction of its own, a row of the sweep results/MODEL-RUNNER-advice; times are estimates.
harness/questions/advice.py chooses what is predicted and which combination is best.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from vramsweep.harness.messages.console import Console, make_table
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import choose_unit, format_gib, format_in
from vramsweep.harness.questions import advice, trace_query
from vramsweep.harness.questions.advice import AdviceRequest, ReachedLimit
from vramsweep.harness.search.advice_search import ACCEPTED, LEVELS, METHOD, MOST, Advice, MemorySaving, Option, words
from vramsweep.harness.spec import fit_text
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.session import refuse_invalid
from vramsweep.harness.verbs.cli import GOALS, read_parser

TIME = "est. time"  # a column
BYTES_A_PARAMETER = 16  # fp32 weights, gradients and Adam's two moments: Rajbhandari et al., arXiv:1910.02054, 3.1


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep advise`; return the exit status. Raises UserError for a mistake that the user can fix."""
    options, given = read_parser("advise").parse_known_args(argv)
    if options.most < 0:
        raise UserError(f"--most is {options.most}; it must be 0 or more")
    other = next((word for word in given if word.partition("=")[0] == "device" and word != "device=simulated"), None)
    if other is not None:
        raise UserError(f"advise only predicts, so it takes no {other}; leave it out, and set the GPU with gpu=NAME")
    axis, level = GOALS[options.goal], METHOD if options.accept is None else ACCEPTED.index(options.accept)
    if (answer := ask(given, axis, level, options.most, quiet=options.json)) is None:
        return 0
    asked, found, reached = answer
    said = [word for word in given if word.partition("=")[0] != "device"]
    if options.json:
        print(json.dumps(record(asked, found, reached)))
    else:
        show(asked, found, reached, said, Console(markup=True))
    return 0 if (advice.best(reached) if axis else found.recommended) else 1


def ask(
    given: Sequence[str], axis: str | None = None, level: int = METHOD, most: int = MOST, quiet: bool = False
) -> tuple[AdviceRequest, Advice, list[ReachedLimit]] | None:
    """Return advice on the one trial that the words name; None if they only ask for help. Raises UserError.

    `quiet`: progress goes to standard error.
    """
    from vramsweep.harness.config import compose  # here, because it imports Hydra, which no refusal needs

    with compose.resolve(trace_query.spelled(given), "advise", suffix="advice") as session:
        if session.settings is None:
            return None
        refuse_invalid(p.reason for p in session.trials)
        if len(session.trials) != 1:
            raise UserError(f"advise takes one trial, not {len(session.trials)}; give each setting one value")
        with contextlib.redirect_stdout(sys.stderr) if quiet else contextlib.nullcontext():
            asked = AdviceRequest(
                session.trials[0], session.settings, session.folder, session.start(), axis, session.command
            )
            return asked, *advice.ask_predictions(asked, level, most)


def record(asked: AdviceRequest, found: Advice, reached: Sequence[ReachedLimit]) -> dict[str, Any]:
    """Return what `--json` prints; sizes in bytes, times in seconds a token."""

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

    axis, goal = asked.axis, advice.best(reached)
    return {
        "trial": asked.base.resolved,
        "memory_limit_bytes": found.limit,
        "as_it_is": plain(found.base),
        "padding": asked.padding or None,
        "alone": [plain(one) for one in found.singles],
        "front": [plain(one) for one in found.front],
        "recommended": plain(goal.option if goal else None) if axis else plain(found.recommended),
        "nearest": plain(found.nearest),
        "on_gpus": [plain(one) for one in found.on_gpus],
        "tried": len(found.tried),
        "combinations": found.space,
        **({axis: [{"largest": one.value} | (plain(one.option) or {}) for one in reached]} if axis else {}),
    }


def show(
    asked: AdviceRequest, found: Advice, reached: Sequence[ReachedLimit], given: Sequence[str], console: Console
) -> None:
    """Print advice as tables and text."""
    trial, card, axis = asked.trial, asked.trial.device.card, asked.axis
    spare = f", {card.headroom_gib:g} GiB of headroom" if card.headroom_gib else ""
    console.print(
        f"\n[bold]{escape(fit_text.describe_run(trial))}[/], predicted; limit {format_gib(found.limit)} GiB{spare}"
    )
    if axis:
        console.print(f"goal: largest {axis} that fits, up to {asked.most:,}; changes are compared for the run above")
    if found.base.need is None and not found.base.full:
        console.print(f"no prediction: {escape(str(found.base.reason))}\n{exact(trial)}")
        return
    if found.base.fits(found.limit):
        console.print(f"unchanged, it {fit_text.describe_fit(found.base.least, found.base.need or 0, found.limit)}")
    else:
        console.print(f"unchanged, it {escape(_too_much(found.base, found.limit))}")
    for text in fit_text.list_exclusions(trial):
        console.print(escape(f"not included: {text}"))
    if asked.padding:
        console.print(escape(asked.padding), soft_wrap=True)
    if found.base.seconds is None:
        console.print("step times are unknown here; fewer FLOPs count as faster, then fewer kernel launches")
    alone = sorted((one for one in found.singles if one.need is not None), key=lambda one: one.need or 0)
    console.print(_compared("Each change alone", alone, found))
    known = [remedy for one in found.singles if one.need is not None for remedy in one.remedies if remedy.result]
    if known:
        console.print("[dim]result: the same, or changed by rounding, less precision, or another training method[/]")
    for remedy in known:
        console.print(f"[dim]{escape(remedy.words)}: {escape(remedy.result)}[/]")
    for one in (one for one in (*found.singles, *found.on_gpus) if one.need is None):
        console.print(f"[dim]left out: {escape(_name(one.remedies))}: {escape(str(one.reason))}[/]")
    if found.front:
        console.print(_compared("These fit, fastest first; no other is both smaller and faster", found.front, found))
    if (rest := found.space - len(found.tried)) > 0:
        console.print(f"[dim]Not tried: {rest:,} of {found.space:,} combinations (--most N predicts more).[/]")
    if axis:
        console.print(_reached(found, reached, axis))
    if found.on_gpus:
        predicted = [one for one in found.on_gpus if one.need is not None]
        console.print(_compared("Divided among GPUs: memory per GPU", predicted, found))
    for one in found.fitting_gpus:  # only the last may also fit what is not included
        change, tight = one.remedies[0].change, "" if one.fits_well(found.limit) else f", excluding {fit_text.NO_ROOM}"
        gpus = f"the run fits on {change['world_size']} x {card.name} with {change['sharding']}"
        console.print(f"{gpus} ({one.remedies[0].result}){tight}", soft_wrap=True)
    goal = advice.best(reached)
    chosen = (goal.option if goal else None) if axis else found.recommended
    if chosen is None:
        near = found.nearest
        why = "" if near is None else f"Closest: {_name(near.remedies)}, which {_too_much(near, found.limit)}"
        console.print("nothing is known to fit" if near is None else f"[bold]Nothing fits.[/] {escape(why)}")
        return
    more = [f"{axis}={goal.value}"] if axis and goal else []
    ours = (axis, "name", "results", "gpu")
    said = [word for word in given if not word.startswith("device.") and word.partition("=")[0] not in ours]
    command = shlex.join(["vramsweep", "sweep", *words([*said, *more], chosen.remedies), "device=cuda"])
    fits = fit_text.describe_fit(chosen.least, chosen.need or 0, found.limit)
    if axis and goal and goal.value:  # its need there is unknown, but within the limit
        fits = f"predicted to fit up to {axis}={goal.value:,}{', the largest value tried' * (goal.value >= asked.most)}"
    console.print(
        f"[bold]Recommended: {escape(_name(chosen.remedies))}[/] ({LEVELS[chosen.level]}); {fits}\n"
        f"measure it to confirm: {escape(command)}",
        soft_wrap=True,
    )
    if chosen.beside:
        more_room = fit_text.COMMUNICATION if not axis and chosen.fits_well(found.limit) else fit_text.NO_ROOM
        console.print(f"not included: {more_room}", soft_wrap=True)


def exact(trial: Trial) -> str:
    """Describe what is known of a model that cannot be traced."""
    if (count := trial.model.parameters) is None:
        return "Its number of parameters is unknown too, so only a measurement can tell what it needs."
    plain = {"precision": "fp32", "optimizer": "default", "adapter": "none", "quantization": "none", "sharding": "none"}
    other = ", ".join(f"{name}={value}" for name, own in plain.items() if (value := getattr(trial, name)) != own)
    return (
        f"In fp32 its {count:,} parameters need {BYTES_A_PARAMETER} bytes each, gradients and AdamW's state included: "
        f"{format_gib(BYTES_A_PARAMETER * count)} GiB{f' (ignoring {other})' if other else ''}. Activations come on "
        "top; measure the run to know them."
    )


def _too_much(one: Option, limit: int) -> str:
    """Describe how far an option is from fitting, or why it does not fit."""
    return f"does not fit: {one.reason}" if one.reason else fit_text.describe_misfit(one.need, limit)


def _compared(title: str, options: Sequence[Option], found: Advice) -> Table:
    before, unit = found.base.need or 0, choose_unit(max(one.need or 0 for one in (*found.tried, *found.on_gpus)))
    figures = (f"peak {unit}", f"saves {unit}", "fits", TIME)
    table = make_table(("changes", *figures, "result"), title=title, numbers=figures)
    for one in options:
        fits = "yes" if one.fits_well(found.limit) else "just" if one.fits(found.limit) else "no"
        sizes = (one.need or 0, before - (one.need or 0))
        cells = (*(format_in(unit, size) for size in sizes), fits, _compare_time(one, found))
        table.add_row(_name(one.remedies), *cells, ACCEPTED[one.level])
    return table


def _reached(found: Advice, reached: Sequence[ReachedLimit], axis: str) -> Table:
    title = f"The largest {axis} that fits with each change"
    table = make_table(("changes", axis, TIME, "result"), title=title, numbers=(axis, TIME))
    for one in sorted(reached, key=lambda one: -(one.value or 0)):
        value = "none" if one.value is None else f"{one.value:,}"
        table.add_row(_name(one.option.remedies), value, _compare_time(one.option, found), ACCEPTED[one.option.level])
    return table


def _compare_time(one: Option, found: Advice) -> str:
    ratio = one.seconds / found.base.seconds if one.seconds and found.base.seconds else None
    return "unknown" if ratio is None else f"x {ratio:.2f}"


def _name(remedies: Sequence[MemorySaving]) -> str:
    return " ".join(one.words for one in remedies) or "no change"
