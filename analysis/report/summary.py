"""A finished sweep on one screen: a row for each configuration, three findings, and where things are.

In: rows alone. Out: a `Summary` and its text, at the largest length (or batch) of each configuration that fitted; – is
unknown. Curves and intervals are in the report and `vramsweep fit`; answers of presets are in analysis/answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.table import Table as Grid

from vramsweep.analysis.compare import format_difference
from vramsweep.analysis.data.groups import OPTIONS, Group, groups, label
from vramsweep.analysis.data.load import EXTRA, Table
from vramsweep.analysis.data.warnings_of_rows import left_out, records
from vramsweep.analysis.report.findings import name_source, values
from vramsweep.analysis.report.own_axis import LENGTHS, SAMPLES, reword
from vramsweep.analysis.report.picker import order
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.spec.not_covered import EAGER, describe
from vramsweep.harness.spec.techniques.catalog import AXES, DEFAULTS
from vramsweep.harness.sweep import result_table
from vramsweep.harness.sweep.result_table import Line

LOOKED = 200  # most configurations that are considered
WIDTH = 110  # columns, where the output is no terminal
ROOM = 13  # lines of the table
LEAST = 0.02  # share of memory that a change must save to be a finding
UNITS = {"seq_len": "tokens", "micro_batch": "samples"}
BASES = ("peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes")
# Settings that a user may change and still train the same model: no model, GPU, data or version.
CHANGES = (
    "precision", "allocator", "allocator_conf", "sharding", "offload_optimizer", "offload_param", "zero_init",
    *(axis.name for axis in AXES if axis.name != "precision"),
)  # fmt: skip
PLAIN = DEFAULTS | {"allocator": "default", "sharding": "none", "precision": "fp32"}


@dataclass(frozen=True)
class Summary:
    """A finished sweep. `tried` and `fits` of its lines are values of `axis`. `more` counts the configurations that
    were not considered."""

    title: str
    axis: str
    lines: tuple[Line, ...]
    more: int
    findings: tuple[str, ...]


def summary(table: Table, beyond: str = "") -> Summary:
    """Return what the rows come to; `beyond` is what a curve says of lengths that were not tried."""
    axis = result_table.choose_axis(records(table.frame[["seq_len", "micro_batch"]]))
    found = groups(table, axis)
    frames = [
        group.take(*result_table.COLUMNS, *table.frame.columns.intersection([LENGTHS])) for group in found[:LOOKED]
    ]
    if table.axis != "seq_len":
        axis = "micro_batch" if table.axis == SAMPLES else OPTIONS + table.axis.strip("{}")
        frames = [
            one.assign(**{axis: one["seq_len"], "seq_len": one[LENGTHS] if table.tokens else 1}) for one in frames
        ]
    lines = [
        result_table.summarize_rows(
            group.label, records(frame), axis, predicted=_predicted(group), resident=group.resident,
            varies=group.varies, most=group.positions,
        )
        for group, frame in zip(found, frames, strict=False)
    ]  # fmt: skip
    if len(lines) == 1 and lines[0].label == "all rows":
        known = (table.frame[name].iloc[0] for name in ("model", "runner", "precision"))
        lines = [replace(lines[0], label=" · ".join(str(one) for one in known if not pd.isna(one)) or lines[0].label)]
    keys = [[order(str(value)) for value in group.settings.values()] for group in found]
    shown = [line for _, line in sorted(zip(keys, lines, strict=False), key=lambda pair: pair[0])]
    reached = {(line.fits, group.positions) for line, group in zip(lines, found, strict=False) if line.fits is not None}
    if axis == "seq_len" and len(reached) == 1 and len({*reached.pop()}) == 1:  # every configuration uses all positions
        beyond = "The model has no more positions."
    findings = [*_fits(lines, axis, frames, beyond), *_changes(found, frames, axis)]
    findings += [*_fastest(lines), *_waste(lines)]
    return Summary(_title(table), axis, tuple(shown), len(found) - len(lines), tuple(reword(findings[:3], table)))


def text(found: Summary, width: int) -> str:
    """Return the summary for a terminal of `width` columns."""
    console = Console(width=width, color_system=None, force_terminal=False)
    grid, notes = result_table.make_result_table(found.lines, found.axis, width, ROOM, found.more)
    with console.capture() as captured:
        console.print(found.title)
        console.print()
        if found.lines:
            console.print(grid)
        for note in notes:
            console.print(note)
        console.print()
        for number, finding in enumerate(found.findings, 1):
            bullet = Grid.grid(padding=(0, 1, 0, 0))
            bullet.add_row(f"{number}.", finding)
            console.print(bullet)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def _title(table: Table) -> str:
    """Return the sweep's name, how its trials ended, and where it ran or what it is predicted for."""
    frame = table.frame
    sweeps = frame["sweep"].dropna().unique()
    name = str(sweeps[0]) if len(sweeps) == 1 else name_source(table)
    ended = frame["outcome"].fillna("unknown").value_counts()
    came = " · ".join(f"{count:,} {kind}" for kind, count in ended.items())
    predicted = frame["device"].eq("simulated").fillna(False)
    cards = [f"predicted for {values(frame[predicted], 'simulated_gpu', 3)}"] if predicted.any() else []
    measured = frame[~predicted & frame["foreign"].isna()]
    on = values(measured, "gpu_name", 3) or values(measured, "cpu_name", 3)
    if len(measured) and on:
        cards.insert(0, f"measured on {on}")
    eager = [f"not covered: {describe(EAGER)}"] * (EAGER in left_out(frame))
    return "\n".join([*eager, f"{name}: {came}", *(["; ".join(cards)] if cards else [])])


