"""Maximum sequence length, or batch, for many settings of the allocator and GPUs, from one symbolic trace.

As in batch_server.py this process only coordinates: traces are made, and points evaluated, in forked processes.
fit_survey.py chooses the points.
"""

import contextlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.hardware.gpu_lookup import Capability, memory_limit
from vramsweep.harness.machine import host_memory
from vramsweep.harness.search.axis_search import drive
from vramsweep.harness.search.fit_survey import LEAST_MARGIN, NARROW, REACH, Asked, Card, Edge, RequiredBytes, Survey
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import predicted_row, trace_cache
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.rank import result_file
from vramsweep.runners.symbolic.trace_family import Curve, curve, point
from vramsweep.runners.symbolic.trace_workers import Job, Tracer, at_once, forked, write_answers
from vramsweep.runners.trace.allocation_program import build_program
from vramsweep.runners.trace.symbolic_trace import Point, SymbolicTrace, columns
from vramsweep.runners.trace.trace_data import Trace, cublas_workspace, fitted, on
from vramsweep.runners.worker.batch_server import Trials, families

MOST = 10_000  # evaluations of a family, each a point under a setting: some minutes on two cores
POINTS = 1024  # points whose sizes are computed at once
CHUNK = 16  # points that one process evaluates, at most
FEW = 6  # trials of a family, at most, whose peaks at their maxima are reported: each costs a replay


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Find the maximum of each trial of the spec along its axis; return the exit status."""
    trials = {one["trial_id"]: Trial.model_validate(one["trial"]) for one in spec["trials"]}
    tracer = Tracer(folder, spec["timeout_s"])
    found: dict[str, Any] = {}
    for family in families(trials).values():
        found |= _of_family(family, spec["axis"], spec["values"], spec["every"], tracer, spec["timeout_s"])
    result_file.answer(folder, found)
    result_file.values(folder, {}, complete=True)
    return 0


def _of_family(
    family: Trials, axis: str, values: Sequence[int], every: bool, tracer: Tracer, deadline_s: float
) -> dict[str, Any]:
    """Find the maximum of each trial of a family. The result is kept for the user, as traces are.

    Trials that differ in the other axis too share the family's curve, but are surveyed apart.
    """
    anyone, asked = next(iter(family.values())), {key: one.model_dump(mode="json") for key, one in family.items()}
    kept = trace_cache.users_file(json.dumps(["edges", asked, axis, [*values], every], sort_keys=True), anyone)
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = {} if kept is None else json.loads(trace_cache.checked(trace_cache.load(kept)))
        if found:
            return found
    groups: dict[Point, dict[str, Trial]] = defaultdict(dict)
    for trial_id, trial in family.items():
        groups[point(trial.model_copy(update={axis: 1}))][trial_id] = trial
    firsts = {other: next(iter(group.values())) for other, group in groups.items()}
    along = {key: [one.model_copy(update={axis: value}) for value in values] for key, one in firsts.items()}
    known = curve(anyone, [point(trial) for trials in along.values() for trial in trials], tracer)
    found = {}
    for other, group in groups.items():
        edges = _of_group(group, along[other], known, every, tracer, deadline_s)
        for trial_id, edge in edges.items():
            peaks: dict[str, Any] = dict.fromkeys(PEAKS)
            if edge.largest is not None and len(family) <= FEW:
                peaks |= edge_peaks(known, family[trial_id].model_copy(update={axis: values[edge.largest]}))
            numbers = {"all_up_to": edge.all_up_to, "largest": edge.largest}
            named = {name: None if number is None else values[number] for name, number in numbers.items()}
            traced = edge.looked_at or not edge.unanswered  # without a trace there is no basis
            basis = (", ".join(known.bases()) if traced else None) or None
            found[trial_id] = asdict(edge) | named | {"of": len(values), "trace_basis": basis} | peaks
    if kept is not None and all(edge["complete"] for edge in found.values()):
        trace_cache.keep(kept, trace_cache.serialize(found))
    return found


PEAKS = ("peak_reserved_bytes", "peak_reserved_most_bytes")


def edge_peaks(known: Curve, trial: Trial) -> dict[str, Any]:
    """Return what the trial would reserve at its peak, in bytes, by column of its row."""
    if (traced := known.at(trial)) is None:
        return {}
    trace, config = on(traced[0], _capability(trial)), allocator_config.parse(trial.allocator.conf)
    low = replay(trace, config, memory_limit(trial.device.card)).peak["reserved"]
    bounds = predicted_row.upper_bounds(trace, config, trial.memory_limit())
    return {PEAKS[0]: low, PEAKS[1]: bounds.get(PEAKS[1])}


def _of_group(
    family: Trials, trials: Sequence[Trial], known: Curve, every: bool, tracer: Tracer, deadline_s: float
) -> dict[str, Edge]:
    cards = {trial_id: Card(setting(trial), trial.memory_limit()) for trial_id, trial in family.items()}
    settings = {cards[trial_id].setting: trial for trial_id, trial in family.items()}
    limits = {name: sorted({card.limit for card in cards.values() if card.setting == name}) for name in settings}
    files = (tracer.folder / f"looked-{os.getpid()}-{number}.json" for number in count())

    def look(one: tuple[int, Rooms]) -> bytes:
        (number, asked), needs = one, dict[str, Any]()
        if (traced := known.at(trials[number])) is not None:
            for name, rooms in asked.items():
                own = on(traced[0], _capability(settings[name]))
                needs[name] = astuple(need(own, settings[name], rooms, limits[name]))
        return json.dumps([number, needs]).encode() + b"\n"

    replayed = 0

    def evaluate(surveys: Mapping[int, Asked]) -> dict[int, dict[int, dict[str, RequiredBytes]]]:
        nonlocal replayed
        [asked] = surveys.values()
        known.trace([trials[number] for number in asked])
        points, together = list(asked.items()), at_once()
        parts = min(len(points), together * math.ceil(len(points) / (CHUNK * together)))
        chunks = [points[first::parts] for first in range(parts)]  # interleaved, because neighbours take equally long
        places = [next(files) for _ in chunks]
        pairs = zip(chunks, places, strict=True)
        jobs: list[Job] = [
            (partial(write_answers, chunk, look, place), deadline_s * len(chunk)) for chunk, place in pairs
        ]
        for done, _ in enumerate(forked(jobs, together), 1):
            some = replayed + len(points) * done // parts
            result_file.progress(tracer.folder, f"replaying: {some:,} of at most {len(trials):,} trials")
        replayed += len(points)
        return {0: dict(_read(places))}

    result_file.progress(tracer.folder, f"adding up the requests of {len(trials):,} trials")
    survey = Survey(_floors(settings, trials, known), cards, every, math.inf if every else MOST)
    drive([survey], evaluate)
    return survey.found()


def _floors(settings: Trials, trials: Sequence[Trial], known: Curve) -> dict[str, list[float | None]]:
    """Return, by setting, the bytes that each of these trials requests at least.

    Infinite if the host's memory is not enough, None if unknown before the trial is traced.
    """
    floors: dict[str, list[float | None]] = {name: [] for name in settings}
    capabilities = {cublas_workspace(_capability(trial)): _capability(trial) for trial in settings.values()}
    host = any(trial.device.node_memory_gib is not None for trial in settings.values())
    together = {} if host else {size: _requested_together(trials, known, size) for size in capabilities}
    for number, one in enumerate(trials):
        least: dict[int, float | None] = {size: found[number] for size, found in together.items() if number in found}
        traced = None if least else known.at(one)
        if not least:
            least = {size: traced and requested(on(traced[0], capability)) for size, capability in capabilities.items()}
        for name, trial in settings.items():
            full = traced is not None and _host_full(traced[0], trial)
            floors[name].append(math.inf if full else least[cublas_workspace(_capability(trial))])
    return floors


def _requested_together(trials: Sequence[Trial], known: Curve, workspace: int) -> dict[int, float]:
    """Compute `requested` by number for trials with formulas, at once per formula; `workspace` is a GPU's, in bytes."""
    groups: dict[int, tuple[SymbolicTrace, list[int]]] = {}
    for number, trial in enumerate(trials):
        if (form := known.formulas(point(trial))) is not None:
            groups.setdefault(id(form), (form, []))[1].append(number)
    found: dict[int, float] = {}
    for form, numbers in groups.values():
        points = [point(trials[number]) for number in numbers]
        held = _most_held(form, points[0])
        sizes = np.vstack([*(columns(text, points) for text in form.formulas), np.full(len(points), workspace)])
        for at in range(0, len(numbers), POINTS):  # whole numbers below 2**53, so exact
            most = (held @ sizes[:, at : at + POINTS].astype(np.float64)).max(axis=0, initial=0)
            found |= zip(numbers[at : at + POINTS], map(int, most), strict=True)
    return found


