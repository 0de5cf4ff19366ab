"""The largest length, or batch, that fits, for many settings of the allocator and cards, from one symbolic trace.

The coordinator is batch_server.py's: traces are made, and points looked at, in processes of their own. Not covered:
which points are looked at (fit_survey.py).
"""

from __future__ import annotations

import json
import math
import os
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.hardware.gpu_lookup import Capability
from vramsweep.harness.machine import host_memory
from vramsweep.harness.search.fit_survey import LEAST_MARGIN, REACH, Asked, Card, Edge, RequiredBytes, Survey
from vramsweep.harness.search.strategy import drive
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.predict import predicted_row
from vramsweep.runners.predict.replay_trace import replay
from vramsweep.runners.rank import result_file
from vramsweep.runners.symbolic.trace_family import Curve, curve, point
from vramsweep.runners.symbolic.trace_workers import Job, Tracer, at_once, forked
from vramsweep.runners.trace.allocation_program import build_program
from vramsweep.runners.trace.cuda_allocations import cublas_workspace
from vramsweep.runners.trace.step_tracer import Trace, on
from vramsweep.runners.trace.symbolic_trace import Point
from vramsweep.runners.worker.batch_server import Trials, families

MOST = 10_000  # looks of a family, points under a setting: some minutes on two cores
CHUNK = 8  # points that one process looks at


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Find the edge of each trial of the spec along its axis; returns the exit status."""
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
    """The edge of each trial of a family; those that differ in the other axis too are of one curve, and apart."""
    groups: dict[Point, dict[str, Trial]] = defaultdict(dict)
    for trial_id, trial in family.items():
        groups[point(trial.model_copy(update={axis: 1}))][trial_id] = trial
    firsts = {other: next(iter(group.values())) for other, group in groups.items()}
    along = {key: [one.model_copy(update={axis: value}) for value in values] for key, one in firsts.items()}
    anyone = next(iter(family.values()))
    known = curve(anyone, [point(trial) for trials in along.values() for trial in trials], tracer)
    found: dict[str, Any] = {}
    for other, group in groups.items():
        edges = _of_group(group, along[other], known, every, tracer, deadline_s)
        found |= {trial_id: _encode_edge(edge, values, known.bases()) for trial_id, edge in edges.items()}
    return found


def _of_group(
    family: Trials, trials: Sequence[Trial], known: Curve, every: bool, tracer: Tracer, deadline_s: float
) -> dict[str, Edge]:
    cards = {trial_id: Card(setting(trial), trial.memory_limit()) for trial_id, trial in family.items()}
    settings = {cards[trial_id].setting: trial for trial_id, trial in family.items()}
    limits = {name: sorted(card.limit for card in cards.values() if card.setting == name) for name in settings}
    files = (tracer.folder / f"looked-{os.getpid()}-{number}.json" for number in count())

    def look(number: int, asked: Rooms) -> dict[str, RequiredBytes]:
        traced = known.at(trials[number])
        if traced is None:
            return {}
        own = {name: on(traced[0], _capability(settings[name])) for name in asked}
        return {name: need(own[name], settings[name], rooms, limits[name]) for name, rooms in asked.items()}

    replayed = 0

    def evaluate(surveys: Mapping[int, Asked]) -> dict[int, dict[int, dict[str, RequiredBytes]]]:
        nonlocal replayed
        [asked] = surveys.values()
        known.trace([trials[number] for number in asked])
        points = list(asked.items())
        chunks = [points[first : first + CHUNK] for first in range(0, len(points), CHUNK)]
        places = [next(files) for _ in chunks]
        jobs: list[Job] = [
            (partial(_write, look, chunk, place), deadline_s * len(chunk))
            for chunk, place in zip(chunks, places, strict=True)
        ]
        for done, _ in enumerate(forked(jobs, at_once()), 1):
            some = replayed + min(CHUNK * done, len(points))
            result_file.progress(tracer.folder, f"replaying: {some:,} of at most {len(trials):,} trials")
        replayed += len(points)
        return {0: dict(_read(places))}

    result_file.progress(tracer.folder, f"adding up what {len(trials):,} trials ask for")
    survey = Survey(_floors(settings, trials, known), cards, every, math.inf if every else MOST)
    drive([survey], evaluate)
    return survey.found()


def _floors(settings: Trials, trials: Sequence[Trial], known: Curve) -> dict[str, list[float | None]]:
    """For each setting, what each of these trials asks for at least; infinite where the host's memory does not suffice,
    None where that is not known before it is traced."""
    floors: dict[str, list[float | None]] = {name: [] for name in settings}
    capabilities = {cublas_workspace(_capability(trial)): _capability(trial) for trial in settings.values()}
    for one in trials:
        traced = known.at(one)
        least = {size: traced and requested(on(traced[0], capability)) for size, capability in capabilities.items()}
        for name, trial in settings.items():
            full = traced is not None and _host_full(traced[0], trial)
            floors[name].append(math.inf if full else least[cublas_workspace(_capability(trial))])
    return floors


def _encode_edge(edge: Edge, values: Sequence[int], bases: Sequence[str]) -> dict[str, Any]:
    numbers = {"all_up_to": edge.all_up_to, "largest": edge.largest}
    named = {name: None if number is None else values[number] for name, number in numbers.items()}
    basis = None if edge.unanswered and not edge.looked_at else ", ".join(bases)  # what has no trace rests on nothing
    return asdict(edge) | named | {"of": len(values), "trace_basis": basis or None}


Rooms = Mapping[str, Collection[int]]  # by setting


def _write(
    look: Callable[[int, Rooms], dict[str, RequiredBytes]], asked: Sequence[tuple[int, Rooms]], place: Path
) -> None:
    with place.open("ab", buffering=0) as lines:  # what is there counts, however this process ends
        for number, rooms in asked:
            try:
                needs = {name: astuple(one) for name, one in look(number, rooms).items()}
                lines.write(json.dumps([number, needs]).encode() + b"\n")
            except Exception:
                traceback.print_exc()


def _read(places: Sequence[Path]) -> Iterator[tuple[int, dict[str, RequiredBytes]]]:
    for place in places:
        for line in place.read_bytes().split(b"\n")[:-1] if place.exists() else ():
            number, needs = json.loads(line)
            yield number, {name: RequiredBytes(*one) for name, one in needs.items()}
        place.unlink(missing_ok=True)


def setting(trial: Trial) -> str:
    """What decides how much room a trace needs of which card, and whether the host's memory suffices."""
    config = allocator_config.parse(trial.allocator.conf).render()
    return f"{config} {cublas_workspace(_capability(trial))} {host_memory.limit(trial)} {host_memory.ranks(trial)}"