def _predicted(group: Group) -> bool:
    return bool(group.take("device")["device"].eq("simulated").fillna(False).all())


def _fits(lines: Sequence[Line], axis: str, frames: Sequence[pd.DataFrame], beyond: str) -> list[str]:
    """Say what fits: the largest length or batch, and whether anything did not."""
    known = [line for line in lines if line.fits is not None and line.tried is not None]
    if (best := max(known, key=lambda line: line.fits or 0, default=None)) is None:
        return []
    unit = UNITS.get(axis, "tokens")
    predicted = " (predicted)" if all(line.predicted for line in known) else ""
    nothing = sum(line.fits == 0 for line in known)
    if not best.fits:
        needs = min((v for frame in frames for v in frame["unlimited_peak_reserved_bytes"].dropna()), default=None)
        least = "" if needs is None else f"; the smallest would reserve {format_size(float(needs))}"
        return [f"Nothing that was tried fits{predicted}{least}."]
    ties = [line for line in known if line.fits == best.fits]
    which = f" ({best.label})" if len(ties) == 1 else f" ({len(ties)} of {len(known)} configurations)"
    which = "" if len(ties) == len(known) else which
    if all(line.fits == line.tried and not line.torn for line in known):
        return [
            f"All that was tried fits{predicted}: up to {best.fits:,} {unit}{which}. {beyond or 'More was not tried.'}"
        ]
    text = f"Up to {best.fits:,} {unit} fit{predicted}{which}"
    short = (line for line in known if line.fits != line.tried or line.torn)  # in the others more may fit
    if (worst := min(short, key=lambda line: line.fits or 0)).fits == best.fits:
        return [f"{text}; up to {max(line.tried or 0 for line in known):,} were tried."]
    if nothing > 1:
        return [f"{text}; in {nothing} of {len(known)} configurations nothing fits."]
    return [f"{text}, least with {worst.label}: {f'{worst.fits:,} {unit}' if worst.fits else 'nothing'}."]