def _most_held(form: SymbolicTrace, where: Point) -> npt.NDArray[np.float64]:
    """Count the storages of each formula, and last the GPU's workspaces, that are held at once.

    Return an array (moments, formulas + 1), with the moments at which that may be the most.
    """
    order, count = build_program(form.template), len(form.formulas)
    constant = zip(form.sizes, form.template.categories, form.sizes_at(where), strict=True)
    kinds = np.array([count if fitted(size, category, -1) < 0 else n for n, category, size in constant], dtype=np.intp)
    changes = np.zeros((sum(len(operations) for _, operations in order.phases) + 1, count + 1), dtype=np.int32)
    lives = order.gone < len(changes)
    np.add.at(changes, (order.born, kinds), 1)
    np.subtract.at(changes, (order.gone[lives], kinds[lives]), 1)
    frees = np.asarray((changes < 0).any(axis=1))
    tops = np.append(frees[1:], True) & ~frees  # the most is held just before a free
    different = {row.tobytes(): row for row in np.cumsum(changes, axis=0)[tops]}
    return np.array([*different.values()], dtype=np.float64).reshape(-1, count + 1)


Rooms = Mapping[str, Collection[int]]  # limits to try, by setting


def _read(places: Sequence[Path]) -> Iterator[tuple[int, dict[str, RequiredBytes]]]:
    for place in places:
        for line in place.read_bytes().split(b"\n")[:-1] if place.exists() else ():
            number, needs = json.loads(line)
            yield number, {name: RequiredBytes(*one) for name, one in needs.items()}
        place.unlink(missing_ok=True)


