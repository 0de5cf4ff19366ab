"""device=simulated with varying lengths: replays every step of the protocol at its own length in one allocator.

A trace has three steps of one length. This module splits it into loading and the passes of each step; the optimizer's
phase belongs to the last pass. The first step makes the optimizer's state; all steps after the third share one
template. Requests and frees of a pass are given by position: the i-th request of this pass, the i-th storage that the
pass before kept. So passes of any length can follow each other. They may even come from different traces: with padding
or without, or at a length with a kernel of its own. Sizes come from a symbolic trace at the pass's own length, or from
formulas or traces as for other predictions (trace_family.py). Only rank 0's batches are replayed.
"""

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.simulator import Simulator
from vramsweep.harness.hardware.gpu_lookup import GPUS, Gpu, memory_limit
from vramsweep.harness.messages.errors import EnvironmentFault
from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.steady_memory import reached_plateau, step_growth, steps_until_full
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.predict.memory_timeline import Held, describe_storage
from vramsweep.runners.predict.replay_trace import COUNTERS, Peaks, Prediction, Refused, parts, phase
from vramsweep.runners.symbolic.trace_family import Curve, curve
from vramsweep.runners.symbolic.trace_workers import Tracer
from vramsweep.runners.trace.allocation_program import EMPTY_CACHE, build_program
from vramsweep.runners.trace.symbolic_trace import Point
from vramsweep.runners.trace.trace_data import Mark, Trace, cublas_workspace, fitted

STEPS = 3  # steps of a trace
OTHERWISE = "cannot be predicted with varying lengths, because {}; set one length (data=synthetic), or measure it"
UNTIMED = "no estimated times, because lengths vary"


@dataclass(frozen=True)
class StepTemplate:
    """Requests and frees of loading or of a pass. `phases` are (phase, operations); with m own storages an operation is

    n from 1 to m: ask for own storage n; -n: free it; -m - n: free `carried[n - 1]`; 0: empty the cache.

    `storages[i]` is the trace's number of own storage i + 1; `kept` are own storages, from 1, that outlive the pass.
    `carried` are earlier storages as (age, position): made `age` passes ago, at this position among the storages which
    that pass kept. Age 0 means loaded.
    """

    phases: tuple[tuple[str, tuple[int, ...]], ...]
    storages: tuple[int, ...]
    carried: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class Forms:
    """The templates of a trace: of loading, and of the passes of its three steps and one more after the third.
    `trace` is the trace whose numbers `storages` are."""

    trace: Trace
    load: StepTemplate
    steps: tuple[tuple[StepTemplate, ...], ...]

    def of(self, step: int, at: int) -> StepTemplate:
        """Return the template of pass `at` of a run's step."""
        return self.steps[min(step, STEPS)][at]


def forms(trace: Trace) -> Forms:
    """Split a trace of three steps into templates. Raises InvalidTrial if further steps cannot be like its third."""
    parts: list[list[tuple[Mark, tuple[int, ...]]]] = []
    for mark, operations in build_program(trace).phases:
        before = parts[-1][-1][0] if parts else None
        if before is None or before.step != mark.step or (before.phase, mark.phase) == ("backward", "forward"):
            parts.append([])
        parts[-1].append((mark, operations))
    born: dict[int, tuple[int, int]] = {}  # by the trace's number: its part (0: loading) and number there
    kept: list[tuple[int, ...]] = []
    found: list[StepTemplate] = []
    for part, phases in enumerate(parts):
        form = _form(phases, part, born, kept)
        found.append(form)
        kept.append(tuple(form.storages[n - 1] for n in form.kept))
    passes, uneven = divmod(len(found) - 1, STEPS)
    if uneven:
        raise InvalidTrial(OTHERWISE.format("its steps differ in their number of passes"))
    load, *rest = found
    first, second, third = (tuple(rest[step * passes : (step + 1) * passes]) for step in range(STEPS))
    return Forms(trace, load, (first, second, third, _further(second, third)))


