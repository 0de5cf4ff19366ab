"""The page of a comparison: differences in a few words, both sides in one figure, verdicts, each side's answers.

In: a comparison and its two tables. Out: the page.
"""

import copy
from dataclasses import replace

import pandas as pd

from vramsweep.analysis.compare import format_difference, verdicts_text
from vramsweep.analysis.compare.trends import SPEED, Along
from vramsweep.analysis.compare.verdicts import Comparison, Pair
from vramsweep.analysis.data.groups import label
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.figures import overlay
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.report import answer, page, tiles
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.units import format_count, format_size

MOST = 400  # most pairs on the page


def render(found: Comparison, along: Along, sides: tuple[Table, Table]) -> str:
    """Return the page of a comparison of these two tables as text."""
    drawn: Figure | None
    try:
        drawn, undrawn = _in_page(overlay.figure(found, along, sides)), ""
    except UserError as why:
        drawn, undrawn = None, f"No figure: {why}."
    names = (f"A {found.a}", f"B {found.b}")
    called = {name: metric.label for name, metric in METRICS.items()} | {SPEED: "speed"}
    said: dict[str, str] = {}  # allocated and active often change alike
    for of in called:
        for one in verdicts_text.sentences(along, of):
            said.setdefault(one, f"{called[of].capitalize()}: {one}.")
    pairs = found.pairs[:MOST]
    alone = f"; {found.only_a:,} combinations only in A, {found.only_b:,} only in B" if found.unpaired else ""
    scope = f"Over {format_count(len(found.pairs), 'pair')} of equal settings{alone}."
    return page.page(
        "compare", [drawn] if drawn else [], title=f"{found.b} compared with {found.a}",
        question=f"What does {found.b} change compared with {found.a}?",
        scope=scope, answers=_answers(found, _basis(sides)), drawn=drawn, undrawn=undrawn,
        verdicts=_verdicts(found), said=list(said.values()), differs=_differs(found),
        cards=tuple(zip(names, map(answer.brief, sides), strict=True)),
        pairs=pd.DataFrame([_pair(one) for one in pairs]), more=len(found.pairs) - len(pairs), choices=page.NO_CHOICES,
    )  # fmt: skip


def _in_page(drawn: Figure) -> Figure:
    """Return the figure as high as its panels need, with the legend above them."""
    plot = copy.deepcopy(drawn.plot)
    plot.update_layout(
        height=60 + 200 * len(list(plot.select_yaxes())), margin={"l": 68, "r": 12, "t": 64, "b": 56},
        legend={"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0}, showlegend=True,
        paper_bgcolor="rgba(0,0,0,0)",
    )  # fmt: skip
    return replace(drawn, plot=plot)


def _basis(sides: tuple[Table, Table]) -> str:
    """Say what was compared: measured rows, predicted ones, or one with the other."""
    of = [" and ".join(sorted(tiles.kinds(side.frame).unique())) for side in sides]
    return of[0] if of[0] == of[1] else f"{of[1]} compared with {of[0]}"


def _answers(found: Comparison, basis: str) -> list[tiles.Tile]:
    """Return the verdicts in a few words: two memory quantities that were compared, and speed."""
    told = []
    first = ("peak_reserved_bytes", "peak_allocated_bytes")
    for one in sorted(found.memory, key=lambda one: first.index(one.metric) if one.metric in first else len(first)):
        change = "" if one.change is None or one.verdict == "EQUAL" else f", {format_difference.size(one.change)}"
        value = one.verdict.capitalize() + change
        told.append(tiles.Tile(METRICS[one.metric].label.capitalize(), value, "", one.reason, basis))
    speed = found.speed
    change = "" if speed.change is None or speed.verdict == "SAME" else f", {format_difference.speed(speed.change)}"
    timed = "" if speed.change is None else basis
    return [*told[:2], tiles.Tile("Speed", speed.verdict.capitalize() + change, "", speed.reason, timed)]


def _verdicts(found: Comparison) -> pd.DataFrame:
    lines = []
    for one in (*found.memory, *([found.speeds] if found.speeds else [])):
        memory = one.metric in METRICS
        change = format_difference.size if memory else format_difference.speed
        line = {"quantity": METRICS[one.metric].label if memory else "tokens/s", "verdict": one.verdict}
        line["mean B/A"] = "–" if one.change is None else change(one.change)
        ends = [f"{change(end.change)} ({label(end.settings)})" for end in (one.least, one.most) if end is not None]
        lines.append(line | {"from … to": "from " + " to ".join(ends) if ends else "–", "why": one.reason})
    if found.speeds is None:
        lines.append({"quantity": "tokens/s", "verdict": found.speed.verdict, "why": found.speed.reason})
    return pd.DataFrame(lines).fillna("–")


def _differs(found: Comparison) -> pd.DataFrame | None:
    """Return each difference once, because a setting of the trial often repeats what a column says."""
    once: dict[tuple[str, str], str] = {}
    for name, sides in found.differs.items():
        once.setdefault(sides, name)
    lines = [{"setting": answer.axis_name(name), "A": a or "none", "B": b or "none"} for (a, b), name in once.items()]
    return pd.DataFrame(lines) if lines else None


def _pair(one: Pair) -> dict[str, str]:
    line = {"pair": label(one.settings)}
    for m in one.memory:
        ends = ["out of memory" if v is None else format_size(v) for v in (m.a, m.b)]
        line[METRICS[m.metric].label] = f"{m.verdict}: {ends[0]}, {ends[1]}"
    return line | {"speed": f"{one.speed.verdict}: {one.speed.reason}"}