def setting(trial: Trial) -> str:
    """Return a name of all that decides how many bytes of the GPU a trace needs, and whether host memory is enough."""
    config = allocator_config.parse(trial.allocator.conf).render()
    return f"{config} {cublas_workspace(_capability(trial))} {host_memory.limit(trial)} {host_memory.ranks(trial)}"


def _capability(trial: Trial) -> Capability:
    return trial.device.card.capability


def need(trace: Trace, trial: Trial, rooms: Collection[int], limits: Sequence[int]) -> RequiredBytes:
    """Find the bytes that the trace needs under the trial's setting, by replays in each of `rooms`.

    Without rooms, replay in more than the largest limit, then in less. Stop once the need is known to a percent, is
    within 5 % of its lower bound (initially `requested`), or fits all limits. A limit that is met only by freeing
    cached memory is tried itself, because a trace may fit there and not in more. Of limits that contradict each other
    so, the larger counts.
    """
    config = replace(allocator_config.parse(trial.allocator.conf), per_process_memory_fraction=1.0)
    least = float(requested(trace))
    found = RequiredBytes(least, least, math.inf, False)
    if _host_full(trace, trial):
        return replace(found, least=math.inf)
    for free in sorted(rooms or [int(REACH * limits[-1])], reverse=True):
        found = _tried(trace, config, found, free)
    if not rooms:
        bare = found.enough
        while found.enough - found.least > LEAST_MARGIN * found.enough < math.inf:
            if found.enough < free and (found.enough <= limits[0] or found.enough <= found.least * (1 + NARROW)):
                break
            free = int(found.least + found.enough) // 2
            found = _tried(trace, config, found, free)
        for limit in [limit for limit in limits if found.floor <= limit < bare]:
            fits = replay(trace, config, limit).refused is None
            bound = partial(min, limit) if fits else partial(max, limit + 1)
            found = replace(found, least=bound(found.least), enough=bound(found.enough))
    return replace(found, close=not rooms)


def _tried(trace: Trace, config: AllocatorConfig, known: RequiredBytes, free: int) -> RequiredBytes:
    if not known.least <= free < known.enough:
        return known
    replayed = replay(trace, config, free)
    if replayed.refused is not None:
        return replace(known, least=free + 1)
    # with memory to spare it reserves the same; with garbage collection, reserved depends on the limit
    spare = replayed.final.num_alloc_retries == 0 and config.garbage_collection_threshold is None
    return replace(known, enough=replayed.peak["reserved"] if spare else free)


def requested(trace: Trace) -> int:
    """Return the most that the run requests at one time, in bytes; no setting reserves less."""
    order = build_program(trace)
    sizes = np.asarray(trace.sizes, dtype=np.int64)
    changes = np.zeros(sum(len(operations) for _, operations in order.phases) + 1, dtype=np.int64)
    lives = order.gone < len(changes)
    np.add.at(changes, order.born, sizes)
    np.subtract.at(changes, order.gone[lives], sizes[lives])
    return int(np.cumsum(changes).max(initial=0))


def _host_full(trace: Trace, trial: Trial) -> bool:
    if trial.device.node_memory_gib is None:
        return False
    return predicted_row.host_full(trial, predicted_row.host_of(trial, trace)) is not None
