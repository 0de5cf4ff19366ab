"""Prediction errors for people to read: sentences, tables of text cells, and what could not be compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from vramsweep.analysis.compare.residuals import OUTCOME, pair, summary
from vramsweep.analysis.data.load import Table, is_
from vramsweep.analysis.data.pairing import CARD, card
from vramsweep.analysis.model.phases import PHASES
from vramsweep.harness.messages.units import format_count, format_size

HEADLINES = ("peak_allocated_bytes", "peak_reserved_bytes")
_rows = partial(format_count, what="measured row")
MOST = 60  # configurations in a table


def name_of(component: str) -> str:
    """Return `forward_peak_allocated_bytes` as people read it: forward peak allocated."""
    return component.removesuffix("_bytes").replace("_", " ")


def percent(value: float) -> str:
    """Return +1.23 % for 0.0123, with a true minus."""
    return f"{round(100 * value, 2) + 0.0:+.2f} %".replace("-", "−")


def sentences(found: pd.DataFrame) -> list[str]:
    """Return what `residuals` found, most important first; nothing if nothing was paired."""
    return [*_sizes(found), *_endings(found), *_versions(found), *_spread(found)]


def _sizes(found: pd.DataFrame) -> list[str]:
    lines: dict[str, dict[Any, Any]] = {str(r["component"]): r for r in summary(found).to_dict("records")}
    parts = [f"{name_of(name)} {_stated(lines[name])}" for name in HEADLINES if name in lines]
    phases = [name for name in lines if name in {f"{phase}_peak_allocated_bytes" for phase in PHASES}]
    most = max(phases, key=lambda name: lines[name]["median_size"], default=None)
    if most is not None and lines[most]["worst_bytes"]:
        parts.append(f"the phase that differs most is {most.partition('_')[0]}, {_stated(lines[most])}")
    sizes = found[found["component"] != OUTCOME]
    return [f"Predicted against measured ({_count(sizes)}): {'; '.join(parts)}."] if parts else []


def _stated(line: dict[Any, Any]) -> str:
    if not line["worst_bytes"]:
        return "exact"
    if line["configurations"] == 1:
        return f"{percent(line['worst'])} at {line['where']}"
    return f"{percent(line['median'])} median, worst {percent(line['worst'])} at {line['where']}"


def _endings(found: pd.DataFrame) -> list[str]:
    said = []
    ended = found[found["component"] == OUTCOME]
    for predicted, measured, words in (
        ("oom", "ok", "Predicted to run out of memory, but ran"),
        ("ok", "oom", "Predicted to fit, but ran out of memory"),
        ("oom", "oom", "Ran out of memory as predicted"),
    ):
        mine = ended[(ended["outcome_predicted"] == predicted) & (ended["outcome_measured"] == measured)]
        if len(mine):
            said.append(f"{words}: {_count(mine)} ({_some(mine['settings'])}).")
    return said


def _versions(found: pd.DataFrame) -> list[str]:
    if (differ := found[found["versions_differ"]]).empty:
        return []
    return [f"Predicted with another release of torch or transformers than measured: {_count(differ)}."]


def _spread(found: pd.DataFrame) -> list[str]:
    if (apart := found[found["spread_bytes"].fillna(0) > 0]).empty:
        return []
    most = apart.iloc[int(apart["spread_bytes"].to_numpy(float).argmax())]
    where = f"{format_size(float(most['spread_bytes']))} at {most['settings']}"
    return [
        f"Repeats differ in memory in {_count(apart)}, most in {name_of(str(most['component']))} ({where}); "
        "prediction errors use their median."
    ]


def not_compared(table: Table) -> list[str]:
    """Say which measured rows have no prediction, and why; nothing unless there are predicted and measured rows."""
    frame = table.frame
    simulated, cuda = is_(frame, "device", "simulated"), is_(frame, "device", "cuda") & frame["foreign"].isna()
    if not (simulated.any() and cuda.any()):
        return []
    measured = frame.loc[cuda & frame["outcome"].isin(["ok", "oom"]), ["trial_id", *CARD]]
    cards = card(measured)
    unlisted = measured[cards.isna()]
    missing = measured[cards.notna() & ~measured["trial_id"].isin(pair(table)["trial_id_measured"])]
    said = []
    if len(unlisted):
        names = ", ".join(map(str, unlisted["gpu_name"].dropna().unique())) or "an unknown GPU"
        said.append(f"{_rows(len(unlisted))} from {names} not compared, because `vramsweep gpus` does not list the GPU")
    if len(missing):
        said.append(f"{_rows(len(missing))} not compared, because no prediction has equal settings for the GPU")
    failed = frame.loc[simulated & ~frame["outcome"].isin(["ok", "oom"]), "reason"].fillna("unknown").value_counts()
    said += [f"{number:,} not predicted: {reason}" for reason, number in failed.head(4).items()]
    return said


def tables(found: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Return (title, file name, frame of text cells): per component, and per configuration, the worst first."""
    per_component = pd.DataFrame(
        {
            "component": name_of(str(line["component"])),
            "configurations": f"{line['configurations']:,}",
            "median": percent(line["median"]),
            "median |residual|": percent(line["median_size"]).removeprefix("+"),
            "worst": percent(line["worst"]),
            "worst in bytes": _difference(line["worst_bytes"]),
            "worst at": line["where"],
        }
        for line in summary(found).to_dict("records")
    )
    number = found["configuration"].nunique()
    more = f" ({MOST} worst of {number:,})" if number > MOST else ""
    by_configuration = f"Predicted against measured per configuration{more}"
    return [
        ("Predicted against measured per component", "residuals", per_component),
        (by_configuration, "residuals_by_configuration", _per_configuration(found)),
    ]


def _per_configuration(found: pd.DataFrame) -> pd.DataFrame:
    """Return a line each: those that ended differently first, then by the larger of the two headline residuals."""
    wanted = found[found["component"].isin([*HEADLINES, OUTCOME])]
    worst = (
        wanted.assign(size=wanted["relative"].abs(), differs=wanted["outcome_predicted"] != wanted["outcome_measured"])
        .groupby("configuration")[["differs", "size"]]
        .max()
        .sort_values(["differs", "size"], ascending=False, na_position="last")
    )
    lines = []
    for number in worst.index[:MOST]:
        mine = wanted[wanted["configuration"] == number].set_index("component")
        first = mine.iloc[0]
        line = {"settings": str(first["settings"])}
        for name in HEADLINES:
            values = mine.loc[name] if name in mine.index else first  # the outcome's line, which has no sizes
            sizes = {side: values[f"{side}_bytes"] for side in ("predicted", "measured")}
            for side, size in sizes.items():
                line[f"{name_of(name)} {side}"] = "–" if pd.isna(size) else format_size(float(size))
            line[f"{name_of(name)} residual"] = "–" if pd.isna(values["relative"]) else percent(values["relative"])
        ends = (first["outcome_predicted"], first["outcome_measured"])
        line["ended"] = "ok" if ends == ("ok", "ok") else f"predicted {ends[0]}, measured {ends[1]}"
        lines.append(line)
    return pd.DataFrame(lines)


def _difference(size: int) -> str:
    text = format_size(float(size))
    return text.replace("-", "−") if size < 0 else f"+{text}"


def _count(found: pd.DataFrame) -> str:
    return format_count(found["configuration"].nunique(), "configuration")


def _some(values: pd.Series[Any], most: int = 4) -> str:
    shown = list(dict.fromkeys(values))
    return "; ".join(shown[:most]) + ("; …" if len(shown) > most else "")
