"""What is known of a family's points, from few traces: by symbolic shapes where they come, else by fitted formulas.

A symbolic trace is tried first: it costs some direct ones, but its guards say where it is true, not a few points. What
no guards cover (a batch of 1, a length with a kernel of its own) is left to piecewise_templates.py, and what nothing
covers is traced point by point. A row says which it was (`trace_basis`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.symbolic import piecewise_templates, symbolic_candidate
from vramsweep.runners.symbolic.trace_workers import Tracer
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace
from vramsweep.runners.trace.trace_data import Trace, on

FEW = piecewise_templates.FEW  # points that are as quickly traced one by one
TRIES = 3  # symbolic traces of a family at most: of one sample and of several, say


@dataclass(frozen=True)
class Curve:
    """The traces of a family. `anyone` is one of its trials."""

    anyone: Trial
    symbolic: tuple[SymbolicTrace, ...]
    cover: piecewise_templates.Cover
    tracer: Tracer

    def at(self, trial: Trial) -> tuple[Trace, dict[str, Any], str] | None:
        """The trial's trace, as its card has it, the details and what it rests on; None if it could not be traced."""
        found = self._known(trial)
        if found is None:
            return None
        trace, details, basis = found
        return on(trace, trial.device.card.capability), details, basis

    def formulas(self, where: Point) -> SymbolicTrace | None:
        """The formulas that are true of a point; None where it was traced itself, or is not known."""
        found = next((one for one in self.symbolic if one.holds(where)), None)
        return found or self.cover.formulas(where)

    def _known(self, trial: Trial) -> tuple[Trace, dict[str, Any], str] | None:
        where = point(trial)
        for one in self.symbolic:
            if one.holds(where):
                return *one.at(where), one.basis
        found = self.cover.at(where)
        if found is None and (own := self.tracer.found(trial)) is not None:
            found = (*own, predicted_row.TRACED)
        return found

    def bases(self) -> list[str]:
        """What its points rest on, each once."""
        found = dict.fromkeys(one.basis for one in (*self.symbolic, *self.cover.pieces))
        return [*found, *([predicted_row.TRACED] if self.cover.left or self.cover.traced else [])]

    def trace(self, trials: Collection[Trial]) -> None:
        """Trace those of the trials that nothing covers."""
        left = self.cover.left
        self.tracer.trace([trial for trial in trials if point(trial) in left])


def curve(anyone: Trial, points: Collection[Point], tracer: Tracer) -> Curve:
    """Trace what is needed to know these points of the trial's family."""
    rest, symbolic = sorted(set(points)), []
    for _ in range(TRIES):
        found = _symbolic(anyone, rest, tracer)
        if found is None:
            break
        symbolic.append(found)
        rest = [where for where in rest if not found.holds(where)]

    @cache
    def padding(seq_len: int) -> Any:  # the same for every batch
        from vramsweep.runners.model import build  # and torch, which kept traces do not need

        return build.data(anyone.model_copy(update={"seq_len": seq_len})).columns["padding_fraction"]

    def known(where: Point) -> dict[str, Any]:
        return {"padding_fraction": padding(where.seq_len)} if anyone.padding else {}

    def ask(wanted: Sequence[Point]) -> Any:
        return tracer.kept({where: at(anyone, where) for where in wanted})

    return Curve(anyone, tuple(symbolic), piecewise_templates.cover(rest, ask, known), tracer)


def lacks_traces(anyone: Trial, points: Collection[Point], tracer: Tracer) -> bool:
    """Whether `curve` will have to trace, as far as that can be told before."""
    middle = symbolic_trial(anyone, _traceable(sorted(points)))
    if middle is not None:
        return not tracer.is_symbolic_kept(middle)
    return not all(tracer.is_kept(at(anyone, where)) for where in points)


def symbolic_trial(anyone: Trial, points: Sequence[Point]) -> Trial | None:
    """The trial of a family whose trace is tried with symbols, in the middle of points in order; None for few."""
    return at(anyone, points[len(points) // 2]) if len(points) > FEW else None


def _traceable(points: Sequence[Point]) -> list[Point]:
    """Those of the points that one symbolic trace might hold at, the most that there are: a 1 is never a symbol."""
    groups: dict[tuple[bool, bool], list[Point]] = {}
    for where in points:
        groups.setdefault((where.seq_len == 1, where.micro_batch == 1), []).append(where)
    return max(groups.values(), key=len, default=[])


def _symbolic(anyone: Trial, rest: Sequence[Point], tracer: Tracer) -> SymbolicTrace | None:
    """A symbolic trace of the point in the middle, found equal to direct ones where it holds: at both ends, at a length
    that is otherwise aligned, and with another batch. Where it cannot hold is traced at the same time, if few."""
    points = _traceable(rest)
    if (middle := symbolic_trial(anyone, points)) is None:
        return None
    others = sorted(set(rest).difference(points)) if len(rest) - len(points) <= FEW else ()
    found = tracer.symbolic(middle, beside=[at(anyone, where) for where in (*witnesses(points), *others)])
    if not isinstance(found, symbolic_candidate.Candidate):
        return None
    confirmed = _confirmed(found, anyone, points, tracer)
    if isinstance(confirmed, symbolic_candidate.Refused):
        tracer.say(f"no symbolic trace: {confirmed.reason}")
        return None
    return confirmed


def _confirmed(
    found: symbolic_candidate.Candidate, anyone: Trial, points: Sequence[Point], tracer: Tracer
) -> SymbolicTrace | symbolic_candidate.Refused:
    held = [where for where in points if found.symbolic.holds(where)]
    if len(held) <= FEW:
        return symbolic_candidate.Refused(f"its guards hold at {len(held)} of {len(points)} points")
    asked = witnesses(held)
    direct = tracer.kept({where: at(anyone, where) for where in asked})
    if len(direct) < len(asked):
        return symbolic_candidate.Refused("it would hold where nothing can be traced")
    return symbolic_candidate.verified(found, {where: (one.trace, one.details) for where, one in direct.items()})


def witnesses(held: Sequence[Point]) -> list[Point]:
    """Of points in order, more than one: the first, the last, and such as differ from the first in alignment or batch,
    if there are any."""
    first, later = held[0], held[len(held) // 3 :]
    aligned = next((w for w in later if (w.seq_len % 8 == 0) != (first.seq_len % 8 == 0)), later[0])
    batch = next((w for w in reversed(held) if w.micro_batch != first.micro_batch), held[-1])
    return list(dict.fromkeys((first, held[-1], aligned, batch)))


def point(trial: Trial) -> Point:
    """Where in its family a trial is."""
    padded = length_distribution.padded_tokens(trial.padding, trial.seq_len) if trial.data == "synthetic" else 0
    return Point(trial.seq_len, trial.micro_batch, trial.seq_len - padded if padded else None)


def at(trial: Trial, where: Point) -> Trial:
    """The trial of the same family at another point."""
    return trial.model_copy(update={"seq_len": where.seq_len, "micro_batch": where.micro_batch})
