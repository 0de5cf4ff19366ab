"""Errors of predictions against published measurements: the readings of validate.py, as errors and tables.

Quantities are never pooled, because allocated, active, reserved and device are different counters. Runs whose peak is
the optimizer's, or weights and gradients alone, stand apart: anybody who can count bytes predicts them. The peak of the
other runs depends on batch and length. Errors are predicted / measured - 1; `share` is the same difference as a share
of what was measured above weights, buffers, gradients and optimizer state.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from vramsweep.harness.files.bounded_reads import read_content
from vramsweep.harness.messages.errors import UserError

MEMORY = ("allocated", "active", "requested", "reserved", "device")
SPEED = ("step", "tokens/s", "samples/s")
MISS = 0.03  # errors above this are listed one by one
NEAR = 0.001  # an error beyond a bound by no more counts as between the bounds
GIB = 1 << 30
MOVES, FIXED = "moves", "fixed"  # with batch and length, or not: peaks of the optimizer, loading, gradients
FULL = "does not fit"  # measured memory of a run that is predicted to run out
OUTCOMES = {
    "fitted, as predicted": ("ok", "ok"), "ran out, as predicted": ("oom", "oom"),
    "fitted, predicted to run out": ("ok", "oom"), "ran out, predicted to fit": ("oom", "ok"),
}  # fmt: skip
RUN = ["place", "run"]  # file and line, and the name, which is unique in its file alone


@dataclass(frozen=True)
class Validation:
    """Readings with errors, one line each; what made them; what was wrong with the files; other tools and their
    sources."""

    readings: pd.DataFrame
    made: Mapping[str, str | None]
    mistakes: Sequence[str]
    others: Mapping[str, str]


def load(path: Path) -> Validation:
    """Read what validate.py wrote. Raises UserError if it is no such file."""
    try:
        record = json.loads(read_content(path))
        frame = pd.DataFrame(record["readings"])
        if not {"grade", "outcome"} <= set(frame):
            raise LookupError
        return Validation(errors(frame), record["made"], record["mistakes"], record["others"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UserError(
            f"{path} holds no readings; python benchmarks/validate.py FILE... writes results/validation/readings.json"
        ) from None


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the readings with `kind` (counter and phase), `moving`, `share`, the `error` of each prediction, `between`
    (null without two bounds of memory), and `again`. `again`: trial, counter and value stood in its source before."""
    found = frame.copy()
    whole = found["phase"].isna()
    found["kind"] = found["quantity"].where(whole, found["quantity"] + ", " + found["phase"].astype(str) + " phase")
    found.loc[found["quantity"].isin(SPEED), "kind"] = "step time"
    numbers = found[["measured", "predicted", "predicted_most", "predicted_plain", "states_bytes"]].astype(float)
    predictions = numbers[["predicted", "predicted_most", "predicted_plain"]]
    found[["error", "most_error", "plain_error"]] = predictions.div(numbers["measured"], axis=0) - 1
    memory = found["quantity"].isin(MEMORY)
    context = found["context_bytes"].where(found["quantity"].eq("device"), 0)
    above = numbers["measured"] - numbers["states_bytes"] - context
    own = memory & (whole | found["phase"].eq(found["peak_phase"]))  # the states held in other phases are not known
    found["share"] = ((numbers["predicted"] - numbers["measured"]) / above).where(own & (above > 0))
    found["moving"] = found["moves"].where(whole, found["phase"].isin(["forward", "backward"])).astype("boolean")
    bounded = memory & found["most_error"].notna() & found["most_error"].ne(found["error"])
    inside = found["error"].le(NEAR) & found["most_error"].ge(-NEAR)
    found["between"] = inside.astype("boolean").where(bounded)
    found["again"] = found["error"].notna() & found.duplicated(["title", "trial_id", "kind", "measured"])
    if "mistake" not in found:
        found["mistake"] = False
    return found