def _further(second: tuple[StepTemplate, ...], third: tuple[StepTemplate, ...]) -> tuple[StepTemplate, ...]:
    """Return the third step as it would follow itself. It lacks what the second kept for good, such as buckets that
    DistributedDataParallel makes anew. So there positions count only storages that a later pass frees."""
    before = len(second)
    used: list[set[int]] = [set() for _ in second]
    for at, form in enumerate((*second, *third)):
        for age, position in form.carried:
            if at >= before and not 0 < age <= at:
                raise InvalidTrial(OTHERWISE.format("a step behaves differently from the one before it"))
            if age and 0 <= at - age < before:
                used[at - age].add(position)
    for part, (one, other) in enumerate(zip(second, third, strict=True)):
        if one.kept == other.kept:
            used[part] = set(range(len(one.kept)))
        elif len(used[part]) != len(other.kept):
            raise InvalidTrial(OTHERWISE.format("a step behaves differently from the one before it"))
    ranks = [{position: rank for rank, position in enumerate(sorted(positions))} for positions in used]

    def where(at: int, age: int, position: int) -> tuple[int, int]:
        part = before + at - age
        return age, ranks[part][position] if part < before else position

    return tuple(replace(form, carried=tuple(where(at, *one) for one in form.carried)) for at, form in enumerate(third))


def _form(
    phases: Sequence[tuple[Mark, tuple[int, ...]]], part: int, born: dict[int, tuple[int, int]],
    kept: Sequence[tuple[int, ...]],
) -> StepTemplate:  # fmt: skip
    own: dict[int, int] = {}  # the trace's number, from 1: the template's, from 1
    for _, operations in phases:
        for operation in operations:
            if operation > 0:
                own[operation] = len(own) + 1
    alive, carried = dict.fromkeys(own), dict[tuple[int, int], int]()
    done = []
    for mark, operations in phases:
        told = []
        for operation in operations:
            if operation > 0 or operation == EMPTY_CACHE:
                told.append(own.get(operation, EMPTY_CACHE))
            elif -operation in own:
                del alive[-operation]
                told.append(-own[-operation])
            else:
                of = born[-operation][0]
                where = (0 if of == 0 else part - of, kept[of].index(-operation - 1))
                told.append(-len(own) - carried.setdefault(where, len(carried) + 1))
        done.append((mark.phase, tuple(told)))
    born |= {number: (part, ours) for number, ours in own.items()}
    storages = tuple(number - 1 for number in own)
    return StepTemplate(tuple(done), storages, tuple(carried), tuple(own[number] for number in alive))


@dataclass(frozen=True)
class Sized:
    """Loading, or one pass of a run: its template, and the size of each of its own storages in bytes."""

    forms: Forms
    form: StepTemplate
    sizes: Sequence[int]


@dataclass
class TraceFamily:
    """The traces of batches with padding and of batches without, at all lengths that occur."""

    curves: Mapping[bool, Curve]
    _forms: dict[int, tuple[Forms, length_distribution.Batch]] = field(default_factory=dict)
    _traced: dict[tuple[bool, Point], tuple[Trace, str]] = field(default_factory=dict)

    def load(self, trial: Trial, batch: length_distribution.Batch) -> Sized:
        """Return loading, which no batch changes. Raises InvalidTrial if it cannot be known."""
        trace, sizes, _ = self._sizes(trial, batch)
        apart = self.forms(trace, batch)
        return self._own(trial, apart, apart.load, sizes)

    def step(
        self, trial: Trial, number: int, passes: Sequence[length_distribution.Batch]
    ) -> tuple[list[Sized], set[str]]:
        """Return the passes of a step and the bases of their sizes. Raises InvalidTrial if they cannot be known."""
        done, rests = [], set()
        for at, batch in enumerate(passes):
            trace, sizes, basis = self._sizes(trial, batch)
            apart = self.forms(trace, batch)
            if len(apart.steps[0]) != len(passes):
                raise InvalidTrial(OTHERWISE.format("the passes of a step cannot be distinguished"))
            done.append(self._own(trial, apart, apart.of(number, at), sizes))
            rests.add(basis)
        return done, rests

    def details(self, trial: Trial, passes: Sequence[length_distribution.Batch]) -> tuple[Trace, dict[str, Any]]:
        """Return the whole trace of a step's widest pass, and the columns about what was built.

        Raises InvalidTrial if there is no such trace.
        """
        return self._trace(trial, max(passes, key=lambda one: (one.width, one.padded)))[:2]

    def _trace(self, trial: Trial, batch: length_distribution.Batch) -> tuple[Trace, dict[str, Any], str]:
        where = Point(batch.width, batch.samples)
        found = self.curves[batch.padded].at(representative_trial(trial, batch.padded, where))
        if found is None:
            raise InvalidTrial(OTHERWISE.format(f"it has no trace of {where.micro_batch} x {where.seq_len} tokens"))
        return found

    def forms(self, trace: Trace, batch: length_distribution.Batch) -> Forms:
        """Return the templates of a batch's trace, split once for all traces with the same list of events."""
        key = id(trace.events)
        if key not in self._forms:
            new = forms(trace)
            for old, other in self._forms.values():
                kept = [[[len(form.kept) for form in step] for step in one.steps] for one in (old, new)]
                if old.load != new.load or kept[0] != kept[1]:
                    odd = min(batch, other, key=lambda one: one.tokens)
                    what = f"steps of {odd.samples} x {odd.width} tokens keep other tensors than other steps do"
                    raise InvalidTrial(OTHERWISE.format(f"{what} (try padding_to=8)"))
            self._forms[key] = new, batch
        return self._forms[key][0]

    def _sizes(self, trial: Trial, batch: length_distribution.Batch) -> tuple[Trace, Sequence[int], str]:
        """Return the template trace of a batch, the sizes of its storages in bytes, and their basis."""
        padded, where = batch.padded, Point(batch.width, batch.samples)
        known = self.curves[padded].formulas(where)
        if known is not None:
            return known.template, known.sizes_at(where), known.basis
        if (padded, where) not in self._traced:
            trace, _, basis = self._trace(trial, batch)
            self._traced[padded, where] = trace, basis
        trace, basis = self._traced[padded, where]
        return trace, trace.sizes, basis

    @staticmethod
    def _own(trial: Trial, apart: Forms, form: StepTemplate, sizes: Sequence[int]) -> Sized:
        workspace, categories = cublas_workspace(trial.device.card.capability), apart.trace.categories
        own = [fitted(sizes[number], categories[number], workspace) for number in form.storages]
        return Sized(apart, form, own)


