"""Prediction errors: simulated rows paired with measured rows of equal settings on the same GPU.

The residual is predicted minus measured, null if either is unknown. Repeats of a measured trial count once, by their
median; `spread_bytes` is their largest difference.

Predicted phases are those of the last traced step, measured ones those of the probe step. Both steps come after the one
that creates the optimizer's state, and both start with the gradients freed. So they are comparable. A prediction stops
after its third step, while a measured run may fragment further. Only the reserved components show that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from vramsweep.analysis.data.groups import label
from vramsweep.analysis.data.load import Table, extras, is_
from vramsweep.analysis.data.pairing import EXTRAS_APART, KEYS, sides
from vramsweep.analysis.model.phases import PHASES

PEAKS = ("peak_allocated_bytes", "peak_active_bytes", "peak_requested_bytes", "peak_reserved_bytes")
COMPONENTS = (
    *PEAKS,
    "reserved_unallocated_bytes",
    "inactive_split_peak_bytes",
    *(f"{phase}_peak_{kind}_bytes" for kind in ("allocated", "reserved") for phase in PHASES),
)
VERSIONS = ("torch_version", "transformers_version")
OUTCOME = "outcome"  # value of the column `component` in the line of a pair of which one side ran out of memory


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