def _capability(trial: Trial) -> Capability:
    return trial.device.card.capability


def need(trace: Trace, trial: Trial, rooms: Collection[int], limits: Sequence[int]) -> RequiredBytes:
    """The room that the trace needs under the trial's setting, in bytes, by replays: in each of the rooms; without any,
    in less and less, from more than the largest limit on, until it fits the smallest with room to spare, or within a
    percent."""
    config = replace(allocator_config.parse(trial.allocator.conf), per_process_memory_fraction=1.0)
    least = float(requested(trace))
    found = RequiredBytes(least, least, math.inf, False)
    if _host_full(trace, trial):
        return replace(found, least=math.inf)
    for free in sorted(rooms or [int(REACH * limits[-1])], reverse=True):
        found = _tried(trace, config, found, free)
    if not rooms:
        while found.enough - found.least > LEAST_MARGIN * found.enough < math.inf:
            if found.enough <= limits[0] and found.enough < free:
                break
            free = int(found.least + found.enough) // 2
            found = _tried(trace, config, found, free)
    return replace(found, close=not rooms)


def _tried(trace: Trace, config: AllocatorConfig, known: RequiredBytes, free: int) -> RequiredBytes:
    if not known.least <= free < known.enough:
        return known
    replayed = replay(trace, config, free)
    if replayed.refused is not None:
        return replace(known, least=free + 1)
    # with room to spare it reserves the same; a setting that collects garbage reserves as the limit has it
    spare = replayed.final.num_alloc_retries == 0 and config.garbage_collection_threshold is None
    return replace(known, enough=replayed.peak["reserved"] if spare else free)


def requested(trace: Trace) -> int:
    """The most that the run asks for at one time, in bytes: no setting reserves less."""
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
