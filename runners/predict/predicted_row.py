"""Predicted row of a trial (device=simulated): its own runner's trace on fake tensors, replayed through the allocator.

In: a trial, its trace, columns about what was built. Out: the row's columns, and the error that ended the run.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.hardware import gpu_lookup, interconnects, step_time
from vramsweep.harness.hardware.gpu_lookup import Gpu, memory_limit, reported_bytes
from vramsweep.harness.hardware.roofline import estimate, merge_work, total_flops
from vramsweep.harness.machine import host_memory, machine
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.spec import length_distribution, runner_table
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.harness.spec.version_differences import DIFFERENCES
from vramsweep.runners.measure.steady_memory import PHASES_UNKNOWN, reached_plateau, steps_until_full
from vramsweep.runners.predict.memory_timeline import Held, describe_storage
from vramsweep.runners.predict.replay_trace import HostPrediction, Peaks, Prediction, Refused, host_replay, replay
from vramsweep.runners.trace.allocation_program import growth
from vramsweep.runners.trace.trace_data import Mark, Trace

PASSES = ("forward", "backward", "step")  # phases whose memory depends on the tokens
TRACED = "traced"  # basis of a trace made for the trial's own length and batch, not evaluated from formulas


class SimulatedOutOfMemoryError(RuntimeError):
    """The step does not fit into the named GPU's memory; `columns` are what the row can still report."""

    def __init__(self, text: str, columns: dict[str, Any]) -> None:
        super().__init__(text)
        self.columns = columns


class SimulatedHostOutOfMemoryError(SimulatedOutOfMemoryError):
    """The run does not fit into the node's host memory; `columns` are what the row can still report."""


@dataclass(frozen=True)
class Predicted:
    """The columns that a trial's row can report, the phases reached, and the error that ended the run, or None."""

    columns: dict[str, Any]
    phases: tuple[tuple[Mark, Peaks], ...]
    error: SimulatedOutOfMemoryError | InvalidTrial | None


def predict(trial: Trial, trace: Trace, details: dict[str, Any], trace_basis: str = TRACED) -> Predicted:
    """Predict the trial's row from its trace and from `details`, the columns about what was built.

    If memory runs out, the row has the columns that it can still report. `trace_basis` says how the trace was made.
    """
    card = trial.device.card
    config = allocator_config.parse(trial.allocator.conf)
    limit = trial.memory_limit()
    predicted = replay(trace, config, memory_limit(card))  # the whole, of which `config` takes a share
    host = host_of(trial, trace)
    full = host_full(trial, host)
    if full is not None and predicted.refused is not None and full >= len(predicted.phases):
        full = None  # the GPU is full in an earlier phase
    phases = predicted.phases if full is None else predicted.phases[: full + 1]
    known = static_columns(trial, trace_basis, host, details)
    estimated, untimed = speed(trial, trace, card)
    estimated = {name: details.get(name, value) for name, value in estimated.items()}  # null without tokens
    if full is not None or predicted.refused is not None:
        whole = replay(trace, replace(config, per_process_memory_fraction=1.0), None)
        known |= estimated | {"unlimited_peak_reserved_bytes": whole.peak["reserved"], "notes": details.get("notes")}
        known["world_size"] = details.get("world_size", trial.world_size)
    if full is not None:
        text = _host_refused(trial, host, host.phases[full][0], known)
        return Predicted(known, phases, SimulatedHostOutOfMemoryError(text, known))
    if predicted.refused is not None:
        known |= oom_columns(predicted.refused)
        asked = describe_storage(trace, predicted.refused.storage, predicted.refused.mark)
        text = f"{refused_text(predicted.refused, asked, trial, whole)}; {_would_fit(trial, whole, limit, details)}"
        return Predicted(known, phases, SimulatedOutOfMemoryError(text, known))
    grown = None if "step_growth_bytes" in details else growth(trace)  # set if steps are not alike
    found = columns(predicted) | upper_bounds(trace, config, limit) | estimated | details | known
    if length_distribution.names_lengths(trial.data):  # they are packed, because other such trials never get here
        found |= length_distribution.length_columns(trial)
    notes = [*(found["notes"] or ()), *allocator_config.estimates(config), *allocator_config.without_effect(config)]
    notes += [*ignored_settings(trial, found["differences"] or ()), *filter(None, [untimed])]
    if grown is not None:
        notes += filter(None, [grown.note()])
        found |= {"step_growth_bytes": grown.bytes, "plateau": bool(found["plateau"]) and grown.bytes <= 0}
        peaks = found["step_peak_allocated_bytes"]
        if grown.bytes > 0:
            found["not_covered"] = [*(found["not_covered"] or ()), "growth"]
            found["prediction_basis"] = prediction_basis(trial, found["not_covered"])
        found["full_after_steps"] = steps_until_full(1 + len(peaks), grown.bytes, limit - peaks[-1])
    return Predicted(found | {"notes": notes or None}, phases, None)


