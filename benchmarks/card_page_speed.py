"""What a GPU's page says about speed (card_page.py): step times, what bounds them, and how long the GPU was busy.

benchmarks/bound_rows.tsv says for each measured row whether the GPU or the host bounds its step. By its rule the GPU
does if 1.6 times the roofline estimate is at least 75 % of the measured step. A row that says so itself has the word.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vramsweep.harness.rows.schema import Row

BOUND_ROWS = Path(__file__).with_name("bound_rows.tsv")
SAME = ("model", "precision", "runner", "sharding", "micro_batch", "seq_len", "launches", "roofline_step_s")


def bound_rows(gpu: str) -> list[dict[str, str]]:
    """Return the rows of the table that a GPU measured, in the order of the table."""
    with BOUND_ROWS.open(newline="") as stream:
        return [row for row in csv.DictReader(stream, delimiter="\t") if row["gpu"] == gpu]


def bounds(gpu: str, measured: Mapping[str, tuple[str, Row]]) -> dict[str, str]:
    """Return "gpu" or "host" by label, for trials that the table has of a GPU, in any repeat.

    `measured` has the label and row of each trial.
    """
    found = {measured[row["trial_id"]][0]: row["bound_by"] for row in bound_rows(gpu) if row["trial_id"] in measured}
    return found | {name: row["bound_by"] for name, row in measured.values() if row.get("bound_by")}


def speed_lines(gpu: str, bound_by: Mapping[str, str], both: Sequence[tuple[str, Row, Row]]) -> list[str]:
    """Return the table of step times of trials (label, measured, predicted), and what it can say."""
    timed = [one for one in both if one[2]["estimated_step_s"] and one[1]["step_times_s"]]
    took = {id(m): statistics.median(m["step_times_s"]) for _, m, _ in timed}
    known = sorted(took[id(m)] / p["calibrated_step_s"] for _, m, p in timed if p["calibrated_step_s"])
    lines = [
        f"A step took {known[len(known) // 20]:.2f} to {known[-1 - len(known) // 20]:.2f} times its calibrated "
        f"estimate in nine of ten trials; the median of {len(known)} trials is {statistics.median(known):.2f}.",
        "",
        *_host_lines(gpu, sum(bound_by.get(name) == "host" for name, _, _ in timed), len(timed)),
        "*at best* is the roofline estimate, which no GPU reaches. *calibrated* is the same with factors from the "
        "speeds that others published for this GPU, as earlier versions predicted. MFU refers to the dense peak of the "
        "precision.",
        "[How prediction works](how_prediction_works.md) defines the first.",
        "",
        "| trial | bound by | tokens/s | step ms | at best ms | calibrated ms | measured / calibrated | MFU |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, m, p in timed:
        step, told = took[id(m)], p["calibrated_step_s"]
        mfu = "" if m["mfu"] is None else f"{100 * m['mfu']:.0f} %"
        calibrated = f"{1000 * told:.1f} | {step / told:.2f}" if told else " | "
        lines.append(
            f"| {name} | {bound_by.get(name, '')} | {m['tokens_per_s']:,.0f} | {1000 * step:.1f} | "
            f"{1000 * p['estimated_step_s']:.1f} | {calibrated} | {mfu} |"
        )
    return lines


def _host_lines(gpu: str, host: int, every: int) -> list[str]:
    """Return the text on trials that the host bounds: how many, and how far steps of equal work lie apart."""
    of_host = [row for row in bound_rows(gpu) if row["bound_by"] == "host"]
    if not of_host:
        return []
    alike: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row in of_host:
        alike[tuple(row[name] for name in SAME)].append(1000 * float(row["measured_step_s"]))
    most = max(alike.values(), key=lambda steps: (len(steps), max(steps) / min(steps)))
    each = [1e6 * float(row["measured_step_s"]) / int(row["launches"]) for row in of_host if row["sharding"] == "none"]
    return [
        f"**The host bounded {host} of {every} trials** (*bound by*): 1.6 times their roofline estimate is less than "
        "75 % of the step. Such rows do not compare techniques, because the host's speed varied from trial to trial. "
        f"For example, {len(most)} trials with the same operators took {min(most):.1f} to {max(most):.1f} ms. In the "
        f"median, such a step took {statistics.median(each):.0f} µs an operator (without sharding).",
        "",
    ]


def busy_range(profile: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and most seconds of a step in which the GPU was busy, by its profile.

    Early profiles (`card_busy_s`) took the annotation of the optimizer's step for a kernel, so they include the gaps
    between the optimizer's kernels. These gaps are at most the annotation without the foreach kernels in it.
    """
    if "gpu_busy_s" in profile:
        return profile["gpu_busy_s"], profile["gpu_busy_s"]
    kinds: Mapping[str, float] = profile["kernels"]
    annotated = sum(seconds for name, seconds in kinds.items() if name.startswith("Optimizer.step#"))
    inside = sum(seconds for name, seconds in kinds.items() if "multi_tensor_apply_kernel" in name)
    return profile["card_busy_s"] - max(0.0, annotated - inside), profile["card_busy_s"]


def work_of(profile: Mapping[str, Any]) -> float:
    """Return the number of kernels, copies and fills of a step; early profiles counted an annotation with them."""
    if "gpu_busy_s" in profile:
        return float(profile["kernels"] + profile["copies"] + profile["fills"])
    return float(profile["launches"] - any(name.startswith("Optimizer.step#") for name in profile["kernels"]))


def profile_lines(
    profiles: Mapping[str, Any], measured: Mapping[str, tuple[str, Row]], predicted: Mapping[str, Row]
) -> list[str]:
    """Return the table of how long the GPU was busy in a step, by profiles of trials and the trials' own step times.

    `measured` has the label and row of each trial, `predicted` the prediction of each label. A profile with less work
    on the GPU than the step has operators is left out.
    """
    ended = {t: one for t, one in profiles.items() if isinstance(one, dict) and "failed" not in one}
    found = sorted([(*measured[t], one) for t, one in ended.items() if t in measured], key=lambda one: one[0])
    lines, lost = [], []
    if not found:
        return []
    for name, m, one in found:
        if "refused" in one:
            lost.append(f"{name} ({one['refused']})")
            continue
        operators = predicted[name]["estimated_launches"] if name in predicted else None
        if operators and work_of(one) < operators:
            lost.append(f"{name} ({work_of(one):,.0f} of {operators:,})")
            continue
        step, (least, most) = statistics.median(m["step_times_s"]), busy_range(one)
        milliseconds = _both_ends(f"{1000 * least:.1f}", f"{1000 * most:.1f}")
        share = _both_ends(f"{100 * least / step:.0f}", f"{100 * most / step:.0f}")
        lines.append(f"| {name} | {1000 * step:.1f} | {milliseconds} | {share} % | {work_of(one):,.0f} |")
    left_out = "A profile is left out if it has fewer kernels than the step has operators: "
    return [
        "A profile of bare steps shows how long the GPU was *busy* with kernels and copies; its own clock counts this "
        "time. *step* is the time of the trial's row, which ran without a profiler. If both are about the same, the "
        "GPU bounds the step. These shares are measured, so they count more than *bound by* above, which is an "
        "estimate. A range says that the profile includes gaps between the optimizer's kernels, of at most its width.",
        "",
        "| trial | step ms | busy ms | share | kernels and copies |",
        "|---|---:|---:|---:|---:|",
        *lines,
        *(["", left_out + ", ".join(lost) + "."] if lost else []),
    ]


def _both_ends(least: str, most: str) -> str:
    """Return a range as text, or one number where both ends are equal."""
    return least if least == most else f"{least} to {most}"