def representative_trial(trial: Trial, padded: bool, where: Point) -> Trial:
    """Return a trial whose batches all have one shape, each with padding or each without."""
    shape = {"seq_len": where.seq_len, "micro_batch": where.micro_batch}
    alike = length_distribution.one_length_settings(padded)
    return trial.model_copy(update={**alike, **shape, "seed": 0, "fingerprints": {}})


def passes(trial: Trial) -> list[Sequence[length_distribution.Batch]]:
    """Return rank 0's micro-batches of each protocol step. Raises EnvironmentFault if the file of lengths changed."""
    every = length_distribution.batches(trial, length_distribution.protocol_steps(trial))
    return [length_distribution.of_rank(step, 0, trial.world_size) for step in every]


def family(trials: Collection[Trial], tracer: Tracer) -> TraceFamily:
    """Trace what all steps of these trials need; the trials differ only in lengths."""
    wanted: dict[bool, set[Point]] = {False: set(), True: set()}
    for trial in trials:
        with suppress(EnvironmentFault):  # of the file of lengths; predicting that trial reports it
            for batch in itertools.chain.from_iterable(passes(trial)):
                wanted[batch.padded].add(Point(batch.width, batch.samples))
    anyone = next(iter(trials))
    curves = {}
    for padded, points in wanted.items():
        if points:
            some = representative_trial(anyone, padded, min(points))
            curves[padded] = curve(some, points, tracer)
            curves[padded].trace([representative_trial(some, padded, where) for where in sorted(points)])
    return TraceFamily(curves)


def refused(trial: Trial, tracer: Tracer) -> dict[str, Any] | None:
    """Return the error that says why some batch of the trial cannot be traced, or None."""
    with suppress(EnvironmentFault):
        for one in set(itertools.chain.from_iterable(passes(trial))):
            error = tracer.refused(representative_trial(trial, one.padded, Point(one.width, one.samples)))
            if error is not None:
                return error
    return None


@dataclass(frozen=True)
class Run:
    """The replay of all steps of a run: `ends` are (allocated, reserved) at the end of each, in bytes."""

    predicted: Prediction
    ends: tuple[tuple[int, int], ...]
    asked: Held | None


def replay(
    load: Sized, steps: Iterator[Sequence[Sized]], config: allocator_config.AllocatorConfig, limit: int | None
) -> Run:
    """Replay loading and all steps, one after the other, from an empty allocator."""
    return _Replay(Simulator(config, limit)).run(load, steps)