def _changes(found: Sequence[Group], frames: Sequence[pd.DataFrame], axis: str) -> list[str]:
    """Name the one setting that saves most memory while all others equal the reference's, at the largest that both ran.

    The reference is the plainest configuration. Measured savings come before predicted ones.
    """
    looked = list(found[: len(frames)])
    if not looked:
        return []
    base = max(looked, key=lambda one: sum(one.apart.get(name) == PLAIN.get(name, "") for name in one.apart))
    best: tuple[bool, float, str] | None = None
    for number, other in enumerate(looked):
        differs = [name for name in base.apart if base.apart[name] != other.apart.get(name)]
        if len(differs) != 1 or not (differs[0] in CHANGES or differs[0].startswith((EXTRA + OPTIONS, OPTIONS))):
            continue
        rest = {key: value for key, value in base.apart.items() if key != differs[0]}
        told = _saves(found, frames, (looked.index(base), number), differs[0], rest, axis)
        if told is not None and (best is None or told[:2] > best[:2]):
            best = told
    return [best[2]] if best else []


def _saves(
    found: Sequence[Group], frames: Sequence[pd.DataFrame], pair: tuple[int, int], name: str, rest: Mapping[str, Any],
    axis: str,
) -> tuple[bool, float, str] | None:  # fmt: skip
    """Return whether the second group is measured, which share of memory it saves, and a sentence on it. Return None if
    the share is little or unknown."""
    sides = [frames[n][frames[n]["outcome"].eq("ok").fillna(False).to_numpy(bool)] for n in pair]
    resident = any(found[n].resident for n in pair)
    base = next((b for b in ("peak_reserved_bytes", *BASES[:2]) if not (resident and b == "peak_reserved_bytes")
                 and all(side[b].notna().any() for side in sides)), None)  # fmt: skip
    if base is None:
        return None
    if not (common := set.intersection(*(set(side.dropna(subset=[base, axis])[axis]) for side in sides))):
        return None
    at = [side[side[axis].eq(max(common)).fillna(False).to_numpy(bool)] for side in sides]
    before, after = (float(side[base].median()) for side in at)
    if not before or 1 - after / before < LEAST:
        return None
    middle = [side.groupby(axis)[base].median().astype(float) for side in sides]
    shares = (1 - middle[1] / middle[0]).dropna()
    lowest: Any = shares.idxmin()
    least = "" if shares.min() > 0 else f"; {-100 * shares.min():+.0f} % at {label({axis: int(lowest)})}"
    was, now = (label({name: found[n].settings[name]}) for n in pair)
    ends = " to ".join(format_difference.in_bytes(before, after, signed=False))
    where = label({axis: int(max(common))} | dict(rest))
    kind = base.removeprefix("peak_").removesuffix("_bytes")
    limited = any(side["bound_by"].eq("host").fillna(False).any() for side in at)  # then the hosts are compared
    speeds = [float(known.median()) if len(known := side["tokens_per_s"].dropna()) else None for side in at]
    said = f"; {100 * (speeds[1] / speeds[0] - 1):+.0f} % tokens/s" if speeds[0] and speeds[1] and not limited else ""
    predicted = _predicted(found[pair[1]])
    saved, how = 1 - after / before, ", predicted" * predicted
    text = f"{now} instead of {was} saves {100 * saved:.0f} %: {ends} {kind}{how} at {where}{least}{said}."
    return not predicted, saved, text


def _waste(lines: Sequence[Line]) -> list[str]:
    """Name the configuration that reserves most in relation to what is allocated."""
    worst = max(lines, key=lambda line: line.reserved_over_allocated or 0, default=None)
    if worst is None or (worst.reserved_over_allocated or 0) < 1 + LEAST:
        return []
    predicted = " (predicted)" if worst.predicted else ""
    return [f"Reserved is up to {worst.reserved_over_allocated:.2f} x allocated{predicted}: {worst.label}."]


def _fastest(lines: Sequence[Line]) -> list[str]:
    """Name the highest measured speed at the largest that fits."""
    known = [line for line in lines if line.tokens_per_s is not None and not line.estimated]
    best = max(known, key=lambda line: line.tokens_per_s or 0, default=None)
    if best is None:
        return []
    limited = ", bound by the host" * best.host_bound
    return [f"Fastest at the largest that fits: {best.tokens_per_s:,.0f} tokens/s ({best.label}{limited})."]
