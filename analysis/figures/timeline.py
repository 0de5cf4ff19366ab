"""Figures from event to event: a step's timeline, memory stacked by what it is for, and its peak; and a replayed
recording, reserved memory under each setting.

In: the data of `vramsweep timeline --json` (harness/verbs/timeline.py, runners/predict/memory_timeline.py), with sizes
in bytes.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.parts import called as of_part
from vramsweep.analysis.figures import plots
from vramsweep.analysis.figures.composition import PARTS
from vramsweep.analysis.figures.plots import COLOURS, GREY, INK, Figure, axis_unit, escape, new_plot, sentence
from vramsweep.harness.files.file_names import make_safe
from vramsweep.harness.files.sweep_folder import own_files
from vramsweep.harness.messages.units import format_gib, format_size
from vramsweep.harness.process.interpreter import build_command

HEADROOM = 1.3  # of the y axis over what is drawn, for the names of phases and the peak
_WIDTH = 300  # px of the plot in one column of a paper, where names of phases must not overlap


def of_timeline(record: Mapping[str, Any]) -> Figure:
    """Draw one step: areas by category that sum to allocated, reserved above, phases, limit, peak."""
    data, told = record["timeline"], label(record["about"])
    peak, failure, limit = data["peak"], data["failure"], data["limit"]
    event = np.array(data["event"])
    reserved = np.array(data["reserved"])
    reach = float(reserved.max())
    limited = limit is not None and (failure is not None or reach > limit / 2)
    reach = max(reach, limit) if limited else reach
    unit, called = axis_unit(reach)
    said = f"%{{y:,.2f}} {called}"
    plot = new_plot("allocation or free, in order (not in time)", f"memory ({called})")
    for name, colour in PARTS.items():
        if (sizes := np.array(data["parts"][name])).any():
            thin = float(sizes.max()) < reach / 300  # too thin to be in the legend
            plot.add_scatter(
                x=event, y=sizes / unit, name=of_part(name), stackgroup="held", mode="lines",
                line={"width": 0 if thin else 0.8, "shape": "hv", "color": colour}, fillcolor=colour,
                showlegend=not thin, hovertemplate=said,
            )  # fmt: skip
    plot.add_scatter(
        x=event, y=np.array(data["allocated"]) / unit, name="allocated", mode="lines", showlegend=False,
        line={"width": 0, "shape": "hv", "color": "rgba(0,0,0,0)"}, hovertemplate=said,
    )  # fmt: skip
    plot.add_scatter(
        x=event, y=reserved / unit, name="reserved", mode="lines",
        line={"width": 2, "shape": "hv", "color": GREY}, hovertemplate=said,
    )  # fmt: skip
    plot.update_yaxes(range=[0, reach * HEADROOM / unit])
    plot.update_xaxes(range=[0, max(data["events"], 1)])
    plot.update_layout(showlegend=True, hovermode="x unified", legend={"traceorder": "normal"})
    _phases(plot, data["phases"], data["events"])
    right = peak["event"] > data["events"] / 2
    plot.add_scatter(
        x=[peak["event"]], y=[peak["allocated"] / unit], mode="markers", name="peak", showlegend=False,
        hoverinfo="skip", marker={"color": "#fff", "size": 8, "line": {"color": "#000", "width": 2}},
    )  # fmt: skip
    words = f"<b>peak {format_size(peak['allocated'])}</b> in {escape(peak['phase'])}"
    plot.add_annotation(
        x=peak["event"], y=peak["allocated"] / unit, ax=-14 if right else 14, ay=max(reach / unit * 1.07, 0), ayref="y",
        text=words, xanchor="right" if right else "left", arrowcolor="#555", arrowwidth=1.2, arrowhead=0,
        standoff=5, name="peak",
    )  # fmt: skip
    if limited:
        below = float(reserved.max()) > limit
        left = right or (not below and peak["event"] > 0.35 * data["events"])  # where the peak's words are not
        _limit(plot, limit, failure, unit, left, below)
    name = make_safe(f"timeline_{record['trial_id']}")
    title = f"Memory over {'loading' if data['step'] is None else 'a step'}: {told}"
    figure = Figure(name, title, _caption(data, limited), plot, _frame(record))
    return plots.of_world(figure, "predicted", alone=True)


def label(about: Mapping[str, Any]) -> str:
    """Return in words what the timeline is of."""
    many = [f"{about['sharding']} on {about['world_size']} GPUs"] if about["world_size"] > 1 else []
    setting = [] if about["allocator"] == "default" else [f"allocator {about['allocator']}"]
    sizes = ((about["seq_len"], "tokens"), (about["micro_batch"], "samples"))
    size = " × ".join(f"{number:,} {unit}" for number, unit in sizes if number is not None)
    parts = [about["model"], size, about["precision"], about["runner"], *many, *setting, about["gpu"]]
    return ", ".join(filter(None, parts))


def holders(record: Mapping[str, Any]) -> pd.DataFrame:
    """Return what holds the peak as text cells: the largest storages first, those of several layers in one row."""
    peak = record["timeline"]["peak"]
    rows = []
    for one in peak["alike"]:
        own, count = one["held"], one["count"]
        line = {"GiB in all": format_gib(own["bytes"] * count)}
        line["storages"] = f"{count:,} × {format_size(own['bytes'])}" if count > 1 else "1"
        line |= {"category": of_part(own["category"]), "module": own["module"] or "–"}
        line |= {"operator": own["operator"], "line": own["line"]}
        line["made in"] = own["phase"] if own["step"] is None else f"step {own['step'] + 1}, {own['phase']}"
        rows.append(line)
    shown = sum(one["held"]["bytes"] * one["count"] for one in peak["alike"])
    count = len(peak["largest"]) + peak["rest_count"] - sum(one["count"] for one in peak["alike"])
    rest = peak["allocated"] - peak["rounding"] - shown
    blank = dict.fromkeys(("category", "module", "operator", "line", "made in"), "")
    rows.append({"GiB in all": format_gib(rest), "storages": f"{count:,} others", **blank})
    rows.append({"GiB in all": format_gib(peak["rounding"]), "storages": "rounding", **blank})
    return pd.DataFrame(rows)


def _phases(plot: Any, phases: Sequence[Mapping[str, Any]], events: int) -> None:
    """Draw bands and names; a name that has no room next to the one before stands a line lower."""
    ends = [0.0, 0.0]
    many = len(phases) > 9
    for number, phase in enumerate(phases):
        if number % 2:
            plot.add_vrect(
                x0=phase["begin"], x1=phase["end"], fillcolor="rgba(127,127,127,0.13)", line_width=0, layer="below"
            )
        if number:
            plot.add_vline(x=phase["begin"], line={"color": "rgba(127,127,127,0.6)", "width": 1, "dash": "dot"})
        if many and phase["phase"] in {earlier["phase"] for earlier in phases[:number]}:
            continue
        width = 6.6 * len(phase["phase"]) + 6
        begin = min(phase["begin"] / max(events, 1) * _WIDTH, _WIDTH - width)
        line = 0 if begin >= ends[0] else 1
        ends[line] = begin + width
        last = phase["begin"] / max(events, 1) * _WIDTH > _WIDTH - width
        plot.add_annotation(
            x=1 if last else phase["begin"], xref="paper" if last else "x", y=1, yref="paper", yshift=-15 * line,
            text=escape(phase["phase"]), showarrow=False, xanchor="right" if last else "left", yanchor="top",
            font={"size": 12}, name="phase", borderpad=2,
        )  # fmt: skip


def _limit(plot: Any, limit: int, failure: Mapping[str, Any] | None, unit: int, left: bool, below: bool) -> None:
    """Draw the limit, its name at the left or right end, away from reserved, and where a request fails."""
    plot.add_hline(y=limit / unit, line={"dash": "dash", "color": "#555", "width": 1.5})
    plot.add_annotation(
        x=0 if left else 1, xref="paper", y=limit / unit, text=f"limit {format_size(limit)}", showarrow=False,
        xanchor="left" if left else "right", yanchor="top" if below else "bottom", font={"size": 12},
        name="limit",
    )  # fmt: skip
    if failure is not None:
        plot.add_scatter(
            x=[failure["event"]], y=[limit / unit], mode="markers", name="out of memory", hoverinfo="skip",
            marker={"symbol": "x", "size": 11, "color": "#000", "line": {"color": "#fff", "width": 1}},
        )  # fmt: skip


def _caption(data: Mapping[str, Any], limited: bool) -> str:
    peak, failure, limit = data["peak"], data["failure"], data["limit"]
    step = "Loading" if data["step"] is None else f"Step {data['step'] + 1}"
    what = f"{step}, predicted without a GPU by a replay of its {data['events']:,} allocations and frees. The areas "
    what += "sum to allocated memory; hover to see areas that are too thin."
    most = f"Peak reserved in {step.lower()}: {format_size(data['peak_reserved'])}."
    beyond = "" if limited or limit is None else f"The GPU's limit is {format_size(limit)}, above the figure."
    full = ""
    if failure is not None:
        full = f"Memory runs out in {failure['phase']}, at a request of {format_size(failure['request'])} (×)."
        full += " The figure continues without a limit."
    top = peak["alike"][0]["held"] if peak["alike"] else None
    name = "" if top is None else " ".join(filter(None, (top["module"], top["operator"] and f"({top['operator']})")))
    largest = "" if top is None else f"Largest at the peak: {format_size(top['bytes'])} of {name}."
    return sentence(what, most, beyond, full, largest)


def _frame(record: Mapping[str, Any]) -> pd.DataFrame:
    data = record["timeline"]
    columns = {name: data[name] for name in ("event", "allocated", "active", "reserved")} | data["parts"]
    return pd.DataFrame(columns).assign(trial_id=record["trial_id"])


SECONDS = 120  # a replay takes a second, and the first ones also start torch


def of_table(table: Table) -> tuple[list[Figure], list[tuple[str, str, pd.DataFrame]], list[str]]:
    """Return figures, the tables of what holds their peaks (title, file name, text cells) and notes. All are empty if
    no row is predicted or the traces are gone."""
    folder = own_files(Path(table.source))
    if not (folder / "traces").is_dir() or not (table.frame["device"] == "simulated").any():
        return [], [], []
    records, notes = _request_timelines(Path(table.source))
    try:
        peaks = [
            (f"Largest tensors at the peak: {label(one['about'])}", make_safe(f"peak_{one['trial_id']}"), holders(one))
            for one in records
        ]
        return [of_timeline(one) for one in records], peaks, notes
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return [], [], [f"no timeline of a step, because {folder / 'timelines'} has other data; delete it"]


def _request_timelines(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    command = build_command("vramsweep", "timeline", str(folder), "--kept", "--json")
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], [f"no timeline of a step: {error}"]
    if done.returncode != 0:
        return [], [f"no timeline of a step: {next(reversed(done.stderr.strip().splitlines()), 'no reason given')}"]
    return json.loads(done.stdout), []


_DASHES = ("solid", "dash", "dot", "dashdot")


def of_replay(table: Mapping[str, Any]) -> Figure:
    """Draw reserved memory over the events of a recording, a line for each setting, above allocated; name the peak.

    `table` is the what-if table as plain data (harness.allocator.replay.WhatIf), with sizes in bytes. Allocated is
    drawn once, from the recorded settings, because other settings change it only by rounding.
    """
    rows, limit, peak = table["rows"], table["memory_limit"], table["rows"][0]["holders"]
    unit, called = axis_unit(max(point["reserved"] for row in rows for point in row["timeline"]))
    plot: Any = new_plot("event of the recording", f"memory ({called})")
    recorded, said = rows[0]["timeline"], "%{y:,.4~g} " + called
    plot.add_scatter(
        x=[p["event"] for p in recorded], y=[p["allocated"] / unit for p in recorded],
        name="allocated (recorded settings)", line={"width": 0}, fill="tozeroy", fillcolor="rgba(120,120,120,0.35)",
        hovertemplate=said,
    )  # fmt: skip
    for index, row in enumerate(rows):
        points, colour = row["timeline"], COLOURS[index % len(COLOURS)]
        name = f"{row['settings'] or 'defaults'}, {'as recorded' if row['start'] == 'recorded' else 'rebuilt'}"
        line = {"shape": "hv", "width": 3 if index == 0 else 2, "color": colour,
                "dash": _DASHES[index // len(COLOURS) % len(_DASHES)]}  # fmt: skip
        plot.add_scatter(
            x=[p["event"] for p in points], y=[p["reserved"] / unit for p in points], name=escape(name),
            mode="lines", line=line, hovertemplate=said,
        )  # fmt: skip
        if row["out_of_memory"] is not None:
            plot.add_scatter(
                x=[points[-1]["event"]], y=[points[-1]["reserved"] / unit], mode="markers", showlegend=False,
                marker={"symbol": "x", "size": 12, "color": colour}, hovertemplate="out of memory",
            )  # fmt: skip
    if limit is not None:
        plot.add_hline(y=limit / unit, line={"dash": "dot", "color": GREY}, annotation_text="memory limit")
    word, right = "final" if table.get("history") == "none" else "peak", peak["event"] > table["events"] / 2
    plot.add_annotation(
        x=peak["event"], y=peak["allocated"] / unit, text=f"<b>{word} {format_size(peak['allocated'])}</b> allocated",
        ax=-20 if right else 20, ay=28, xanchor="right" if right else "left", arrowhead=0, name="peak",
        font={"color": INK}, bgcolor="rgba(255,255,255,0.7)",
    )  # fmt: skip
    plot.update_yaxes(rangemode="tozero")
    plot.update_layout(showlegend=True, hovermode="x unified")
    unknown = f"; for {format_size(peak['unknown'])} that line is unknown" if peak["unknown"] else ""
    caption = (
        f"Replayed from a recording of {table['events']:,} events. A recording names the line of code that allocated a "
        f"block, not the block's purpose, so allocated memory has one colour{unknown}."
    )
    title = f"Reserved memory by allocator setting: {table['recording']}"
    return Figure("replay", title, caption, plot, recorded_holders(table))


def recorded_holders(table: Mapping[str, Any]) -> pd.DataFrame:
    """Return what holds the recorded peak, as text cells; the recording says who asked, not what for."""
    peak = table["rows"][0]["holders"]
    rows = [
        {
            "GiB in all": format_gib(one["bytes"] * one["count"]),
            "blocks": f"{one['count']:,} × {format_size(one['bytes'])}" if one["count"] > 1 else "1",
            "allocated by": one["where"] or "unknown",
        }
        for one in peak["largest"]
    ]
    others = {"rest": f"{peak['rest_count']:,} others", "rounding": "rounding"}
    rows += [{"GiB in all": format_gib(peak[of]), "blocks": what, "allocated by": ""} for of, what in others.items()]
    return pd.DataFrame(rows)
