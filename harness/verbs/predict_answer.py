"""The answer of `vramsweep predict`: a block for each of a few trials, a table of many, and commands to run next.

predict.py makes the rows, harness/sweep/result_table.py the table.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.config import typed_words
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.units import format_estimate, format_gib
from vramsweep.harness.questions import largest_prediction
from vramsweep.harness.questions.fit_prediction import find_need
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec import fit_text
from vramsweep.harness.spec.not_covered import EAGER, describe
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep import result_table
from vramsweep.harness.sweep.labels import Labels, describe_common, flatten
from vramsweep.harness.sweep.plan import Planned

HOST = 64 << 30  # bytes of host memory that not every node has
FEW = 6  # configurations that have a block each
OURS = ("device", "name", "results", "report", "repeats")  # settings that a suggested command leaves out
FULL = (Outcome.OOM, Outcome.HOST_OOM)
WITHIN = ("seed", "repeat", "protocol.name")  # in which trials of one configuration may differ, besides the axis
UNSAID = ("torch", "simulated", "protocol=quick")  # parts of a description that go without saying


def show_answer(planned: Sequence[Planned], rows: Mapping[str, Row], words: Sequence[str], folder: Path) -> bool:
    """Print the predictions of the trials; return whether each had a block. `words` are those of the command."""
    answered = [(item, rows[item.trial_id]) for item in planned if item.trial_id in rows]
    if not answered:
        return False
    console = Console()
    answered = [(item, result_table.add_options(row)) for item, row in answered]
    axis = result_table.choose_axis([row for _, row in answered])
    named = Labels(planned, (axis, *WITHIN))
    configurations: dict[str, list[Row]] = {}
    for item, row in answered:
        configurations.setdefault(named.apart(item) or "all trials", []).append(row)
    few = len(answered) <= FEW and len(configurations) == len(answered)
    if few:
        for item, row in answered:
            console.print("\n".join(["", *describe_prediction(item, row)]), soft_wrap=True)
    else:
        ordered = sorted(configurations.items(), key=lambda one: _order_key(one[0]))
        known = [(named.apart(item) or "all trials", item.trial) for item, _ in answered]
        most = {name: trial.model.max_positions for name, trial in known if trial is not None}
        summarize = partial(result_table.summarize_rows, axis=axis, predicted=True)
        lines = [summarize(name, own, most=most.get(name)) for name, own in ordered]
        unit = "tokens" if result_table.has_tokens([row for _, row in answered]) else "samples"
        parts = [part for part in describe_common(planned).split(" · ") if part not in UNSAID]
        common = " · ".join(part for part in parts if unit == "tokens" or not part.startswith("seq "))
        table, notes = result_table.make_result_table(lines, axis, console.width)
        codes = dict.fromkeys(code for _, row in answered for code in row["not_covered"] or ())
        console.print(f"\n{common}, predicted" + f" without {describe(EAGER)}" * (EAGER in codes) + "\n")
        console.print(table)
        trials = [item.trial for item, _ in answered if item.trial is not None]
        notes += [f"{unit}/s: of all GPUs together"] * any(trial.world_size > 1 for trial in trials)
        several = [one for one in answered if one[0].trial is not None and one[0].trial.world_size > 1]
        free = min((free for one in several if (free := _find_free(*one)) is not None), default=None)
        left_out = (text for trial in trials for text in fit_text.list_exclusions(trial, free))
        notes += dict.fromkeys(f"not included: {text}" for text in left_out)
        notes += [f"not covered: {text}" for text in map(describe, codes)]
        for note in notes:
            console.print(note)
    console.print(f"\n{fit_text.describe_limit([item.trial for item, _ in answered if item.trial is not None])}")
    page = {"figures and a page of these rows": ["report", str(folder)]} if few else {}
    following = {**suggest_next(answered, words), **page}
    if following:
        console.print("next:")
    for why, command in following.items():
        said = shlex.join(["vramsweep", *command]).replace(" device.gpu=", " gpu=")
        console.print(f"  {said}  # {why}", soft_wrap=True)
    return few


def _order_key(label: str) -> list[tuple[int, str]]:
    """Return a sort key of a label: its words by name, its numbers by value."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in label.split()]


def describe_prediction(item: Planned, row: Row) -> Iterator[str]:
    """Yield the lines of one predicted trial."""
    trial = item.trial
    if trial is None:
        yield Labels([item])(item)
        yield f"  cannot run: {row['reason']}"
        return
    codes = row["not_covered"] or ()
    length = "seq_len" if row["seq_len"] is None else ""  # images have none
    yield f"{fit_text.describe_run(trial, length)}, predicted" + f" without {describe(EAGER)}" * (EAGER in codes)
    yield f"  {_verdict(trial, row)}"
    if row["outcome"] not in (Outcome.OK, *FULL):
        return
    if (speed := _speed(trial, row)) is not None:
        yield f"  {speed}"
    yield from (f"  {text}" for text in allocator_config.estimates(allocator_config.parse(trial.allocator.conf)))
    yield from (f"  not included: {text}" for text in fit_text.list_exclusions(trial, _find_free(item, row)))
    if trial.device.node_memory_gib is None and (needed := row["host_peak_bytes"] or 0) >= HOST:
        yield f"  host memory: each node needs {format_gib(needed)} GiB; device.node_memory_gib=N sets what it has"
    yield from (f"  not covered: {text}" for text in map(describe, codes))


