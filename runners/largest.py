"""The largest length, or batch, that fits, for many settings of the allocator and cards, from one symbolic trace.

The coordinator is many.py's: traces are made, and points looked at, in processes of their own. Not covered: which
points are looked at (survey.py).
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from vramsweep.harness import gpus, node
from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.attempt import LARGEST
from vramsweep.harness.trial import Trial
from vramsweep.runners import result, simulated
from vramsweep.runners.curve import Curve, at, curve, point
from vramsweep.runners.many import Trials, families
from vramsweep.runners.predict import host_replay, replay
from vramsweep.runners.program import program
from vramsweep.runners.survey import Asked, Edge, Verdict, Verdicts, survey
from vramsweep.runners.trace import Trace
from vramsweep.runners.tracer import Job, Tracer, at_once, forked

MOST = 1500  # points of a family that are looked at, unless all are asked for: half a minute on two cores
CHUNK = 8  # points that one process looks at


def main(folder: Path, spec: Mapping[str, Any]) -> int:
    """Find the edge of each trial of the spec along its axis; returns the exit status."""
    trials = {one["trial_id"]: Trial.model_validate(one["trial"]) for one in spec["trials"]}
    tracer = Tracer(folder, spec["timeout_s"])
    found: dict[str, Any] = {}
    for family in families(trials).values():
        found |= _of_family(family, spec["axis"], spec["values"], spec["every"], tracer, spec["timeout_s"])
    (folder / LARGEST).write_text(json.dumps(found))
    result.values(folder, {}, complete=True)
    return 0


def _of_family(
    family: Trials, axis: str, values: Sequence[int], every: bool, tracer: Tracer, deadline_s: float
) -> dict[str, Any]:
    anyone = next(iter(family.values()))
    points = [point(anyone.model_copy(update={axis: value})) for value in values]
    found = curve(anyone, points, tracer)
    limits = {trial_id: gpus.memory_limit(gpus.named(trial.device.gpu)) for trial_id, trial in family.items()}
    rooms = {trial_id: room(limits[trial_id], trial.allocator.conf) for trial_id, trial in family.items()}
    files = (tracer.folder / f"looked-{os.getpid()}-{number}.json" for number in count())

    def evaluate(wanted: Asked) -> dict[int, Verdicts]:
        found.trace([at(anyone, points[n]) for n in wanted])
        numbers = list(wanted)
        chunks = [numbers[first : first + CHUNK] for first in range(0, len(numbers), CHUNK)]
        places = [next(files) for _ in chunks]
        jobs: list[Job] = []
        for chunk, place in zip(chunks, places, strict=True):
            asked = [(n, at(anyone, points[n]), wanted[n]) for n in chunk]
            jobs.append((_looking(asked, family, limits, found, place), deadline_s))
        for _ in forked(jobs, at_once()):
            pass
        return dict(_looked(places))

    edges = survey(len(points), rooms, evaluate, every, MOST)
    return {trial_id: _told(edge, values, found.bases()) for trial_id, edge in edges.items()}


def _told(edge: Edge, values: Sequence[int], bases: Sequence[str]) -> dict[str, Any]:
    numbers = {"all_up_to": edge.all_up_to, "largest": edge.largest}
    named = {name: None if number is None else values[number] for name, number in numbers.items()}
    basis = ", ".join(bases) if edge.looked_at else None  # what could not be traced rests on nothing
    return asdict(edge) | named | {"of": len(values), "trace_basis": basis or None}


def _looked(places: Sequence[Path]) -> Iterator[tuple[int, dict[str, Verdict]]]:
    for place in places:
        for number, verdicts in json.loads(place.read_text()).items() if place.exists() else ():
            yield int(number), {name: Verdict(*verdict) for name, verdict in verdicts.items()}
        place.unlink(missing_ok=True)


def _looking(
    asked: Sequence[tuple[int, Trial, Collection[str]]],
    family: Trials,
    limits: Mapping[str, int],
    known: Curve,
    place: Path,
) -> Callable[[], None]:
    def look() -> None:
        answers: dict[int, dict[str, tuple[bool, int, bool]]] = {}
        for number, trial, names in asked:
            traced = known.at(trial)
            if traced is not None:
                found = verdicts(traced[0], family, limits, names)
                answers[number] = {name: (v.fits, v.need, v.reserved) for name, v in found.items()}
        aside = place.with_suffix(".part")
        aside.write_text(json.dumps(answers))
        aside.rename(place)

    return look


def verdicts(trace: Trace, family: Trials, limits: Mapping[str, int], asked: Collection[str]) -> dict[str, Verdict]:
    """Whether the trace fits each asked trial's card under its setting, as its own replay would say; and each other
    trial's, where that needs no replay of its own."""
    least = requested(trace)
    by_setting: dict[str, list[str]] = defaultdict(list)
    for trial_id, trial in family.items():
        by_setting[trial.allocator.conf].append(trial_id)
    found: dict[str, Verdict] = {}
    for conf, trial_ids in by_setting.items():
        config = allocator_config.parse(conf)
        rooms = {trial_id: room(limits[trial_id], conf) for trial_id in trial_ids}
        fitting = [trial_id for trial_id in trial_ids if least <= rooms[trial_id]]
        found |= {trial_id: Verdict(False, least, False) for trial_id in trial_ids if trial_id not in fitting}
        if not any(trial_id in asked for trial_id in fitting):
            continue
        need = _unlimited(trace, config)
        for trial_id in fitting:
            fits = need <= rooms[trial_id] and config.garbage_collection_threshold is None
            if not fits and trial_id not in asked:
                continue
            fits = fits or replay(trace, config, limits[trial_id]).failed is None
            fits = fits and not _host_full(trace, family[trial_id], config)
            # a replay that fails beyond this trace's reserved may go well for another: only what is asked for is proof
            found[trial_id] = Verdict(True, need, True) if fits else Verdict(False, least, False)
    return found


def room(limit: int, conf: str) -> int:
    """Bytes of a card's limit that the setting lets a process take."""
    return int(limit * allocator_config.parse(conf).per_process_memory_fraction)


def requested(trace: Trace) -> int:
    """The most that the run asks for at one time, in bytes: no setting reserves less."""
    order = program(trace)
    sizes = np.asarray(trace.sizes, dtype=np.int64)
    changes = np.zeros(sum(len(operations) for _, operations in order.phases) + 1, dtype=np.int64)
    lives = order.gone < len(changes)
    np.add.at(changes, order.born, sizes)
    np.subtract.at(changes, order.gone[lives], sizes[lives])
    return int(np.cumsum(changes).max(initial=0))


def _unlimited(trace: Trace, config: AllocatorConfig) -> int:
    return replay(trace, replace(config, per_process_memory_fraction=1.0), None).peak["reserved"]


def _host_full(trace: Trace, trial: Trial, config: AllocatorConfig) -> bool:
    if trial.device.node_memory_gib is None:
        return False
    host = host_replay(trace.host, config, node.loader_workers(trial) * node.LOADER_WORKER)
    return simulated.host_full(trial, host) is not None