class _Replay:
    """A replay in progress. Its `count` storages so far are numbered from 1 as they come; `alive` outlive their pass.
    `kept` lists the storages that loading and each pass kept, in order. A freed storage is forgotten, because a run
    may have thousands of passes."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.count = 0
        self.sizes: dict[int, int] = {}  # bytes by number minus 1; the two below are so too
        self.streams: dict[int, int] = {}
        self.categories: dict[int, str] = {}
        self.alive: set[int] = set()
        self.kept: list[list[int]] = []
        self.phases: list[tuple[Mark, Peaks]] = []
        self.peak = dict.fromkeys(COUNTERS, 0)
        self.breakdown = parts((), 0)
        self.refused: tuple[Refused, Held] | None = None

    def run(self, load: Sized, steps: Iterator[Sequence[Sized]]) -> Run:
        ends: list[tuple[int, int]] = []
        self._part(None, load)
        for number, step in enumerate(steps):
            for one in step:
                if self.refused is None:
                    self._part(number, one)
            if self.refused is not None:
                break
            ends.append((self.simulator.allocated, self.simulator.reserved))
        refused, asked = self.refused or (None, None)
        done = Prediction(tuple(self.phases), self.peak, self.breakdown, self.simulator.stats(), refused)
        return Run(done, tuple(ends), asked)

    def _part(self, number: int | None, step: Sized) -> None:
        """Replay a pass of a step, or loading (`number` None)."""
        form, trace, before, first = step.form, step.forms.trace, self.peak["allocated"], self.count
        carried = [self.kept[-age if age else 0][at] for age, at in form.carried]
        names = [EMPTY_CACHE, *range(first + 1, first + len(form.storages) + 1), *carried]
        self.count += len(form.storages)
        self.sizes |= enumerate(step.sizes, first)
        self.streams |= enumerate((trace.streams[own] for own in form.storages), first)
        self.categories |= enumerate((trace.categories[own] for own in form.storages), first)
        done: list[int] = []
        busiest = 0
        for name, told in form.phases:
            operations = [names[one] if one > 0 else -names[-one] for one in told]
            most = self.peak["allocated"]
            peaks, found, full = phase(self.simulator, operations, self.sizes, self.streams, most, storages=self.count)
            busiest = found or busiest
            done += operations
            self.peak = {c: max(self.peak[c], peaks[c]) for c in COUNTERS}
            self.phases.append((Mark(0, number, name), peaks))  # type: ignore[arg-type]
            if full:
                self.refused = self._refuse(trace, form.storages[full - first - 1], self.phases[-1][0], full, done)
                break
        if self.peak["allocated"] > before:
            self.breakdown = self._parts(done, busiest, self.peak["allocated"])
        self.alive = self._after(done)
        for gone in {*range(first + 1, self.count + 1), *carried} - self.alive:
            del self.sizes[gone - 1], self.streams[gone - 1], self.categories[gone - 1]
        self.kept.append([first + own for own in form.kept])

    def _after(self, operations: Sequence[int], until: int | None = None) -> set[int]:
        """Return the storages alive after these operations of the pass, or once it has asked for storage `until`."""
        alive = self.alive.copy()
        for operation in operations:
            if operation > 0:
                alive.add(operation)
            else:
                alive.discard(-operation)
            if operation == until:
                break
        return alive

    def _parts(self, operations: Sequence[int], until: int, allocated: int) -> dict[str, int]:
        """Return the bytes alive by category once storage `until` was asked for; they sum to `allocated`."""
        alive = self._after(operations, until)
        return parts(((self.categories[one - 1], self.sizes[one - 1]) for one in alive), allocated)

    def _refuse(
        self, trace: Trace, number: int, mark: Mark, full: int, operations: Sequence[int]
    ) -> tuple[Refused, Held]:
        """Describe storage `full`, number `number` of the trace, which does not fit within the limit."""
        size, allocated = self.sizes[full - 1], self.simulator.allocated
        beside = self._parts(operations, full, allocated + size)
        asked = replace(describe_storage(trace, number, mark), bytes=size)
        return Refused(mark, number, size, allocated, self.simulator.reserved, beside), asked


def predict(trial: Trial, found: TraceFamily) -> predicted_row.Predicted:
    """Predict the trial's row from every step of its protocol. Raises InvalidTrial if it cannot be predicted."""
    config = allocator_config.parse(trial.allocator.conf)
    card, every = trial.device.card, passes(trial)
    rests: Counter[str] = Counter()

    def steps(count: bool = False) -> Iterator[Sequence[Sized]]:
        for number, own in enumerate(every):
            step, bases = found.step(trial, number, own)
            if count:
                rests.update([" and ".join(sorted(bases))])
            yield step

    load = found.load(trial, every[0][0])
    done = replay(load, steps(count=True), config, memory_limit(card))
    widest = max(every, key=lambda step: max((one.tokens, one.padded) for one in step))
    trace, details = found.details(trial, widest)
    host = predicted_row.host_of(trial, trace)
    basis = next(iter(rests))  # of the steps' sizes; if there are several, each with its number of steps
    if len(rests) > 1:
        basis = ", ".join(f"{basis} ({count} steps)" for basis, count in rests.most_common())
    about = predicted_row.static_columns(trial, basis, host, details)
    predicted = done.predicted
    if (text := predicted_row.host_refused(trial, host)) is not None:
        error = predicted_row.SimulatedHostOutOfMemoryError(text, about)
        return predicted_row.Predicted(about, predicted.phases, error)
    if predicted.refused is not None and done.asked is not None:
        whole = replay(load, steps(), replace(config, per_process_memory_fraction=1.0), None).predicted
        about |= predicted_row.oom_columns(predicted.refused)
        about |= {"unlimited_peak_reserved_bytes": whole.peak["reserved"]}
        text = predicted_row.refused_text(predicted.refused, done.asked, trial, whole)

        def fits(gpu: Gpu) -> bool:
            return replay(load, steps(), config, memory_limit(gpu)).predicted.refused is None

        if enough := _smaller(card, math.ceil(whole.peak["reserved"] / config.per_process_memory_fraction), fits):
            text += f" ({enough.name} is enough, because PyTorch frees cached memory at the limit)"
        at = predicted.refused.mark.step
        if at is not None:
            text += f"; that step's batch is {' + '.join(f'{one.samples} x {one.width}' for one in every[at])} tokens"
        return predicted_row.Predicted(about, predicted.phases, predicted_row.SimulatedOutOfMemoryError(text, about))
    columns = _columns(trial, done, every) | details | _kernels(found, trial, every) | about
    notes = [*(details.get("notes") or ()), *allocator_config.estimates(config)]
    notes += allocator_config.without_effect(config)
    notes += [*predicted_row.ignored_settings(trial, details.get("differences") or ()), UNTIMED]
    columns |= length_distribution.length_columns(trial) | {"notes": notes}
    return predicted_row.Predicted(columns, predicted.phases, None)


