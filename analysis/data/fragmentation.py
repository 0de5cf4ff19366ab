"""What the caching allocator reserves beyond what was ever needed at once: what a fuller use of it would save.

Between steps activations are freed, so that nearly all of what is reserved is cached then: that says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from vramsweep.analysis.data.groups import Group

Array = npt.NDArray[np.float64]
PHASES = ("forward", "backward", "optimizer")
BEYOND = "beyond_bytes"


def beyond_peak(groups: Sequence[Group]) -> list[pd.DataFrame]:
    """Of each group of one table: peak reserved minus peak allocated of the rows that know both and their length, and
    the phase that has the peak.

    Where allocated is not known, as of foreign rows, active stands in for it (`base` says which): it is never less, so
    that the difference is at least this. Rows whose reserved is a process's resident set are left out.
    """
    if not groups:
        return []
    source = groups[0].source
    allocated, active, reserved, length, batch, between, *phases = (
        source[name].to_numpy(float, na_value=np.nan)
        for name in (
            "peak_allocated_bytes", "peak_active_bytes", "peak_reserved_bytes", "seq_len", "micro_batch",
            "reserved_unallocated_bytes", *(f"{phase}_peak_allocated_bytes" for phase in PHASES),
        )
    )  # fmt: skip
    unknown = np.isnan(allocated)
    resident = source["memory_source"].eq("cpu_tensors_and_rss").fillna(False).to_numpy(bool)
    beyond = np.where(resident, np.nan, reserved - np.where(unknown, active, allocated))
    every = pd.DataFrame(
        {
            "seq_len": length,
            "micro_batch": batch,
            "peak_reserved_bytes": reserved,
            "base": np.where(unknown, "active", "allocated"),
            BEYOND: beyond,
            "phase": highest_of(np.column_stack(phases), PHASES),
            "between_steps": between,
            "trial_id": source["trial_id"].to_numpy(),
        }
    )
    known = source["outcome"].eq("ok").fillna(False).to_numpy(bool) & ~np.isnan(beyond) & ~np.isnan(length)
    return [every.iloc[group.rows[known[group.rows]]] for group in groups]


def highest_of(peaks: Array, phases: Sequence[str]) -> Any:
    """The phase of the highest peak of each row, "" where no phase's is known. `peaks`: (rows, phases)."""
    filled = np.where(np.isnan(peaks), -1.0, peaks)
    return np.where(filled.max(axis=1) < 0, "", np.array(phases)[filled.argmax(axis=1)])
