"""The residuals of predictions for people to read: sentences, tables of text cells, and what could not be compared."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.load import Table
from analysis.metrics import show_bytes
from analysis.residuals import OUTCOME, PHASES, card, is_device, pair, summary

HEADLINES = ("peak_allocated_bytes", "peak_reserved_bytes")
MOST = 60  # configurations in a table


def name_of(component: str) -> str:
    """`forward_peak_allocated_bytes` as people read it: forward peak allocated."""
    return component.removesuffix("_bytes").replace("_", " ")


def percent(value: float) -> str:
    """+1.23 %, with a true minus."""
    return f"{100 * value:+.2f} %".replace("-", "−")


def sentences(found: pd.DataFrame) -> list[str]:
    """What `residuals` found, most important first; nothing where nothing was paired."""
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
        return "exact to the byte"
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
    differ = found[found["versions_differ"]]
    if differ.empty:
        return []
    return [f"Predicted with another release of torch or transformers than measured: {_count(differ)}."]


def _spread(found: pd.DataFrame) -> list[str]:
    apart = found[found["spread_bytes"].fillna(0) > 0]
    if apart.empty:
        return []
    most = apart.iloc[int(apart["spread_bytes"].to_numpy(float).argmax())]
    where = f"{show_bytes(float(most['spread_bytes']))} at {most['settings']}"
    return [
        f"Repeats differ in memory in {_count(apart)}, most in {name_of(str(most['component']))} ({where}); "
        "residuals are of their median."
    ]


def not_compared(table: Table) -> list[str]:
    """Where there are both predicted and measured rows: which measured ones have no counterpart, and why."""
    frame = table.frame
    simulated, cuda = is_device(frame, "simulated"), is_device(frame, "cuda") & frame["foreign"].isna()
    if not (simulated.any() and cuda.any()):
        return []
    measured = frame[cuda & frame["outcome"].isin(["ok", "oom"])]
    cards = card(measured)
    unlisted = measured[cards.isna()]
    missing = measured[cards.notna() & ~measured["trial_id"].isin(pair(table)["trial_id_measured"])]
    said = []
    if len(unlisted):
        names = ", ".join(map(str, unlisted["gpu_name"].dropna().unique())) or "an unknown GPU"
        said.append(f"{_rows(unlisted)} from {names} not compared with predictions: harness/gpus.py does not list it")
    if len(missing):
        said.append(f"{_rows(missing)} not compared with predictions: none of equal settings for the card")
    failed = frame.loc[simulated & ~frame["outcome"].isin(["ok", "oom"]), "reason"].fillna("unknown").value_counts()
    said += [f"{number:,} not predicted: {reason}" for reason, number in failed.head(4).items()]
    return said


def tables(found: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(title, file name, frame of text cells): per component, and per configuration, the worst first."""
    per_component = pd.DataFrame(
        [
            {
                "component": name_of(str(line["component"])),
                "configurations": f"{line['configurations']:,}",
                "median": percent(line["median"]),
                "median size": percent(line["median_size"]).removeprefix("+"),
                "worst": percent(line["worst"]),
                "worst in bytes": _difference(line["worst_bytes"]),
                "worst at": line["where"],
            }
            for line in summary(found).to_dict("records")
        ]
    )
    configurations = _per_configuration(found)
    more = f" ({MOST} worst of {len(configurations):,})" if len(configurations) > MOST else ""
    return [
        ("Predicted against measured per component", "residuals", per_component),
        (f"Predicted against measured per configuration{more}", "residuals_by_configuration", configurations[:MOST]),
    ]


def _per_configuration(found: pd.DataFrame) -> pd.DataFrame:
    """One line each; those that ended differently come first, then by the larger of the two headline residuals."""
    lines = []
    wanted = found[found["component"].isin([*HEADLINES, OUTCOME])]
    for (_, settings), mine in wanted.groupby(["configuration", "settings"], sort=False):
        by_name = {str(r["component"]): r for r in mine.to_dict("records")}
        line = {"settings": str(settings)}
        sizes = []
        for name in HEADLINES:
            row = by_name.get(name, {})
            predicted, measured, relative = (row.get(k) for k in ("predicted_bytes", "measured_bytes", "relative"))
            short = name_of(name)
            line[f"{short} predicted"] = "–" if pd.isna(predicted) else show_bytes(float(predicted))
            line[f"{short} measured"] = "–" if pd.isna(measured) else show_bytes(float(measured))
            line[f"{short} residual"] = "–" if pd.isna(relative) else percent(float(relative))
            sizes.append(0.0 if pd.isna(relative) else abs(float(relative)))
        ending = by_name.get(OUTCOME)
        line["ended"] = (
            "ok"
            if ending is None
            else f"predicted {ending['outcome_predicted']}, measured {ending['outcome_measured']}"
        )
        differs = ending is not None and ending["outcome_predicted"] != ending["outcome_measured"]
        lines.append((differs, max(sizes), line))
    return pd.DataFrame([line for _, _, line in sorted(lines, key=lambda entry: entry[:2], reverse=True)])


def _difference(size: int) -> str:
    text = show_bytes(float(size))
    return text.replace("-", "−") if size < 0 else f"+{text}"


def _rows(frame: pd.DataFrame) -> str:
    return f"{len(frame):,} measured row{'s' * (len(frame) != 1)}"


def _count(found: pd.DataFrame) -> str:
    number = found["configuration"].nunique()
    return f"{number:,} configuration{'s' * (number != 1)}"


def _some(values: pd.Series[Any], most: int = 4) -> str:
    shown = list(dict.fromkeys(values))
    return "; ".join(shown[:most]) + ("; …" if len(shown) > most else "")