def _smaller(card: Gpu, need: int, fits: Callable[[Gpu], bool]) -> Gpu | None:
    """Return the smallest GPU that the run fits, by bisection, or None. Candidates have more memory than `card` and
    less than `need`, the bytes without a limit. Their compute capability is at least 8.0 and at least `card`'s."""
    least = max(card.capability, (8, 0))
    alike = [replace(gpu, headroom_gib=card.headroom_gib) for gpu in reversed(GPUS) if gpu.capability >= least]
    larger = sorted((gpu for gpu in alike if memory_limit(card) < memory_limit(gpu) < need), key=memory_limit)
    at = bisect.bisect_left(larger, True, key=fits)
    return larger[at] if at < len(larger) else None


def _columns(trial: Trial, done: Run, every: Sequence[Sequence[length_distribution.Batch]]) -> dict[str, Any]:
    """Return memory columns like a measured row's: phases of the probe step, lists of the measured steps."""
    probe, predicted = trial.protocol.warmup_steps, done.predicted
    measured = range(probe + 1, len(every))
    shown = [(mark, peaks) for mark, peaks in predicted.phases if mark.step in (None, probe)]
    most = {c: dict.fromkeys(measured, 0) for c in ("allocated", "reserved")}
    for mark, peaks in predicted.phases:
        if mark.step is not None and mark.step in measured:
            for counter, of_step in most.items():
                of_step[mark.step] = max(of_step[mark.step], peaks[counter])
    ends = [done.ends[step] for step in measured]
    allocated, reserved = (list(values) for values in zip(*ends, strict=True))
    grown, flat = step_growth(allocated), reached_plateau(list(most["reserved"].values()))
    return predicted_row.columns(replace(predicted, phases=tuple(shown))) | {
        **{f"step_peak_{counter}_bytes": list(of_step.values()) for counter, of_step in most.items()},
        "step_allocated_bytes": allocated,
        "step_reserved_bytes": reserved,
        "step_tokens": [sum(one.tokens for one in every[step]) for step in measured],
        "step_growth_bytes": grown,
        "full_after_steps": steps_until_full(len(every), grown, trial.memory_limit() - max(most["allocated"].values())),
        "plateau": None if flat is None else flat and (grown or 0) <= 0,
    }


def _kernels(found: TraceFamily, trial: Trial, every: Sequence[Sequence[length_distribution.Batch]]) -> dict[str, Any]:
    """Return the column of attention kernels, over batches with padding and batches without."""
    some = {one.padded: one for one in itertools.chain.from_iterable(every)}
    seen = {kernel for one in some.values() for kernel in found.details(trial, [one])[1]["attention_kernels"] or ()}
    return {"attention_kernels": sorted(seen) or None}
