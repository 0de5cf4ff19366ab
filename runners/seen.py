"""One row of what the processes of a training have seen of themselves (observer.py), whoever started them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners.over_ranks import Columns, over_ranks

MIB = 1 << 20
Seen = dict[str, Any]  # what one process had to say


class AllocatorMismatch(RuntimeError):
    """The allocator settings in force are not those that the trial asks for."""


def columns(trial: Trial, trained: Sequence[Seen], told: Collection[str]) -> Columns:
    """The row's columns, from what every rank of a training has seen; `told` are the settings that it is known to have.

    Raises InvalidTrial where the script sets the allocator's variable itself, AllocatorMismatch where other settings
    than the trial's are in force.
    """
    own_words = changed(trial, trained)
    if own_words:
        raise InvalidTrial(own_words)
    row = over_ranks([one["columns"] for one in trained])
    for name in ("tokens_per_s", "samples_per_s"):  # each rank has its own, by its own clock; the slowest's counts
        every = [_times(one["columns"], name) for one in trained]
        row[name] = None if None in every else sum(filter(None, every)) / row["elapsed_s"]
    notes = [*(row.get("notes") or ())]
    row["world_size"] = len(trained)
    if len(trained) != trial.world_size:
        ranks = f"{len(trained)} rank{'s' * (len(trained) > 1)}"
        notes.append(f"the training had {ranks}, where the trial has world_size={trial.world_size}")
    notes += [*_shapes(trial, trained, row, told), *_shared(trained), *_largest(row)]
    effective = None
    if "backend" in trained[0]:
        found = allocator_config.read_back(
            allocator_config.parse(trial.allocator.conf), trained[0]["backend"], trained[0]["allocator_settings"]
        )
        if found.mismatch:
            raise AllocatorMismatch(f"the allocator settings in force are not the trial's: {found.mismatch}")
        effective = found.effective
        notes += found.notes
    return row | {"allocator_conf_effective": effective, "notes": notes or None}


def _times(columns: Columns, name: str) -> float | None:
    """How many there were in all, from how many a second."""
    speed, elapsed = columns.get(name), columns["elapsed_s"]
    return None if speed is None or elapsed is None else speed * elapsed


def changed(trial: Trial, seen: Sequence[Seen]) -> str | None:
    """What to say where the script sets the allocator's variable itself."""
    for one in seen:
        for name, value in one["variables"].items():
            return (
                f"the script sets {name}={value or ''} itself, so allocator={trial.allocator.name} is not what it runs "
                "with; take that line out, or give the setting as allocator=custom allocator.conf=..."
            )
    return None


def _shapes(trial: Trial, trained: Sequence[Seen], row: Columns, told: Collection[str]) -> list[str]:
    """Fill in the length and batch that the model was called with, where they are always the same; and the tokens of a
    step where no call was seen but they are told. Notes on what does not agree."""
    first = trained[0]
    shapes = [tuple(shape) for shape in first["shapes"]] if first["shapes_known"] else []
    both = {"seq_len", "micro_batch"} <= set(told)
    if first["repeated"]:
        return ["tokens/s is not known: the optimizer asks for the passes itself (a closure), as often as it likes"]
    if not shapes:
        passes = first["passes"]
        if not both or len(passes) != 1 or row["elapsed_s"] is None:
            lacking = "{seq_len} and {micro_batch} are not told"
            return [f"tokens/s is not known: no model was called with token ids, and {lacking}"]
        samples = trial.micro_batch * passes[0] * len(trained) * len(row["step_times_s"])
        row["samples_per_s"] = samples / row["elapsed_s"]
        row["tokens_per_s"] = samples * trial.seq_len / row["elapsed_s"]
        return ["tokens/s is of the length and batch that are told: no model was called with token ids"]
    batches, lengths = zip(*shapes, strict=True)
    seen = {"micro_batch": set(batches), "seq_len": set(lengths)}
    for name, values in seen.items():
        if name not in told and len(values) == 1:
            row[name] = next(iter(values))
    if "grad_accum" not in told and len(first["passes"]) == 1:
        row["grad_accum"] = first["passes"][0]
    if both and shapes == [(trial.seq_len, trial.micro_batch)]:  # the length first, as torch's own Transformer has it
        return []
    other = [name for name, values in seen.items() if name in told and values != {getattr(trial, name)}]
    if other:
        every = ", ".join(f"{b} x {n}" for b, n in shapes[:3]) + (", ..." if len(shapes) > 3 else "")
        said = " and ".join(f"{name}={getattr(trial, name)}" for name in other)
        return [
            f"the model was called with {every} tokens (batch x length), where {said} is told; tokens/s counts what it "
            "was called with"
        ]
    return []


def _largest(row: Columns) -> list[str]:
    """What of a whole job needs most, where that is not the steps."""
    part = row.get("largest_part")
    peaks = row.get("part_peak_allocated_bytes") or row.get("part_peak_reserved_bytes") or {}
    steps = max((peaks[name] for name in ("first_step", "steps") if name in peaks), default=None)
    if part in (None, "first_step", "steps") or not steps:
        return []
    return [f"of the whole job {part} needs most: {peaks[part] / MIB:,.1f} MiB, and the steps {steps / MIB:,.1f} MiB"]


def _shared(trained: Sequence[Seen]) -> list[str]:
    """A note where several ranks ran on one card: no counter of theirs sees the others."""
    cards: dict[Any, list[int]] = {}
    for one in trained:
        if "card" in one:
            cards.setdefault((one["columns"].get("gpu_uuid"), one["card"]), []).append(one["rank"])
    return [
        f"ranks {' and '.join(map(str, ranks))} ran on the same card: each counter is of one process, and the card "
        "held them all"
        for ranks in cards.values()
        if len(ranks) > 1
    ]
