"""The row of a training from its processes' own reports (observer.py), whoever started them."""

from collections.abc import Collection, Sequence
from typing import Any

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.rank.aggregate_ranks import Columns, over_ranks

MIB = 1 << 20
Seen = dict[str, Any]  # the report of one process


class AllocatorMismatch(RuntimeError):
    """The allocator settings in force are not the trial's."""


def columns(trial: Trial, trained: Sequence[Seen], told: Collection[str]) -> Columns:
    """Return the row's columns from the reports of all ranks of a training; `told` names the settings given to it.

    Raises InvalidTrial if the script sets the allocator's variable itself or trains on another device than the
    trial's. Raises AllocatorMismatch if the allocator settings in force are not the trial's.
    """
    own_words = changed(trial, trained)
    if own_words:
        raise InvalidTrial(own_words)
    _require_device(trial, trained[0])
    row = over_ranks([one["columns"] for one in trained])
    for name in ("tokens_per_s", "samples_per_s"):  # each rank has its own, by its own clock; the slowest's time counts
        every = [(one["columns"].get(name), one["columns"]["elapsed_s"]) for one in trained]
        known = [speed * elapsed for speed, elapsed in every if speed is not None and elapsed is not None]
        row[name] = sum(known) / row["elapsed_s"] if len(known) == len(every) else None
    notes = [*(row.get("notes") or ())]
    row["world_size"] = len(trained)
    if len(trained) != trial.world_size:
        ranks = f"{len(trained)} rank{'s' * (len(trained) > 1)}"
        notes.append(f"the training had {ranks}, but the trial has world_size={trial.world_size}")
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


def _require_device(trial: Trial, one: Seen) -> None:
    """Raise InvalidTrial if the training ran on another device than the trial's, because bytes differ by device."""
    found, asked = "cuda" if "backend" in one else "cpu", trial.device.name
    if found == asked:
        return
    torch = one["columns"].get("torch_version")
    lacks = found == "cpu" and torch is not None and one["columns"].get("cuda_version") is None
    raise trained_elsewhere(trial, found, f" (its torch {torch} is built without CUDA)" if lacks else "")


def trained_elsewhere(trial: Trial, found: str, why: str = "") -> InvalidTrial:
    """Return the error for a script that trained on the device `found`, and not on the trial's."""
    asked = trial.device.name
    there = "on cuda" if asked == "simulated" else "there"
    return InvalidTrial(
        f"the script trained on device={found}{why}, but the trial has device={asked}; make it train {there}, or set "
        f"device={found}"
    )


def changed(trial: Trial, seen: Sequence[Seen]) -> str | None:
    """Return the error text if the script sets the allocator's variable itself; None otherwise."""
    for one in seen:
        for name, value in one["variables"].items():
            return (
                f"the script sets {name}={value or ''} itself, so allocator={trial.allocator.name} has no effect; "
                "remove that line, or give the setting as allocator=custom allocator.conf=..."
            )
    return None


def _shapes(trial: Trial, trained: Sequence[Seen], row: Columns, told: Collection[str]) -> list[str]:
    """Fill in the shapes the model was called with, if they are not told. If no call was seen, fill in the speed from
    told settings. Return notes on what does not agree."""
    first = trained[0]
    shapes = [(batch, length) for batch, length in first["shapes"]] if first["shapes_known"] else []
    batches = first["batches"][0] if len(first["batches"]) == 1 else None
    if first["repeated"]:
        return ["tokens/s is unknown, because the optimizer runs the passes itself (a closure), any number of times"]
    if not shapes:
        return _told_tokens(trial, trained, row, told)
    filled, other = called_with(shapes, trial, told)
    if "grad_accum" not in told:
        filled["grad_accum"] = batches
    row |= filled
    if other:
        every = ", ".join(f"{b} x {n}" for b, n in shapes[:3]) + (", ..." if len(shapes) > 3 else "")
        said = " and ".join(f"{name}={getattr(trial, name)}" for name in other)
        return [
            f"the model was called with {every} tokens (batch x length), but {said} is given; tokens/s counts the "
            "tokens of the calls"
        ]
    return []


def _told_tokens(trial: Trial, trained: Sequence[Seen], row: Columns, told: Collection[str]) -> list[str]:
    """Fill in the speed from the told length and batch, as no call was seen. Return notes on what it depends on."""
    unseen = "no model was called with token ids"
    if not {"seq_len", "micro_batch"} <= set(told):
        return [f"tokens/s is unknown, because {unseen}, and {{seq_len}} and {{micro_batch}} are not given"]
    batches, from_told = trained[0]["batches"], "length and batch"
    if batches == [None] and "grad_accum" in told:
        batches, from_told = [trial.grad_accum], "length, batch and accumulation"
    if len(batches) != 1 or batches == [None]:
        why = "the number of batches of a step is unknown or varies; give it as {grad_accum}"
        return [f"tokens/s is unknown, because {unseen}, and {why}"]
    if row["elapsed_s"] is None:
        return []  # speed is unknown too, and has its own note
    samples = trial.micro_batch * batches[0] * len(trained) * len(row["step_times_s"])
    row["samples_per_s"] = samples / row["elapsed_s"]
    row["tokens_per_s"] = samples * trial.seq_len / row["elapsed_s"]
    return [f"tokens/s is computed from the given {from_told}, because {unseen}"]


def called_with(shapes: Collection[tuple[int, int]], trial: Trial, told: Collection[str]) -> tuple[Columns, list[str]]:
    """Return, from the shapes (batch, length) the model was called with, untold columns that are always the same. Also
    return the settings whose told values differ."""
    both = {"seq_len", "micro_batch"} <= set(told)
    if both and set(shapes) == {(trial.seq_len, trial.micro_batch)}:  # length first, as torch's own Transformer expects
        return {}, []
    batches, lengths = zip(*shapes, strict=True)
    seen = {"micro_batch": set(batches), "seq_len": set(lengths)}
    filled = {name: next(iter(values)) for name, values in seen.items() if name not in told and len(values) == 1}
    return filled, [name for name, values in seen.items() if name in told and values != {getattr(trial, name)}]


def _largest(row: Columns) -> list[str]:
    """Return a note on the part of a whole job that needs most memory, unless it is the steps."""
    part = row.get("largest_part")
    peaks = row.get("part_peak_allocated_bytes") or row.get("part_peak_reserved_bytes") or {}
    steps = max((peaks[name] for name in ("first_step", "steps") if name in peaks), default=None)
    if part in (None, "first_step", "steps") or not steps:
        return []
    return [f"{part} needs the most memory of the job: {peaks[part] / MIB:,.1f} MiB; steps: {steps / MIB:,.1f} MiB"]


def _shared(trained: Sequence[Seen]) -> list[str]:
    """Return a note if several ranks ran on one GPU, because each counter counts one process alone."""
    cards: dict[str, list[int]] = {}
    for one in trained:
        card = one["columns"].get("gpu_uuid")
        if card is not None:  # by uuid, because numbers may differ: each rank may see its own GPUs
            cards.setdefault(card, []).append(one["rank"])
    return [
        f"ranks {' and '.join(map(str, ranks))} ran on the same GPU; each counter covers one process, so the GPU "
        "used more memory"
        for ranks in cards.values()
        if len(ranks) > 1
    ]
