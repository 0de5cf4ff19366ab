"""A planned sweep on a screen: what all trials have in common, a line for each configuration, and the trials that
cannot run with their reasons. Pure; plan_preview.py has the expected times.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType

from vramsweep.harness.messages.console import make_table
from vramsweep.harness.messages.units import duration_words
from vramsweep.harness.sweep.budget import Expected
from vramsweep.harness.sweep.labels import CALLED, WITHIN, Labels, describe_common, varying
from vramsweep.harness.sweep.plan import Planned

MOST = 24  # configurations listed
NAMED = 3  # trials listed for each reason why they cannot run


@dataclass(frozen=True)
class Line:
    """The trials of one configuration that can run: their lengths and batches, how many are to do and how many are
    finished, and the seconds of those to do (None: unknown)."""

    label: str
    ranges: Mapping[str, str]
    states: Mapping[str, int]
    seconds: float | None


def lines(
    planned: Sequence[Planned], todo: Iterable[str], total: Callable[[Sequence[Planned]], Expected]
) -> list[Line]:
    """Return a line for each configuration, in the order of their first trials. `todo` are the ids of trials to do;
    `total` returns the time of several trials."""
    todo = set(todo)
    named = Labels(planned, WITHIN)
    axes = [key for key in WITHIN if key in varying(planned)]
    by_label: dict[str, list[Planned]] = {}
    for p in planned:
        if p.trial is not None:
            by_label.setdefault(named.apart(p), []).append(p)
    found = []
    for label, items in by_label.items():
        mine = [p for p in items if p.trial_id in todo]
        found.append(Line(
            label,
            {key: _range([p.resolved[key] for p in items]) for key in axes if key in items[0].resolved},
            Counter("to do" if p.trial_id in todo else "finished" for p in items),
            total(mine).seconds,
        ))  # fmt: skip
    return found


def refused(planned: Sequence[Planned]) -> dict[str, list[str]]:
    """Return the names of the trials that cannot run, by reason."""
    named, found = Labels(planned), dict[str, list[str]]()
    for p in planned:
        if p.trial is None:
            found.setdefault(str(p.reason), []).append(named(p))
    return found


def show_plan(planned: Sequence[Planned], told: Sequence[Line]) -> RenderableType:
    """Return the whole summary for a terminal."""
    axes = list(dict.fromkeys(key for line in told for key in line.ranges))
    numbers = ("to do", "finished", "time")
    heads = ("configuration", *(CALLED.get(axis, axis.removesuffix(".name")) for axis in axes), *numbers)
    table = make_table(heads, numbers=numbers)
    for line in told[:MOST]:
        counts = [str(line.states.get(state, 0) or "–") for state in ("to do", "finished")]
        took = "?" if line.seconds is None else f"~ {duration_words(line.seconds)}" if line.states.get("to do") else "–"
        table.add_row(line.label or "all", *(line.ranges.get(axis, "–") for axis in axes), *counts, took)
    parts: list[RenderableType] = [describe_common(planned)]
    parts += [table] if told else []
    parts += [f"and {len(told) - MOST} more configurations; --all prints every trial"] if len(told) > MOST else []
    for reason, labels in refused(planned).items():
        more = f" and {len(labels) - NAMED:,} more" if len(labels) > NAMED else ""
        parts.append(f"{len(labels):,} cannot run: {reason} ({', '.join(labels[:NAMED])}{more})")
    return Group(*parts)


def _range(values: Sequence[object]) -> str:
    """Describe values: all of them if they are few, else the ends."""
    distinct = list(dict.fromkeys(values))
    if all(type(value) is int for value in distinct):
        distinct = sorted(distinct, key=lambda value: int(str(value)))
    texts = [f"{value:,}" if type(value) is int else str(value) for value in distinct]
    return ", ".join(texts) if len(texts) <= 4 else f"{texts[0]} to {texts[-1]} ({len(texts):,})"
