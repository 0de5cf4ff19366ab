"""Prediction errors: simulated rows paired with measured rows of equal settings on the same GPU.

The residual is predicted minus measured, null if either is unknown. Repeats of a measured trial count once, by their
median; `spread_bytes` is their largest difference.

Predicted phases are those of the last traced step, measured ones those of the probe step. Both steps come after the one
that creates the optimizer's state, and both start with the gradients freed. So they are comparable. A prediction stops
after its third step, while a measured run may fragment further. Only the reserved components show that.

Out: a frame of numbers, and what it says in sentences and in tables of text cells.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import label
from vramsweep.analysis.data.load import Table, extras, is_
from vramsweep.analysis.data.pairing import CARD, EXTRAS_APART, KEYS, card, sides
from vramsweep.analysis.model.phases import PHASES
from vramsweep.harness.messages.units import format_count, format_size

PEAKS = ("peak_allocated_bytes", "peak_active_bytes", "peak_requested_bytes", "peak_reserved_bytes")
COMPONENTS = (
    *PEAKS,
    "reserved_unallocated_bytes",
    "inactive_split_peak_bytes",
    *(f"{phase}_peak_{kind}_bytes" for kind in ("allocated", "reserved") for phase in PHASES),
)
VERSIONS = ("torch_version", "transformers_version")
OUTCOME = "outcome"  # value of the column `component` in the line of a pair of which one side ran out of memory
HEADLINES = ("peak_allocated_bytes", "peak_reserved_bytes")
_rows = partial(format_count, what="measured row")
MOST = 60  # configurations in a table


def pair(table: Table, *columns: str) -> pd.DataFrame:
    """Return one line for each measured CUDA row that has a prediction of equal settings for its GPU.

    Settings are equal if `KEYS` and the resolved trial agree; null equals null. `configuration` numbers equal settings.
    `gpu` is the name in harness/hardware/gpu_lookup.py. `columns`, `outcome`, `trial_id` and `allocator` come twice,
    as `NAME_predicted` and `NAME_measured`; `KEYS` keep their names. Only rows that ended ok or oom count. If there are
    several predictions, the last counts.
    """
    carried = [c for c in dict.fromkeys(["outcome", "trial_id", "allocator", *columns]) if c not in KEYS]
    frame = table.frame
    ended = frame["outcome"].isin(["ok", "oom"]) & frame["foreign"].isna()
    predicted, measured = (ended & is_(frame, "device", device) for device in ("simulated", "cuda"))
    both = (predicted | measured) & bool(predicted.any() and measured.any())
    found = sides(frame, both, [*KEYS, *extras(frame, EXTRAS_APART)], *carried)
    one, other = (found[mask.reindex(found.index)] for mask in (predicted, measured))
    return other[["configuration", "gpu", *KEYS, *carried]].merge(
        one[["configuration", *carried]].drop_duplicates("configuration", keep="last"),
        on="configuration",
        suffixes=("_measured", "_predicted"),
    )


def residuals(table: Table) -> pd.DataFrame:
    """Return a row per configuration and component, and one with component `outcome` if either side ran out of memory.

    Sizes are in bytes; `relative` is the residual divided by the measured value. `repeats` is the number of measured
    runs. `settings` says in words what distinguishes the configuration from the others.
    """
    pairs = pair(table, *COMPONENTS, *VERSIONS)
    ok = pairs["outcome_predicted"].eq("ok") & pairs["outcome_measured"].eq("ok")
    found = pd.concat([_shared(pairs[ok]).join(_sizes(pairs[ok])), _shared(pairs[~ok]).assign(component=OUTCOME)])
    rank = found["component"].map({name: n for n, name in enumerate((*COMPONENTS, OUTCOME))})
    found = found.assign(rank=rank).reset_index().sort_values(["configuration", "rank"], ignore_index=True)
    found.insert(1, "settings", _settings(found))
    return found.drop(columns="rank")


def _settings(found: pd.DataFrame) -> pd.Series[Any]:
    names = ["gpu", "allocator", *(key for key in KEYS if key != "allocator_conf")]
    cells = found.drop_duplicates("configuration").set_index("configuration")[names]
    varying = [name for name in names if cells[name].nunique(dropna=False) > 1 and name != "seq_len"]
    texts = []
    for values in cells[["seq_len", *varying]].itertuples(index=False):
        settings = {n: None if pd.isna(v) else v for n, v in zip(varying, values[1:], strict=True)}
        texts.append(" · ".join([f"{values[0]:,} tokens", *([label(settings)] if settings else [])]))
    return found["configuration"].map(pd.Series(texts, index=cells.index, dtype="string"))


def _sizes(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return predicted and measured bytes and their difference, by configuration (the index) and component."""
    grouped = pairs.groupby("configuration")
    predicted, measured = (grouped[[f"{c}_{side}" for c in COMPONENTS]] for side in ("predicted", "measured"))
    wide = {
        "predicted_bytes": predicted.first(),
        "measured_bytes": measured.median().round(),
        "spread_bytes": measured.max() - measured.min(),
    }
    sizes = {name: frame.set_axis(COMPONENTS, axis=1).astype("Int64") for name, frame in wide.items()}
    long = pd.DataFrame({name: frame.stack(future_stack=True) for name, frame in sizes.items()})
    long = long.rename_axis(["configuration", "component"]).reset_index("component")
    residual = long["predicted_bytes"] - long["measured_bytes"]
    relative = (residual / long["measured_bytes"].where(long["measured_bytes"] > 0)).astype("Float64")
    return long.assign(residual_bytes=residual, relative=relative)


