"""The traces of a family's points from few traces: by symbolic shapes if that works, else by fitted formulas.

A symbolic trace is tried first. It costs some direct traces, but its guards, and not a few points, say where it is
true. piecewise_templates.py covers points outside the guards: a batch of 1, a length with a kernel of its own. Points
that nothing covers are traced one by one. A row names which it was (`trace_basis`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.symbolic import piecewise_templates, symbolic_candidate
from vramsweep.runners.symbolic.trace_workers import Tracer
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace
from vramsweep.runners.trace.trace_data import Trace, on

FEW = piecewise_templates.FEW  # points: so few are as quickly traced one by one
TRIES = 3  # most symbolic traces of a family, such as one of single samples and one of several


@dataclass(frozen=True)
class Curve:
    """The traces of a family of trials."""

    symbolic: tuple[SymbolicTrace, ...]
    cover: piecewise_templates.Cover
    tracer: Tracer
    at_hand: dict[tuple[Point, str | None], Any] = field(default_factory=dict, compare=False, repr=False)  # last trace

    def predict(self, trial: Trial) -> predicted_row.Predicted | None:
        """Predict a trial; return None if it could not be traced. Only the last trace is kept for the next trial."""
        if (where := (point(trial), trial.device.gpu)) not in self.at_hand:
            self.at_hand.clear()
            self.at_hand[where] = self.at(trial)
        known = self.at_hand[where]
        return None if known is None or not known[0].serves(trial) else predicted_row.predict(trial, *known)

    def at(self, trial: Trial) -> tuple[Trace, dict[str, Any], str] | None:
        """Return the trial's trace on its GPU, the details and the basis; None if it could not be traced."""
        where = point(trial)
        form = next((one for one in self.symbolic if one.holds(where)), None)
        found = self.cover.at(where) if form is None else (*form.at(where), form.basis)
        if found is None and (own := self.tracer.found(trial)) is not None:
            found = (*own, predicted_row.TRACED)
        if found is None:
            return None
        trace, details, basis = found
        return on(trace, trial.device.card.capability), details, basis

    def formulas(self, where: Point) -> SymbolicTrace | None:
        """Return the formulas that are true of a point; None if it was traced itself or nothing covers it."""
        found = next((one for one in self.symbolic if one.holds(where)), None)
        return found or self.cover.formulas(where)

    def bases(self) -> list[str]:
        """Return the bases of the family's points, each once."""
        found = dict.fromkeys(one.basis for one in (*self.symbolic, *self.cover.pieces))
        return [*found, *([predicted_row.TRACED] if self.cover.left or self.cover.traced else [])]

    def trace(self, trials: Collection[Trial]) -> None:
        """Trace the trials whose points nothing covers."""
        left = self.cover.left
        self.tracer.trace([trial for trial in trials if point(trial) in left])


def curve(anyone: Trial, points: Collection[Point], tracer: Tracer) -> Curve:
    """Trace what these points of the trial's family need, and return the family's traces."""
    rest, symbolic = sorted(set(points)), []
    for _ in range(TRIES):
        found = _symbolic(anyone, rest, tracer)
        if found is None:
            break
        symbolic.append(found)
        rest = [where for where in rest if not found.holds(where)]

    @cache
    def padding(seq_len: int) -> Any:  # equal for all batches
        from vramsweep.runners.model import build  # imports torch, which cached traces do not need

        return build.data(anyone.model_copy(update={"seq_len": seq_len})).columns["padding_fraction"]

    def known(where: Point) -> dict[str, Any]:
        return {"padding_fraction": padding(where.seq_len)} if anyone.padding else {}

    def ask(wanted: Sequence[Point]) -> Any:
        return tracer.kept({where: at(anyone, where) for where in wanted})

    return Curve(tuple(symbolic), piecewise_templates.cover(rest, ask, known), tracer)


def lacks_traces(anyone: Trial, points: Collection[Point], tracer: Tracer) -> bool:
    """Return whether `curve` will have to trace, as far as kept files show."""
    middle = symbolic_trial(anyone, _traceable(sorted(points)))
    if middle is not None:
        return not tracer.is_symbolic_kept(middle)
    return not all(tracer.is_kept(at(anyone, where)) for where in points)


def symbolic_trial(anyone: Trial, points: Sequence[Point]) -> Trial | None:
    """Return the trial to trace with symbols, in the middle of the ordered points; None if they are few (`FEW`)."""
    return at(anyone, points[len(points) // 2]) if len(points) > FEW else None


def _traceable(points: Sequence[Point]) -> list[Point]:
    """Return the largest group of points at which one symbolic trace might hold; a 1 is never a symbol."""
    groups: dict[tuple[bool, bool], list[Point]] = {}
    for where in points:
        groups.setdefault((where.seq_len == 1, where.micro_batch == 1), []).append(where)
    return max(groups.values(), key=len, default=[])


def _symbolic(anyone: Trial, rest: Sequence[Point], tracer: Tracer) -> SymbolicTrace | None:
    """Return a symbolic trace of the middle point if it equals direct traces where it holds: at both ends, another
    alignment and another batch. Points where it cannot hold are traced at the same time if they are few."""
    points = _traceable(rest)
    if (middle := symbolic_trial(anyone, points)) is None:
        return None
    others = sorted(set(rest).difference(points)) if len(rest) - len(points) <= FEW else ()
    found = tracer.symbolic(middle, beside=[at(anyone, where) for where in (*witnesses(points), *others)])
    if not isinstance(found, symbolic_candidate.Candidate):
        return None
    confirmed = _confirmed(found, anyone, points, tracer)
    if isinstance(confirmed, symbolic_candidate.Refused):
        print(f"no symbolic trace: {confirmed.reason}", flush=True)
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
        return symbolic_candidate.Refused("its guards hold at points that cannot be traced")
    return symbolic_candidate.verified(found, {where: (one.trace, one.details) for where, one in direct.items()})


def witnesses(held: Sequence[Point]) -> list[Point]:
    """Return the witnesses of two or more ordered points: the first, the last, and any that differ from the first in
    alignment or batch."""
    first, later = held[0], held[len(held) // 3 :]
    aligned = next((w for w in later if (w.seq_len % 8 == 0) != (first.seq_len % 8 == 0)), later[0])
    batch = next((w for w in reversed(held) if w.micro_batch != first.micro_batch), held[-1])
    return list(dict.fromkeys((first, held[-1], aligned, batch)))


def point(trial: Trial) -> Point:
    """Return the point of a trial in its family."""
    padded = length_distribution.padded_tokens(trial.padding, trial.seq_len) if trial.data == "synthetic" else 0
    return Point(trial.seq_len, trial.micro_batch, trial.seq_len - padded if padded else None)


def at(trial: Trial, where: Point) -> Trial:
    """Return the trial at another point of its family."""
    return trial.model_copy(update={"seq_len": where.seq_len, "micro_batch": where.micro_batch})
