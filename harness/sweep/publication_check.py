"""A check of whether a results folder may be published, and why not, from its rows alone.

A claim is about memory or about speed. A finding forbids one, both, or none; then it must be stated next to the
numbers. Flags are computed anew from the rows' own columns, so that rows older than a flag have it too. Flags that a
row got when it was made count as well. docs/how_measurement_works.md has the thresholds and their sources.

Not covered: whether what is claimed follows from the rows (analysis/), whether predictions are right
(benchmarks/validate.py).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vramsweep.harness.rows import journal, repeats
from vramsweep.harness.rows.outcome import is_answer
from vramsweep.harness.rows.quality_flags import BOTH, FLAGS, MEMORY, SPEED, Flag
from vramsweep.harness.rows.schema import SYSTEM, Outcome, Row, system_of
from vramsweep.harness.sweep import sweep_status

FEWEST_STEPS = 10  # nvbench's --min-samples
BY_CHANCE = 0.05  # from this probability on, flags are taken for false alarms

EXAMPLES = 2
# Columns without which nobody knows what was measured, by device; every row also needs one of `CODE`.
NEEDED = {
    "cuda": ("gpu_name", "driver_version", "cuda_version", "torch_version"),
    "cpu": ("cpu_name", "torch_version"),
    "simulated": ("simulated_gpu", "torch_version"),
}
CODE = ("git_commit", "vramsweep_version")


@dataclass(frozen=True)
class Finding:
    """A reason against publishing, or a remark: the claims that it forbids, the count, the text, and examples."""

    forbids: tuple[str, ...]
    kind: str
    count: int
    text: str
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """The rows of a folder: all of them, the last one of each trial and system, and of these the measured ones.

    `runs` are the measured rows that finished, by configuration. `plan` is how far the sweep is.
    """

    rows: Sequence[Row]
    answers: Sequence[Row]
    measured: Sequence[Row]
    runs: Sequence[Sequence[Row]]
    plan: sweep_status.Status | None

    @property
    def claims(self) -> tuple[str, ...]:
        """Claims for which there are numbers."""
        ok = [row for row in self.answers if row["outcome"] == Outcome.OK]
        speed = any(row.get("tokens_per_s") is not None for row in self.measured)
        return (MEMORY,) * bool(ok) + (SPEED,) * speed


def evidence(rows: Sequence[Row], plan: sweep_status.Status | None) -> Evidence:
    """Sort the rows for the questions below."""
    last = {(row["trial_id"], system_of(row)): row for row in rows if row.get("terminal")}
    answers = list(last.values())
    measured = [r for r in answers if r["outcome"] in (Outcome.OK, Outcome.OOM) and r.get("device") != "simulated"]
    runs = [[dict(run) for run in runs] for runs in repeats.configurations(r for r in rows if r.get("terminal"))]
    return Evidence(rows, answers, measured, runs, plan)


def findings(rows: Sequence[Row], plan: sweep_status.Status | None) -> list[Finding]:
    """Return what speaks against the rows, the finding that forbids most first."""
    found = evidence(rows, plan)
    every = [finding for question in QUESTIONS for finding in question(found)]
    return sorted(every, key=lambda one: (-len(one.forbids), one.forbids != (MEMORY,), -one.count))


def _finished(of: Evidence) -> Iterable[Finding]:
    plan = of.plan
    if not of.answers:
        yield Finding(BOTH, "empty", 0, "no trial has finished; run the sweep first")
        return
    left = 0 if plan is None or plan.total is None else plan.total - plan.done
    if plan is not None and plan.state == "running":
        yield Finding(BOTH, "running", left, f"the sweep is still running; {left:,} trials are left")
    elif left and plan is not None:
        planned = plan.command_total or plan.total
        text = f"{left:,} of {planned:,} planned trials have not finished; run the same command again"
        yield Finding(BOTH, "unanswered", left, text)


def _damaged(of: Evidence) -> Iterable[Finding]:
    """Yield damaged lines, which are harmless if every planned trial has an answer all the same."""
    lines = of.plan.unreadable if of.plan else 0
    whole = of.plan is not None and of.plan.total is not None and of.plan.done == of.plan.total
    if lines:
        why = "but every planned trial has finished" if whole else "so rows may be missing; run the sweep again"
        yield Finding(() if whole else BOTH, "damaged", lines, f"damaged lines in the journal: {lines:,}, {why}")


def _failed(of: Evidence) -> Iterable[Finding]:
    failed = [row for row in of.answers if not is_answer(row["outcome"])]
    kinds = ", ".join(sorted({str(row["outcome"]) for row in failed}))
    yield from _find(failed, (), "failed", "trial", f"failed ({kinds}), so their numbers are missing")


def _provenance(of: Evidence) -> Iterable[Finding]:
    rows = [row for row in of.answers if row["outcome"] in (Outcome.OK, Outcome.OOM)]
    lacking: dict[str, list[Row]] = {}
    for row in rows:
        unknown = [name for name in NEEDED.get(str(row.get("device")), ()) if row.get(name) is None]
        unknown += [" or ".join(CODE)] * all(row.get(name) is None for name in CODE)
        for name in unknown:
            lacking.setdefault(name, []).append(row)
    for name, some in lacking.items():
        yield from _find(some, BOTH, "provenance", "row", f"without {name}")
    dirty = [row for row in rows if str(row.get("git_commit")).endswith("+dirty")]
    text = "from a checkout with changed files (+dirty); nobody can check out the same code"
    yield from _find(dirty, BOTH, "dirty", "row", text)


def _flagged(of: Evidence) -> Iterable[Finding]:
    predicted = [row for row in of.answers if row["outcome"] == Outcome.OK and row.get("device") == "simulated"]
    for flag in FLAGS:
        judged = [*of.measured, *(predicted if flag.predicted else ())]
        told = [(row, flag.test(row)) for row in judged]
        has = [row for row, answer in told if answer or flag.name in (row.get("flags") or ())]
        tested = sum(answer is not None for _, answer in told)
        chance = _by_chance(flag, len(has), tested)
        said = f"; chance alone can flag this many of {tested:,} rows" if chance else ""
        text = f"of {len(judged):,} flagged {flag.name}: {flag.meaning}{said}"
        yield from _find(has, () if chance else flag.forbids, flag.name, "row", text)


def _by_chance(flag: Flag, count: int, tested: int) -> bool:
    """Return whether `count` false alarms or more are nothing unusual among so many tests (binomial)."""
    if not count or not flag.chance:
        return False
    from scipy.special import bdtrc

    return float(bdtrc(count - 1, tested, flag.chance)) >= BY_CHANCE


def _repeats(of: Evidence) -> Iterable[Finding]:
    found = sorted((one for runs in of.runs for one in repeats.find_apart(runs)), key=lambda one: one.low - one.high)
    if found:
        text = f"pair(s) of runs whose memory should be identical and is not; {found[0].text()}"
        yield Finding((MEMORY,), "repeats", len(found), f"{len(found):,} {text}")


def _processes(of: Evidence) -> Iterable[Finding]:
    """Yield configurations measured in one process, whose spread nobody knows, and the widest interval of others."""
    speeds = [[(row["tokens_per_s"], row) for row in runs if row.get("tokens_per_s") is not None] for runs in of.runs]
    speeds = [runs for runs in speeds if runs]
    alone = [runs[0][1] for runs in speeds if len(runs) == 1]
    text = f"of {len(speeds):,} measured in only one process, so speed has no interval; use repeats=3"
    yield from _find(alone, (SPEED,), "processes", "configuration", text)
    known = [(found, runs[0][1]) for runs in speeds if (found := repeats.interval([speed for speed, _ in runs]))]
    if known:
        widest, row = max(known, key=lambda one: one[0].half_width)
        text = f"the 95 % interval of speed between processes, up to {100 * widest.half_width:.1f} % above the mean"
        yield Finding((), "intervals", len(known), f"{text} (trial {row['trial_id']})")


def _steps(of: Evidence) -> Iterable[Finding]:
    timed = (row for row in of.measured if row.get("tokens_per_s") is not None)
    few = [row for row in timed if (row.get("measured_steps") or 0) < FEWEST_STEPS]
    text = f"with fewer than {FEWEST_STEPS} measured steps, too few for speed; use protocol=quick or longer"
    yield from _find(few, (SPEED,), "steps", "row", text)


def _systems(of: Evidence) -> Iterable[Finding]:
    for name in (*SYSTEM, "driver_version"):
        of_device = {"gpu_name": "cuda", "cpu_name": "cpu"}.get(name)
        rows = of.measured if of_device is None else [row for row in of.measured if row.get("device") == of_device]
        values = sorted({str(row[name]) for row in rows if row.get(name) is not None})
        if len(values) > 1:
            yield Finding((), "systems", len(values), f"the {name} of each number; rows have {' and '.join(values)}")


def _predicted(of: Evidence) -> Iterable[Finding]:
    rows = [row for row in of.answers if row.get("device") == "simulated"]
    if rows and not of.measured:
        yield Finding((), "predicted", len(rows), "predicted; nothing here is measured")
    else:
        yield from _find(rows, (), "predicted", "row", "predicted, not measured")
    left_out = [row for row in rows if row.get("not_covered")]
    codes = ", ".join(sorted({code for row in left_out for code in row["not_covered"]}))
    yield from _find(left_out, (), "not_covered", "row", f"whose prediction does not cover all: {codes}")
    unproven = [row for row in rows if row.get("unproven")]
    names = ", ".join(sorted({name for row in unproven for name in row["unproven"]}))
    text = f"with techniques whose prediction no GPU has confirmed yet: {names}"
    yield from _find(unproven, (), "unproven", "row", text)


QUESTIONS: tuple[Callable[[Evidence], Iterable[Finding]], ...] = (
    _finished, _damaged, _failed, _provenance, _flagged, _repeats, _processes, _steps, _systems, _predicted,
)  # fmt: skip


def _find(rows: Sequence[Row], forbids: tuple[str, ...], kind: str, noun: str, text: str) -> Iterable[Finding]:
    if rows:
        counted = f"{len(rows):,} {noun}{'s' * (len(rows) > 1)} {text}"
        yield Finding(forbids, kind, len(rows), counted, tuple(str(row["trial_id"]) for row in rows[:EXAMPLES]))


@dataclass(frozen=True)
class Verdict:
    """A folder's findings, and for each claim that it has numbers for whether it may be published."""

    folder: str
    rows: int
    measured: int
    claims: dict[str, bool]
    findings: tuple[Finding, ...]


def judge_folder(folder: Path) -> Verdict:
    """Return the verdict on a results folder. Raises UserError if there is no journal in it."""
    rows, unreadable = journal.read(folder)
    plan = sweep_status.status_from_rows(folder, rows, unreadable, journal.plans(folder))
    of, found = evidence(rows, plan), findings(rows, plan)
    claims = {claim: not any(claim in one.forbids for one in found) for claim in of.claims}
    return Verdict(str(folder), len(of.answers), len(of.measured), claims, tuple(found))
