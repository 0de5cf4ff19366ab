"""One row from several ranks: which rank each column comes from.

All memory columns are of the worst rank, with the largest peak reserved, so that a row's numbers belong together. Speed
is the slowest rank's. Device health, retries and peaks that still rise are the worst of all ranks, because one that
waits makes all wait. Host memory and energy are totals of all. Everything else is rank 0's.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from vramsweep.harness.rows.schema import COLUMNS

Columns = dict[str, Any]
GROUPS = {column.name: column.group for column in COLUMNS}


# Each combines the known values of the ranks.
COMBINED: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("device_used_bytes", "device_baseline_bytes", "gpu_temperature_c", "gpu_power_w"), max),
    **dict.fromkeys(("gpu_sm_clock_before_mhz", "gpu_sm_clock_mhz"), min),
    **dict.fromkeys(("gpu_sm_clock_max_mhz", "skipped_steps", "alloc_retries", "alloc_ooms"), max),
    **dict.fromkeys(("step_growth_bytes", "steps_s", "issue_fraction"), max),
    **dict.fromkeys(("host_steal_fraction", "involuntary_switches"), max),
    "bound_by": lambda known: "host" if "host" in known else "gpu",
    "full_after_steps": min,
    **dict.fromkeys(("throttle_reasons", "foreign_processes"), lambda lists: sorted(set().union(*lists))),
    "plateau": all,
    "notes": lambda lists: list(dict.fromkeys(itertools.chain.from_iterable(lists))),
}
OF_WORST = ("gpu_name", "gpu_uuid")
OF_FIRST = ("loss_first", "loss_last", "host_total_bytes")  # each rank has a loss of its own data; the node is shared


def worst_rank(ranks: Sequence[Columns]) -> int | None:
    """Return the rank with the largest peak reserved (allocated, if a rank lacks that); None if ranks lack both."""
    for name in ("peak_reserved_bytes", "peak_allocated_bytes"):
        peaks = [columns.get(name) for columns in ranks]
        known = [peak for peak in peaks if peak is not None]
        if len(known) == len(peaks):
            return peaks.index(max(known))
    return None


def over_ranks(ranks: Sequence[Columns]) -> Columns:
    """Combine the columns of the ranks, in rank order, into the row's columns."""
    worst = worst_rank(ranks)
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank].get("elapsed_s") or 0.0)
    sources = {"memory": worst or 0, "speed": slowest}
    row: Columns = {}
    for name in ranks[0]:
        source = sources.get(GROUPS.get(name, ""), 0)
        if name in OF_WORST:
            source = worst or 0
        elif name in OF_FIRST:
            source = 0
        row[name] = ranks[source].get(name)
        if GROUPS.get(name) == "host" and name not in OF_FIRST:
            every = [columns.get(name) for columns in ranks]
            row[name] = None if None in every else sum(every)
        if name in COMBINED:
            known = [columns[name] for columns in ranks if columns.get(name) is not None]
            row[name] = COMBINED[name](known) if known else None
            well = row[name] in (True, "gpu") if name in ("plateau", "bound_by") else not row[name]
            if well and len(known) < len(ranks):  # then nobody knows that all is well
                row[name] = None
        if name == "gpu_energy_j":  # each rank reports its GPU's, which several may share
            cards = {columns.get("gpu_uuid") or rank: columns.get(name) for rank, columns in enumerate(ranks)}
            row[name] = None if None in cards.values() else sum(cards.values())
    fed = [sum(columns["step_tokens"]) for columns in ranks if columns.get("step_tokens")]
    if len(fed) == len(ranks) > 1:  # each rank has lengths of its own
        row["tokens_per_s"] = sum(fed) / row["elapsed_s"]
    return row | {
        "worst_rank": worst,
        **{
            f"rank_peak_{kind}_bytes": [columns.get(f"peak_{kind}_bytes") for columns in ranks]
            for kind in ("allocated", "reserved", "active")
        },
    }