def _verdict(trial: Trial, row: Row) -> str:
    kind, limit = row["outcome"], trial.memory_limit()
    if kind == Outcome.OK:
        low = row["peak_reserved_bytes"]
        text = fit_text.describe_fit(low, fit_text.bound_reserved(low, row["peak_reserved_most_bytes"]), limit)
        slow = "; PyTorch empties its cache to stay within the limit, which takes time"
        return text + slow * bool(row["alloc_retries"])
    if kind == Outcome.OOM:
        where = f" (memory runs out in {row['phase']})" if row["phase"] else ""
        return fit_text.describe_misfit(row["unlimited_peak_reserved_bytes"], limit) + where
    if kind == Outcome.HOST_OOM:
        return f"does not fit in host memory: {row['reason']}"
    return f"no prediction ({kind}): {row['reason']}"


def _find_free(item: Planned, row: Row) -> int | None:
    """Return how many bytes of the limit a run leaves free at least; None if it is not known to fit."""
    need = None if item.trial is None or row["outcome"] != Outcome.OK else find_need(row)
    return None if need is None or item.trial is None else item.trial.memory_limit() - need


def _speed(trial: Trial, row: Row) -> str | None:
    of = f" of all {trial.world_size} GPUs together" if trial.world_size > 1 else ""
    fits = "" if row["outcome"] == Outcome.OK else " if it had enough memory"
    unit = "samples" if row["seq_len"] in (None, 1) else "tokens"
    for name, sure in (("calibrated_tokens_per_s", "about"), ("estimated_tokens_per_s", "at most")):
        if row[name] is not None:
            step, within = row.get("calibrated_step_s"), ""
            if sure == "about" and step and row.get("calibrated_step_high_s"):
                ends = (row[name] * step / row[f"calibrated_step_{end}_s"] for end in ("high", "low"))
                within = f" ({' to '.join(map(format_estimate, ends))})"
            return f"speed: {sure} {format_estimate(row[name])}{within} {unit}/s{of}{fits}; an estimate, not measured"
    return next((note for note in row["notes"] or () if note.startswith("no estimated times")), None)


def suggest_next(answered: Sequence[tuple[Planned, Row]], words: Sequence[str]) -> dict[str, list[str]]:
    """Return commands to run next, by purpose: for the smallest trial that does not fit, else the largest need."""
    full = [(find_need(row) or math.inf, item) for item, row in answered if row["outcome"] == Outcome.OOM]
    known = [(need, item) for item, row in answered if row["outcome"] == Outcome.OK and (need := find_need(row))]
    if not full and not known:
        return {}
    item = min(full, key=itemgetter(0))[1] if full else max(known, key=itemgetter(0))[1]
    if (spelled := name_trial(item, words)) is None or item.trial is None:
        return {}
    rows = [row for _, row in answered]
    batches = result_table.choose_axis(rows) == "micro_batch" and (len(rows) > 1 or not result_table.has_tokens(rows))
    axis, what = ("micro_batch", "the largest batch") if batches else ("seq_len", "the longest sequence")
    without = [word for word in spelled if not word.startswith(f"{axis}=")]
    more = [] if batches or item.trial.model.max_positions else ["seq_len=1..8192"]
    named = spelled or [f"model={item.trial.model.name}"]  # because these verbs need a setting
    return {
        "what makes it fit" if full else "what uses the memory": ["advise" if full else "explain", *named],
        f"{what} that fits": ["predict", "--largest", axis, *without, *more],
    }


def name_trial(item: Planned, words: Sequence[str]) -> list[str] | None:
    """Return the words of a command with the trial's single values; None if they cannot be determined."""
    values = flatten(item.resolved)
    found = []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key == "sweep" or key.startswith(("+", "~", "-")):
            return None
        if key in OURS:
            continue
        if "," in value or ".." in value or value.endswith(")"):
            at = values.get(key, values.get(f"{key}.name"))
            if at is None:
                return None
            word = f"{key}={typed_words.value(at)}"
        found.append(word)
    return found


def describe_largest(item: Planned, found: largest_prediction.Answer, axis: str, last: int | None) -> Iterator[str]:
    """Yield the lines of one trial's largest length or batch that fits; `last` is the largest that was requested."""
    what = {"seq_len": ("longest sequence", "tokens"), "micro_batch": ("largest batch", "samples per GPU")}[axis]
    trial = item.trial
    yield "" if trial is None else f"{fit_text.describe_run(trial, axis)}, predicted"
    if trial is None or found["largest"] is None:
        unknown = "unknown" if found["unanswered"] and not found["looked_at"] else "none"
        yield f"  {what[0]} that fits: {unknown}"
        return
    low, high = found.get("peak_reserved_bytes"), found.get("peak_reserved_most_bytes")
    ends = "" if low is None else fit_text.describe_range(low, fit_text.bound_reserved(low, high))
    peak = f" (peak {ends} of {format_gib(trial.memory_limit())} GiB)" if ends else ""
    more = ", the largest value requested" if found["largest"] == last else ""
    if axis == "seq_len" and found["largest"] == trial.model.max_positions:
        more = f", the maximum of {trial.model.name}"
    yield f"  {what[0]} that fits: {found['largest']:,} {what[1]}{more}{peak}"
    if found["all_up_to"] != found["largest"]:
        every = "none" if found["all_up_to"] is None else f"{found['all_up_to']:,}"
        yield f"  all fit up to: {every}; above that some do not, because the allocator rounds sizes"
    yield from (f"  not included: {text}" for text in fit_text.list_exclusions(trial))