def _shared(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return one line per configuration with the columns that are equal for all its components."""
    grouped = pairs.groupby("configuration")
    first = grouped.first()
    found = first[["gpu", *KEYS, "allocator_measured", "outcome_predicted", "outcome_measured", "trial_id_predicted"]]
    found = found.rename(columns={"allocator_measured": "allocator"})
    found["trial_ids_measured"] = grouped["trial_id_measured"].agg(lambda ids: " ".join(map(str, ids)))
    found["repeats"] = grouped.size()
    differ = pd.Series(False, index=found.index)
    for name in VERSIONS:
        for side in ("predicted", "measured"):
            found[f"{name}_{side}"] = first[f"{name}_{side}"]
        both = (first[f"{name}_{side}"].astype("string") for side in ("predicted", "measured"))
        one, other = (versions.str.replace(r"\+.*", "", regex=True) for versions in both)  # the build does not matter
        differ |= (one != other).fillna(False).astype(bool)
    found["versions_differ"] = differ
    return found


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """Return a row per component with a known relative residual: number of configurations, medians, worst residual.

    `median` is of the relative residuals, `median_size` of their absolute values. `where` has the worst one's settings.
    """
    lines = []
    for name in COMPONENTS:
        if (mine := found[(found["component"] == name) & found["relative"].notna()]).empty:
            continue
        relative = mine["relative"].to_numpy(float)
        worst = mine.iloc[int(np.argmax(np.abs(relative)))]
        middles = float(np.median(relative)), float(np.median(np.abs(relative)))
        worst_of = float(worst["relative"]), int(worst["residual_bytes"]), str(worst["settings"])
        lines.append((name, len(mine), *middles, *worst_of))
    columns = ["component", "configurations", "median", "median_size", "worst", "worst_bytes", "where"]
    return pd.DataFrame(lines, columns=columns)


def name_of(component: str) -> str:
    """Return `forward_peak_allocated_bytes` as people read it: forward peak allocated."""
    return component.removesuffix("_bytes").replace("_", " ")


def percent(value: float) -> str:
    """Return +1.23 % for 0.0123, with a true minus."""
    return f"{round(100 * value, 2) + 0.0:+.2f} %".replace("-", "−")


def sentences(found: pd.DataFrame) -> list[str]:
    """Return what `residuals` found, most important first; nothing if nothing was paired."""
    return [*_say_sizes(found), *_endings(found), *_versions(found), *_spread(found)]


def _say_sizes(found: pd.DataFrame) -> list[str]:
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
