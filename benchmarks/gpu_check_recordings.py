"""The parts of the GPU check that record the allocator's events and replay them (gpu_check.py has the others).

Each recording is made by benchmarks/recorded_steps.py in a process of its own, which has its own allocator.
"""

from __future__ import annotations

import csv
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_check_sweeps import ROOT, Check, last_line

from vramsweep.harness.allocator.replay import what_if

MISSED = 0.01  # share of a reserved peak; a trial with a larger prediction error is recorded


def recordings(check: Check) -> dict[str, Any]:
    """Record the allocator's events from the first on under each setting, and check that their replay is exact.

    Limits are shares of the default setting's reserved peak. Which limit causes retries and still fits depends on the
    GPU's kernels, so the largest of a few that does is kept. With far too little memory the run must fail.
    """
    if not check.real:
        return {"skipped": "recordings need CUDA"}
    found = {"default": recorded(check, "default", "", None)}
    peak = found["default"]["peak_reserved_bytes"]
    settings: list[tuple[str, str, int | None, tuple[str, ...]]] = [
        ("expandable", "expandable_segments:True", None, ()),
        ("roundup", "roundup_power2_divisions:8", None, ()),
        ("max_split", "max_split_size_mb:32", peak, ()),
        ("gc", "garbage_collection_threshold:0.5", round(1.05 * peak), ()),
        ("out_of_memory", "", round(0.7 * peak), ()),
        ("streams", "", None, ("--streams",)),
        ("streams_expandable", "expandable_segments:True", None, ("--streams",)),
        ("ddp", "", None, ("--ddp",)),
    ]

    def attempt(setting: tuple[str, str, int | None, tuple[str, ...]]) -> dict[str, Any]:
        name, conf, limit, more = setting
        try:
            return recorded(check, name, conf, limit, *more)
        except Exception as error:  # a failure is a finding, and the others are kept
            return {"conf": conf, "failed": f"{type(error).__name__}: {error}"}

    with ThreadPoolExecutor(4) as pool:  # concurrent: nothing is timed, and each process has its own allocator
        found |= zip((setting[0] for setting in settings), pool.map(attempt, settings), strict=True)
    for share in (0.985, 0.97, 0.955, 0.94):
        retried = recorded(check, "retry", "", round(share * peak))
        if not retried["out_of_memory"]:
            found["retry"] = retried
        if retried["out_of_memory"] or retried["retries"]:
            break
    with zipfile.ZipFile(check.out / "recordings.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in found:
            if (path := check.scratch / f"{name}.pickle").exists():
                archive.write(path, path.name)
    return found


def recorded(check: Check, name: str, conf: str, limit: int | None, *more: str) -> dict[str, Any]:
    """Record a run in its own process and replay it; return both and whether they agree. RuntimeError if it fails."""
    path = check.scratch / f"{name}.pickle"
    script = str(ROOT / "benchmarks" / "recorded_steps.py")
    done = check.python([script, str(path), *(["--limit", str(limit)] if limit else []), *more], conf)
    if done.returncode:
        raise RuntimeError(f"recording {name}: {last_line(done.stderr)}")
    said: dict[str, Any] = json.loads(last_line(done.stdout))
    replayed = what_if(path, [], recorded_limit=said["limit_bytes"]).rows[0]
    match = replayed.match
    assert match is not None
    return {"conf": conf, **said, "replayed_peak_reserved_bytes": replayed.peak_reserved, "exact": match.exact,
            "segment_events": match.segment_events, "matched": match.matched, "blocks": match.blocks,
            "first_difference": match.first_difference}  # fmt: skip


def misses(check: Check) -> dict[str, Any]:
    """Record trials whose reserved peak has a prediction error above `MISSED`, from the first allocation on.

    This runs after `predicted`, in a later run with the GPU, because a row shows the size of an error, not its place.
    """
    path = check.out / "residuals.csv"
    if not check.real or not path.exists():
        return {"skipped": "needs CUDA and residuals.csv, which the part predicted writes"}
    with path.open(newline="") as stream:
        off = [one for one in csv.DictReader(stream) if one["component"] == "peak_reserved_bytes"]
    off = [one for one in off if abs(float(one["relative"])) > MISSED]
    names = [one["trial_ids_measured"].split()[-1] for one in off]
    rows = {r["trial_id"]: r for r in check.rows}

    def attempt(name: str) -> dict[str, Any]:
        try:
            found = recorded(check, f"miss-{name}", "", None, "--row", str(check.out / "rows.jsonl"), name)
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        return found | {"row_peak_reserved_bytes": rows[name]["peak_reserved_bytes"]}

    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(names, pool.map(attempt, names), strict=True))
    with zipfile.ZipFile(check.out / "recordings.zip", "a", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            if (path := check.scratch / f"miss-{name}.pickle").exists():
                archive.write(path, path.name)
    return found