def summary(found: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return errors of the predicted readings, a line for each value of `by`: how many, median, 90th percentile, worst.

    `median` is of the signed errors, `typical` and `p90` are of their sizes. `share` and `share_p90` are of the sizes
    of the share above the states, null if not known. `bounded` readings have a predicted upper bound too; `between` are
    those that lie between the two.
    """
    lines = []
    known = found[found["error"].notna()]
    for key, mine in known.groupby(list(by), sort=False, dropna=False):
        error, share = mine["error"].to_numpy(float), mine["share"].dropna().abs().to_numpy(float)
        sizes = np.abs(error)
        lines.append(dict(zip(by, key, strict=True)) | {
            "readings": len(mine), "runs": int(mine.groupby(RUN).ngroups), "sources": int(mine["title"].nunique()),
            "median": float(np.median(error)), "typical": float(np.median(sizes)),
            "p90": float(np.quantile(sizes, 0.9)), "worst": float(error[np.argmax(sizes)]),
            "bounded": int(mine["between"].notna().sum()), "between": int(mine["between"].sum()),
            "share": float(np.median(share)) if len(share) else np.nan,
            "share_p90": float(np.quantile(share, 0.9)) if len(share) else np.nan,
        })  # fmt: skip
    return pd.DataFrame(lines)


def of_class(found: pd.DataFrame) -> pd.DataFrame:
    """Return the readings with `class`, in words: whether the peak moves or does not fit. It is empty for speed."""
    named = found["moving"].map({True: MOVES, False: FIXED}).mask(found["outcome"].ne("ok"), FULL)
    return found.assign(**{"class": named.where(found["quantity"].isin(MEMORY), "")})


def of_summary(found: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Return `summary` as text for people."""
    if (lines := summary(of_class(found), ["kind", "class", *by])).empty:
        return lines
    order = {kind: number for number, kind in enumerate([*MEMORY, "step time"])}
    lines = lines.sort_values(
        ["kind", "class", *by], key=lambda column: column.map(order).fillna(9) if column.name == "kind" else column
    )
    text = pd.DataFrame({"counter": lines["kind"], "peak": lines["class"]})
    if by:
        text["source"] = lines[by[0]]
    text["readings"], text["runs"] = lines["readings"].map(str), lines["runs"].map(str)
    if not by:
        text["sources"] = lines["sources"].map(str)
    text["median, signed"] = lines["median"].map(percent)
    text["median"] = lines["typical"].map(size)
    text["90th percentile"] = lines["p90"].map(size)
    text["worst"] = lines["worst"].map(percent)
    text["between the bounds"] = [
        f"{one} of {of}" if of else "–" for one, of in zip(lines["between"], lines["bounded"], strict=True)
    ]
    text["above the states: median"] = lines["share"].map(size)
    text["90th"] = lines["share_p90"].map(size)
    return text


def other_tools_errors(found: pd.DataFrame, sources: Mapping[str, str]) -> pd.DataFrame:
    """Return other tools' errors on the same runs, and ours on just those readings; by counter, memory only."""
    lines = []
    memory = found[found["error"].notna() & found["quantity"].isin(MEMORY) & found["others"].notna()]
    for (kind, moving), mine in of_class(memory).groupby(["kind", "class"], sort=False):
        for name in sources:
            said = pd.Series([of.get(name) for of in mine["others"]], index=mine.index, dtype=float)
            theirs = (said / mine["measured"].astype(float) - 1).dropna()
            own = mine.loc[theirs.index, "error"]
            if len(theirs):
                lines.append(
                    {
                        "counter": kind,
                        "peak": moving,
                        "tool": name,
                        "readings": str(len(theirs)),
                        "median, signed": percent(theirs.median()),
                        "median": size(float(theirs.abs().median())),
                        "90th percentile": size(float(theirs.abs().quantile(0.9))),
                        "vramsweep on the same: median": size(own.abs().median()),
                        "90th": size(own.abs().quantile(0.9)),
                    }
                )
    return pd.DataFrame(lines)


def of_outcomes(found: pd.DataFrame) -> pd.DataFrame:
    """Return what fitted and what did not, published and predicted, by source."""
    runs = found.drop_duplicates(RUN).copy()
    spoken = found[found["quantity"].eq("outcome")].drop_duplicates(RUN).set_index(RUN)["measured_outcome"]
    runs["was"] = [spoken.get((place, run), "ok") for place, run in zip(runs["place"], runs["run"], strict=True)]
    runs = runs[runs["outcome"].isin(["ok", "oom", "host_oom"])]
    runs = runs.drop_duplicates(["title", "trial_id", "was"])  # two runs of one trial cannot be told apart
    runs["is"] = runs["outcome"].replace("host_oom", "oom")
    lines = []
    for title, mine in runs.groupby("title", sort=False):
        counts = Counter(zip(mine["was"], mine["is"], strict=True))
        counted = {words: str(counts[ends]) for words, ends in OUTCOMES.items()}
        lines.append({"source": title, **counted, "which": "; ".join(mine.loc[mine["was"] != mine["is"], "run"])})
    return pd.DataFrame(lines)


def of_misses(found: pd.DataFrame, least: float = MISS) -> pd.DataFrame:
    """Return the readings of memory with an error above `least`, and the known reasons."""
    missed = found[found["quantity"].isin(MEMORY) & (found["error"].abs() > least)]
    return pd.DataFrame(
        {
            "source": line["title"],
            "run": line["run"],
            "counter": line["kind"],
            "measured (GiB)": gib(line["measured"]),
            "predicted": gib(line["predicted"]),
            "error": percent(line["error"]),
            "upper bound": percent(line["most_error"]),
            "why": "; ".join(filter(None, (_bounded(line), line["note"], line["reading_note"]))) or "not found",
        }
        for _, line in missed.sort_values(["title", "kind"]).iterrows()
    )


def _bounded(line: pd.Series[Any]) -> str:
    """Say whether a wrong reading lies between the bounds, or that it would exceed the limit."""
    if line["outcome"] != "ok":
        return "predicted to run out of memory; this is the prediction without a limit"
    if pd.isna(line["between"]):
        return ""
    return "between the bounds" if line["between"] else "outside the bounds"


def of_readings(found: pd.DataFrame) -> pd.DataFrame:
    """Return every reading that was predicted, as text."""
    return pd.DataFrame(
        {
            "source": line["title"],
            "grade": line["grade"],
            "run": line["run"] + (" (counted above)" if line["again"] else ""),
            "counter": line["kind"],
            "measured": _cell_text(line, "measured"),
            "predicted": _cell_text(line, "predicted"),
            "error": percent(line["error"]),
            "above the states": percent(line["share"]),
            "without differences": percent(line["plain_error"]),
            "peak in": FULL if line["outcome"] != "ok" else line["peak_phase"] or "–",
        }
        for _, line in of_class(found[found["error"].notna()]).iterrows()
    )


def _cell_text(line: Mapping[str, Any] | pd.Series[Any], column: str) -> str:
    return gib(line[column]) + " GiB" if line["quantity"] in MEMORY else f"{line[column]:.4g} s"


def of_speed(found: pd.DataFrame) -> pd.DataFrame:
    """Tabulate errors of seconds a step by source and GPU: of the roofline, and of the calibrated time.

    The last column counts the readings within the interval. Those of the same trial count once.
    """
    speed = found[found["quantity"].isin(SPEED) & found["error"].notna() & ~found["again"]]
    if "calibrated_step_s" not in speed or (speed := speed[speed["calibrated_step_s"].notna()]).empty:
        return pd.DataFrame()
    speed = speed.reset_index(drop=True)
    took, low, step, high = (
        speed[name].astype(float)
        for name in ("measured", "calibrated_step_low_s", "calibrated_step_s", "calibrated_step_high_s")
    )
    speed["off"], speed["within"] = step / took - 1, took.between(low, high)
    lines = []
    groups: list[tuple[Any, pd.DataFrame]] = [*speed.groupby(["title", "gpu"], sort=False), (("all", ""), speed)]
    for names, mine in groups:
        off = mine["off"]
        lines.append(
            dict(zip(("source", "GPU"), map(str, names), strict=True))
            | {
                "readings": str(len(mine)),
                "estimated: median, signed": percent(mine["error"].median()),
                "calibrated: median, signed": percent(off.median()),
                "median": size(float(off.abs().median())),
                "90th percentile": size(float(off.abs().quantile(0.9))),
                "within the interval": f"{int(mine['within'].sum())} of {len(mine)}",
            }
        )
    return pd.DataFrame(lines)


def worst(values: pd.Series[float]) -> float:
    """Return the value that is farthest from zero, with its sign."""
    return float(values.iloc[int(np.argmax(values.abs().to_numpy(float)))])


def gib(value: float | None) -> str:
    """Return bytes as a number of GiB with three decimals, or a dash if the value is missing."""
    return "–" if value is None or pd.isna(value) else f"{value / GIB:,.3f}"


def percent(value: float | None) -> str:
    """Return a signed share in percent, three digits at least."""
    return "–" if value is None or pd.isna(value) else f"{100 * value:+.{_digits(value)}f} %"


def size(value: float | None) -> str:
    """Return a share in percent without a sign, three digits at least."""
    return "–" if value is None or pd.isna(value) else f"{100 * abs(value):.{_digits(value)}f} %"


def _digits(value: float) -> int:
    return 3 if abs(value) < 0.001 else 2 if abs(value) < 0.1 else 1