def static_columns(trial: Trial, trace_basis: str, host: HostPrediction, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's columns that do not depend on how the prediction ends."""
    return {
        "prediction_basis": prediction_basis(trial, details.get("not_covered") or ()),
        "not_covered": details.get("not_covered"),
        "trace_basis": trace_basis,
        **{name: details.get(name) for name in ("layers_traced", "differences")},
        **{name: details[name] for name in ("seq_len",) if name in details},
        "deepspeed_version": machine.deepspeed_version(trial.sharding),
        "gpu_name": trial.device.card.name,
        "device_total_bytes": reported_bytes(trial.device.card),
        "memory_limit_bytes": trial.memory_limit(),
        "allocator_conf_effective": allocator_config.parse(trial.allocator.conf).render(),
        "torch_version": machine.torch_version(),
        **host_columns(trial, host),
    }


def prediction_basis(trial: Trial, left_out: Sequence[str]) -> str:
    """Return which predicted parts are exact, traced or estimates (harness/rows/columns.tsv defines these words).

    With sharding more parts are estimates, because collectives overlap computation and free blocks at unknown times.
    Nothing is exact if anything is left out.
    """
    sharded, known = trial.sharding != "none" or "ranks" in left_out, "parameters, buffers, gradients, optimizer_state"
    first = f"traced: {known}, " if left_out else f"exact: {known}; traced: "
    return f"{first}activations, recomputed_activations, temporaries" + (
        "; estimate: communication, active, reserved, workspaces" if sharded else ", reserved; estimate: workspaces"
    )


def columns(predicted: Prediction) -> dict[str, Any]:
    """Return the row's memory columns; the phases are those of the last traced step."""
    steady = [(mark, peaks) for mark, peaks in predicted.phases if mark.step]
    last = max((mark.step or 0 for mark, _ in steady), default=0)
    told_apart = any(mark.phase == "backward" for mark, _ in steady)

    def most(phase: str, counter: str, step: int | None) -> int | None:
        found = [p[counter] for mark, p in predicted.phases if mark.phase == phase and mark.step == step]
        return max(found, default=None)

    steps = sorted({mark.step for mark, _ in steady if mark.step})
    by_step = {c: [max(p[c] for mark, p in steady if mark.step == s) for s in steps] for c in ("allocated", "reserved")}
    return {
        "memory_source": "simulator",
        **{f"peak_{c}_bytes": predicted.peak[c] for c in ("allocated", "active", "requested", "reserved")},
        "inactive_split_peak_bytes": predicted.peak["inactive_split"],
        "reserved_unallocated_bytes": predicted.final.reserved - predicted.final.allocated,
        **{f"peak_{name}_bytes": size for name, size in predicted.breakdown.items()},
        **{f"load_peak_{c}_bytes": most("load", c, None) for c in ("allocated", "reserved")},
        **{
            f"{phase}_peak_{c}_bytes": most(phase, c, last) if told_apart else None
            for phase in ("forward", "backward", "optimizer")
            for c in ("allocated", "reserved")
        },
        **{f"step_peak_{c}_bytes": values for c, values in by_step.items()},
        **{f"rank_peak_{c}_bytes": [predicted.peak[c]] for c in ("allocated", "reserved", "active")},
        "plateau": reached_plateau(list(by_step["reserved"])),
        "alloc_retries": predicted.final.num_alloc_retries,
        "alloc_ooms": predicted.final.num_ooms,
        "notes": None if told_apart else [PHASES_UNKNOWN],
    }


def upper_bounds(trace: Trace, config: allocator_config.AllocatorConfig, limit: int | None) -> dict[str, Any]:
    """Return the row's upper bounds, for a CPU that runs ahead of the GPU as far as it may.

    {} unless storages are freed while another stream uses them. Reserved stops at `limit`: the allocator waits there.
    """
    if not any(kind == "use" for _, kind, _, _ in trace.notes):
        return {}
    most = replay(trace, replace(config, per_process_memory_fraction=1.0), None, ahead=True).peak
    return {
        "peak_active_most_bytes": most["active"],
        "peak_reserved_most_bytes": most["reserved"] if limit is None else min(most["reserved"], limit),
    }


def speed(trial: Trial, trace: Trace, card: Gpu) -> tuple[dict[str, Any], str | None]:
    """Return the row's estimate of speed, and why it has no times: a peak or link is unknown, or the host bounds it.

    The overlap of collectives with computation is unknown. Times range from full overlap (the shortest step) to none.
    """
    kernels, collectives = merge_work(trace.kernels), merge_work(trace.collectives)
    found = estimate(kernels, card, trial.precision == "tf32")
    within, between = trial.device.link or card.link, trial.device.interconnect
    ranks, per_node = trial.world_size, trial.device.gpus_per_node
    link, network = (None if name is None else interconnects.link_named(name) for name in (within, between))
    sent = interconnects.communication(collectives, ranks, per_node, link, network)
    row: dict[str, Any] = {
        "estimated_flops": total_flops(kernels),
        "estimated_moved_bytes": sum(count * work.nbytes for work, count in kernels),
        "estimated_launches": sum(count * work.launches for work, count in kernels),
    }
    if ranks > 1 and sent is not None:
        row |= {"estimated_communication_bytes": sent.nbytes, "estimated_collectives": sent.calls}
    if not row["estimated_launches"]:
        return {}, None  # a run that launches nothing
    unknown = _not_timed(trial, card, found is None, sent)
    if unknown is not None or found is None or sent is None or sent.seconds is None:
        return row, unknown
    shortest, longest = max(found.step_s, sent.seconds), found.step_s + sent.seconds
    links = (within if per_node > 1 else None, between if ranks > per_node else None)
    several = {
        "estimated_communication_s": sent.seconds,
        "estimated_link": " + ".join(filter(None, links)),
        "estimated_step_no_overlap_s": longest,
        "estimated_tokens_per_s_no_overlap": trial.tokens_per_step() / longest,
    }
    times: dict[str, Any] = {
        "estimated_step_s": shortest,
        "estimated_tokens_per_s": trial.tokens_per_step() / shortest,
        "estimated_compute_s": found.compute_s,
        "estimated_attention_s": found.attention_s,
        "estimated_memory_s": found.memory_s,
        "estimated_launch_s": found.launch_s,
    }
    speeds = step_time.pooled()
    step = step_time.time_step(kernels, card, trial.precision == "tf32", speeds, host_kind(trial), sent.seconds)
    if step is not None:
        times |= {
            "calibrated_step_s": step.step_s,
            "calibrated_step_low_s": step.low_s,
            "calibrated_step_high_s": step.high_s,
            "calibrated_tokens_per_s": trial.tokens_per_step() / step.step_s,
            "estimated_bound_by": step.bound_by,
            "estimated_kernels_s": {**step.kernels_s, "collectives": sent.seconds, "host": step.host_s},
            "calibration": speeds.source,
        }
    return row | times | (several if ranks > 1 else {}), None


def host_kind(trial: Trial) -> str:
    """Return the kind of the host's time a launch (step_time.py) that a trial's settings mean."""
    if trial.sharding == "zero3":
        return "sharded"
    torchao = trial.optimizer in ("adamw_torch_8bit", "adamw_torch_4bit") or trial.precision == "fp8"
    return "torchao" if torchao else "plain" if trial.checkpointing == "none" else "checkpointing"


def _not_timed(trial: Trial, card: Gpu, peak_unknown: bool, sent: interconnects.Communication | None) -> str | None:
    """Return the reason why a step's time cannot be estimated, or None."""
    if trial.optimizer.startswith("paged_"):
        return f"no estimated times, because they depend on where the pages of {trial.optimizer} are"
    if trial.offload_optimizer or trial.offload_param or trial.activation_offload:
        return "no estimated times, because with states or activations in host memory the host limits the speed"
    if peak_unknown:
        return f"no estimated times, because a peak rate of {card.name} or the FLOPs of an operator are unknown"
    if sent is None:
        return "no estimated times, because there is no formula for one of the collectives"
    if sent.seconds is None:
        return (
            f"no estimated times, because the link of {trial.world_size} ranks in nodes of "
            f"{trial.device.gpus_per_node} is unknown; set device.link (within a node) or device.interconnect (between "
            "nodes)"
        )
    return None


def ignored_settings(trial: Trial, applied: Sequence[str]) -> Iterator[str]:
    """Yield a note for each setting of the simulated machine or versions that changes nothing in this trial."""
    ranks, per_node = trial.world_size, trial.device.gpus_per_node
    if trial.device.link is not None and min(ranks, per_node) == 1:
        yield f"device.link={trial.device.link} has no effect, because no node has two ranks"
    if trial.device.interconnect is not None and ranks <= per_node:
        yield f"device.interconnect={trial.device.interconnect} has no effect, because all ranks are in one node"
    known = {one.name: one.package for one in DIFFERENCES}
    for package, version in trial.versions.items():
        if package not in {known[name] for name in applied}:
            yield f"versions.{package}={version} has no effect, because none of its known differences applies"


def oom_columns(refused: Refused) -> dict[str, Any]:
    """Return the row's columns about the request that does not fit, in bytes."""
    return {
        "oom_request_bytes": refused.request,
        "oom_allocated_bytes": refused.allocated,
        "oom_reserved_bytes": refused.reserved,
        "oom_parts_bytes": refused.parts,
    }


def refused_text(refused: Refused, asked: Held, trial: Trial, without_limit: Prediction) -> str:
    """Explain, for a row, why the GPU is too small."""
    card, share = trial.device.card, allocator_config.parse(trial.allocator.conf).per_process_memory_fraction
    where = "while loading" if asked.step is None else f"in the {asked.phase} phase of step {asked.step}"
    who = " ".join(filter(None, (asked.module, asked.operator)))
    beside = refused.parts | {asked.category: refused.parts[asked.category] - refused.request}
    largest = sorted(filter(beside.get, beside), key=lambda name: -beside[name])[:3]
    parts = ", ".join(f"{name.replace('_', ' ')} {format_gib(beside[name])}" for name in largest)
    need = without_limit.peak["reserved"]
    least = max(card.capability, (8, 0))  # because it is unknown which features of this generation the run needs
    enough = gpu_lookup.gpus_with_enough(math.ceil(need / share), card.headroom_gib, least)
    of = f"{share:g} of " if share < 1 else ""
    none = f"more than any listed GPU of capability {'.'.join(map(str, least))} or later has"
    return (
        f"{card.name} ({format_gib(trial.memory_limit())} GiB left for the allocator) is too small. A request of "
        f"{format_gib(refused.request)} GiB fails {where} ({asked.category.replace('_', ' ')}, {who}), next to "
        f"{format_gib(refused.allocated)} GiB already allocated ({parts}). Without a limit the run would reserve "
        f"{format_gib(need)} GiB{', ' + (f'which fits in {of}{enough[0].name}' if enough else none)}"
    )


LEFT_UNUSED = 0.15  # margin, because reserved bytes a token vary with the batch, by a sixth in the smallest models


def _would_fit(trial: Trial, without_limit: Prediction, limit: int, details: Mapping[str, Any]) -> str:
    """Tell, for a row whose run does not fit, about how many tokens a pass could have, by proportion.

    These are samples if `details` or a length of 1 say that samples have no tokens, and a share if neither is known.
    Activations, temporaries and reserved but unused memory are taken as proportional to tokens, all else as fixed.
    Memory of loading and the optimizer does not depend on tokens. Unused memory is proportional only roughly, so
    `LEFT_UNUSED` is subtracted to make the answer fit.
    """
    still = max((most["allocated"] for mark, most in without_limit.phases if mark.phase not in PASSES), default=0)
    moving = without_limit.breakdown["activations"] + without_limit.breakdown["recomputed_activations"]
    moving += without_limit.breakdown["temporaries"] if still < without_limit.peak["allocated"] else 0
    fixed = max(still, without_limit.peak["allocated"] - moving)
    length, batch = (details.get(name, getattr(trial, name)) or 1 for name in ("seq_len", "micro_batch"))
    every = length * batch
    grows = without_limit.peak["reserved"] - fixed
    share = min(1.0, (1 - LEFT_UNUSED) * (limit - fixed) / grows) if moving and grows > 0 else 0.0
    if every > 1 > share * every or share <= 0:
        return f"{format_gib(fixed)} GiB of it do not depend on length or batch (vramsweep advise finds what helps)"
    unit = "tokens" if length > 1 else "samples"
    of = f"{int(share * every):,} of its {every:,} {unit}" if every > 1 else f"{share:.0%} of its size"
    return f"a pass of about {of} would fit, by proportion"


def host_columns(trial: Trial, host: HostPrediction) -> dict[str, Any]:
    """Return the row's columns about host memory of the fullest node; each of its ranks counts as much as rank 0."""
    ranks = host_memory.ranks(trial)
    if trial.runner.command is not None:  # what a script keeps on the host is not in the trace
        return {"host_ranks": ranks, "host_total_bytes": host_memory.limit(trial)}
    processes = ranks * runner_table.runner(trial.runner.name).host_bytes
    loading = max((peak for mark, peak in host.phases if mark.step is None), default=0)
    parts = {name: ranks * size for name, size in host.breakdown.items()}
    return {
        "host_ranks": ranks,
        "host_peak_bytes": processes + ranks * host.peak,
        "host_load_peak_bytes": processes + ranks * loading,
        "host_processes_bytes": processes,
        "host_workers_bytes": parts.pop("workers"),
        **{f"host_peak_{name}_bytes": size for name, size in parts.items()},
        "host_pinned_peak_bytes": ranks * host.pinned,
        "host_total_bytes": host_memory.limit(trial),
    }


def host_of(trial: Trial, trace: Trace) -> HostPrediction:
    """Replay host memory of one rank of the trial, including its data loader's workers."""
    config = allocator_config.parse(trial.allocator.conf)
    return host_replay(trace.host, config, host_memory.loader_workers(trial) * host_memory.LOADER_WORKER)


def host_full(trial: Trial, host: HostPrediction) -> int | None:
    """Return the index of the first phase in which the node's memory is not enough; None if it is, or is unknown."""
    limit = host_memory.limit(trial)
    if limit is None or trial.runner.command is not None:
        return None
    ranks, process = host_memory.ranks(trial), runner_table.runner(trial.runner.name).host_bytes
    return next((index for index, (_, peak) in enumerate(host.phases) if ranks * (peak + process) > limit), None)


# Advice for each part of host memory.
_LESS: dict[str, str] = json.loads(Path(__file__).with_name("host_advice.json").read_text("utf-8"))


def host_refused(trial: Trial, host: HostPrediction) -> str | None:
    """Explain why a node's memory is not enough; return None if it is, or is unknown."""
    full = host_full(trial, host)
    return None if full is None else _host_refused(trial, host, host.phases[full][0], host_columns(trial, host))


def _host_refused(trial: Trial, host: HostPrediction, where: Mark, about: Mapping[str, Any]) -> str:
    apart = ("processes", "workers")
    parts = {name: about[f"host_peak_{name}_bytes"] for name in host.breakdown if name not in apart}
    parts |= {name: about[f"host_{name}_bytes"] for name in apart}
    largest = sorted(filter(parts.get, parts), key=lambda name: -parts[name])
    told = ", ".join(f"{name} {format_gib(parts[name])}" for name in largest[:4])
    phase = "while loading" if where.step is None else f"in the {where.phase} phase of step {where.step}"
    need = f"{about['host_ranks']} ranks need" if about["host_ranks"] > 1 else "One rank needs"
    return (
        f"{trial.device.node_memory_gib:g} GiB of host memory per node are not enough {phase}. {need} at least "
        f"{format_gib(about['host_peak_bytes'])} GiB ({told}); {_LESS.get(largest[0], 'use a node with more memory')}"
    )


def record(mark: Mark, peaks: Peaks) -> dict[str, Any]:
    """Return a phase as an attempt's record; harness/sweep/row_builder.py takes the last one as the end of the run."""
    return {"phase": mark.phase, "at_step": mark.step, "peaks": peaks}
