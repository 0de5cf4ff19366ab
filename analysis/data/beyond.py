"""What the caching allocator reserves beyond what was ever needed at once: what a fuller use of it would save.

Between steps activations are freed, so that nearly all of what is reserved is cached then: that says nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd

from vramsweep.analysis.data.groups import Group

Array = npt.NDArray[np.float64]
PHASES = ("forward", "backward", "optimizer")
BEYOND = "beyond_bytes"


def beyond_peak(group: Group) -> pd.DataFrame:
    """Peak reserved minus peak allocated of each row that knows both and its length, and the phase that has the peak.

    Where allocated is not known, as of foreign rows, active stands in for it (`base` says which): it is never less, so
    that the difference is at least this. Empty where reserved is a process's resident set.
    """
    peaks = [f"{phase}_peak_allocated_bytes" for phase in PHASES]
    also = ("micro_batch", "peak_allocated_bytes", "peak_active_bytes", "reserved_unallocated_bytes", *peaks)
    rows = group.ok("peak_reserved_bytes", "seq_len", also=also)
    numbers = {name: rows[name].to_numpy(float, na_value=np.nan) for name in rows if name != "trial_id"}
    allocated, active = numbers["peak_allocated_bytes"], numbers["peak_active_bytes"]
    base = np.where(np.isnan(allocated), active, allocated)
    found = pd.DataFrame(
        {
            **{name: numbers[name] for name in ("seq_len", "micro_batch", "peak_reserved_bytes")},
            "base": np.where(np.isnan(allocated), "active", "allocated"),
            BEYOND: numbers["peak_reserved_bytes"] - base,
            "phase": _highest(np.column_stack([numbers[name] for name in peaks])),
            "between_steps": numbers["reserved_unallocated_bytes"],
            "trial_id": rows["trial_id"].to_numpy(),
        }
    )
    return found.iloc[:0] if group.resident else found.dropna(subset=[BEYOND])


def _highest(peaks: Array) -> list[str]:
    """The phase of the highest peak, "" where no phase's is known. `peaks`: (rows, phases)."""
    known = np.where(np.isnan(peaks), -1.0, peaks)
    return [PHASES[int(np.argmax(row))] if row.max() >= 0 else "" for row in known]
