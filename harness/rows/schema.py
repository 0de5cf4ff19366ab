"""Row and Outcome: the one schema of a result.

A row is the record of one attempt, a flat JSON object. `COLUMNS` gives each of its keys a type, a unit and a
meaning; the columns' page of the documentation, the CSV export and the checks below all come from it. A value that is not
known is null, never 0. A column ends in its unit (`_bytes`, `_s`, `_w`, ...) wherever it has one.

Not covered here: how rows are stored (journal.py), how an outcome is decided (outcome.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vramsweep.harness.messages.errors import describe
from vramsweep.harness.spec.runner_table import RUNNERS, STARTING
from vramsweep.harness.spec.shardings import NAMES as SHARDINGS
from vramsweep.harness.spec.techniques.catalog import AXES

SCHEMA_VERSION = 2
EARLY = "gradient_checkpointing"  # a column of rows from before techniques were axes, the first of version 2 among them
LARGEST = 1e40  # of any number: above what a loss in fp32 can be, and far below where squares overflow
DEEPEST = 40  # levels of a column that is a dict or a list; anything that walks through a row may recurse

Row = dict[str, Any]

PARTS = ("load", "resume", "first_step", "steps", "evaluation", "save")  # of a whole job (protocol=job)
OF_TRAINING = ("load", "first_step", "steps")  # those whose peaks are the row's own


class Outcome(StrEnum):
    """How an attempt ended."""

    OK = "ok"
    OOM = "oom"
    HOST_OOM = "host_oom"
    TIMEOUT = "timeout"
    CRASH = "crash"
    CUDA_ERROR = "cuda_error"
    CONTENDED = "contended"
    INVALID = "invalid"
    BAD_RESULT = "bad_result"
    ENVIRONMENT = "environment"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Column:
    """One key of a row: its JSON type (null is always allowed), its unit and what it means."""

    name: str
    type: type
    unit: str
    meaning: str
    group: str


class RowError(ValueError):
    """A row does not fit the schema: names the column, what it holds and what it should hold."""


def _columns(group: str, *columns: tuple[str, type, str, str]) -> tuple[Column, ...]:
    return tuple(Column(name, kind, unit, meaning, group) for name, kind, unit, meaning in columns)


COLUMNS: tuple[Column, ...] = (
    *_columns(
        "identity",
        ("schema_version", int, "", "version of this table"),
        ("sweep", str, "", "name of the sweep, which is its results folder"),
        ("trial_id", str, "", "hash of what in the trial changes the measurement, and of the runner's version"),
        ("attempt", int, "", "which attempt at the trial, from 1; 0 where no process was started"),
        ("terminal", bool, "", "true on the last row of a trial's attempts, if it says something about the trial"),
        ("started_at", str, "ISO 8601 UTC", "when the attempt began"),
        ("outcome", str, "", "how the attempt ended: " + ", ".join(Outcome)),
        ("reason", str, "", "why, in one line; null when ok"),
        ("phase", str, "", "the phase the attempt was in when it ended, if it did not finish: load, or the step (from 0) and, where memory ran out, its phase"),
        ("exit_code", int, "", "the worker's exit status, negative for the signal that killed it; null where the attempt had no worker of its own"),
        ("isolation", str, "", "cold: a fresh process; warm: forked from a template that has never touched the GPU; shared: one of many predictions that processes forked from one worker made"),
        ("duration_s", float, "s", "wall time of the attempt, from before the start to after the reaping; shared: of this prediction alone, without the trace that it shares"),
        ("overhead_s", float, "s", "duration_s minus the time spent in training steps of any kind"),
    ),
    *_columns(
        "axes",
        ("model", str, "", "name of the model configuration"),
        ("parameters", int, "", "number of parameters, counted on the built model, shared ones once"),
        ("seq_len", int, "tokens", "sequence length"),
        ("micro_batch", int, "samples", "sequences per forward pass and rank"),
        ("grad_accum", int, "", "forward/backward passes per optimizer step"),
        ("allocator", str, "", "name of the allocator configuration"),
        ("allocator_conf", str, "", "PYTORCH_CUDA_ALLOC_CONF as asked for, in canonical form"),
        ("allocator_conf_effective", str, "", "the settings that took effect, read back in the worker; null on CPU"),
        ("runner", str, "", f"who drives the loop: {', '.join(entry.name for entry in RUNNERS)}, watch (vramsweep.watch)"),
        ("sharding", str, "", f"how ranks divide the work: {', '.join(SHARDINGS)}"),
        ("device", str, "", "cuda or cpu (measured), simulated (predicted)"),
        ("simulated_gpu", str, "", "the GPU that is simulated; null where nothing is"),
        ("offload_optimizer", bool, "", "optimizer state in host memory"),
        ("offload_param", bool, "", "parameters in host memory"),
        ("zero_init", bool, "", "model made under zero.Init, divided from the start; null where it is not ZeRO 3"),
        ("ds_config", str, "", "path of the DeepSpeed configuration that was given; null where none was"),
        ("versions", str, "", "simulated: versions of packages that were predicted, where they are not the installed ones"),
        ("differences", list, "", "simulated: known differences of those versions that were applied, by name"),
        ("world_size", int, "", "number of ranks"),
        *((axis.name, axis.kind, "", axis.meaning) for axis in AXES),
        ("optimizer_effective", str, "", "optimizer class that ran"),
        ("attention_effective", str, "", "attention implementation that the model reports; null if it reports none"),
        ("attention_kernels", list, "", "the kernels of scaled_dot_product_attention that ran: flash, efficient, cudnn, math; null where none was seen"),
        ("trainable_parameters", int, "", "number of parameters that are trained, counted on the built model; null in rows that never counted"),
        ("unproven", list, "", "techniques among the axes, beyond the defaults, that no GPU has been seen to run as predicted"),
        ("weights", str, "", "random or pretrained"),
        ("data", str, "", "synthetic, what lengths are drawn from (lengths:...), or the text data set's name"),
        ("protocol", str, "", "name of the protocol"),
        ("seed", int, "", "seed of weights and data"),
        ("repeat", int, "", "repeat index, from 0"),
        ("trial", dict, "", "the whole resolved trial"),
        ("foreign", str, "", "where the row was imported from; null for our own rows"),
    ),
    *_columns(
        "memory",
        ("memory_source", str, "", "what the counters are: cuda_allocator, cpu_tensors_and_rss or simulator"),
        ("peak_allocated_bytes", int, "B", "largest allocated, load and all steps up to the last measured one"),
        ("peak_active_bytes", int, "B", "the same of active (allocated, or freed but still in use by a stream)"),
        ("peak_active_most_bytes", int, "B", "simulated: what active could be at most, if the host ran as far ahead of the GPU as it may within a step; peak_active_bytes is that of a GPU that keeps up; null where no other stream uses what is freed"),
        ("peak_reserved_most_bytes", int, "B", "simulated: the same of reserved, at most what the GPU has"),
        ("peak_requested_bytes", int, "B", "the same of requested (before the allocator rounds up)"),
        ("peak_reserved_bytes", int, "B", "the same of reserved; on CPU the process's peak resident set"),
        ("reserved_unallocated_bytes", int, "B", "reserved minus allocated, both at the end of the last measured step"),
        ("inactive_split_peak_bytes", int, "B", "largest sum of free pieces of split blocks"),
        ("peak_parameters_bytes", int, "B", "simulated: of peak_allocated_bytes, the weights as asked for; the nine parts sum to it"),
        ("peak_buffers_bytes", int, "B", "simulated: of peak_allocated_bytes, what else the model keeps"),
        ("peak_gradients_bytes", int, "B", "simulated: of peak_allocated_bytes, gradients of the weights"),
        ("peak_optimizer_state_bytes", int, "B", "simulated: of peak_allocated_bytes, the optimizer's state"),
        ("peak_activations_bytes", int, "B", "simulated: of peak_allocated_bytes, made in a forward phase and kept beyond it"),
        ("peak_communication_bytes", int, "B", "simulated: of peak_allocated_bytes, weights gathered from other ranks, gradient buckets, what collectives read and write"),
        ("peak_temporaries_bytes", int, "B", "simulated: of peak_allocated_bytes, everything short-lived"),
        ("peak_workspaces_bytes", int, "B", "simulated: of peak_allocated_bytes, cuBLAS workspaces"),
        ("peak_rounding_bytes", int, "B", "simulated: of peak_allocated_bytes, what the allocator's rounding added"),
        ("prediction_basis", str, "", "simulated: which parts are exact (follow from shapes and dtypes), traced (what the code allocates on fake tensors) and estimate (rest on what a trace does not show)"),
        ("trace_basis", str, "", "simulated: how the trace came: traced (at this length and batch), symbolic (from a trace with symbolic length and batch, where its guards hold), checked at N points (from formulas that N traced points agree with)"),
        ("layers_traced", int, "", "simulated: how many layers were traced, where the model's layers are alike: the middle one stands for all but the first and the last, and a trace of one layer more confirmed it; null: every layer was traced"),
        ("load_peak_allocated_bytes", int, "B", "peak allocated while model and optimizer were built"),
        ("load_peak_reserved_bytes", int, "B", "peak reserved while model and optimizer were built"),
        ("forward_peak_allocated_bytes", int, "B", "peak allocated in the forward phase of the probe step; null, as the other phases, where no backward pass was seen"),
        ("forward_peak_reserved_bytes", int, "B", "peak reserved in the forward phase of the probe step"),
        ("backward_peak_allocated_bytes", int, "B", "peak allocated in the backward phase of the probe step"),
        ("backward_peak_reserved_bytes", int, "B", "peak reserved in the backward phase of the probe step"),
        ("optimizer_peak_allocated_bytes", int, "B", "peak allocated after the last backward of the probe step"),
        ("optimizer_peak_reserved_bytes", int, "B", "peak reserved after the last backward of the probe step"),
        ("part_peak_allocated_bytes", dict, "B", f"protocol=job: peak allocated of each part of the job that was seen: {', '.join(PARTS)}"),
        ("part_peak_reserved_bytes", dict, "B", "protocol=job: the same of reserved; null on a CPU"),
        ("largest_part", str, "", "protocol=job: the part that has the largest peak allocated, of reserved where that is not known"),
        ("step_peak_allocated_bytes", list, "B", "peak allocated of each measured step"),
        ("step_peak_reserved_bytes", list, "B", "peak reserved of each measured step"),
        ("step_allocated_bytes", list, "B", "allocated at the end of each measured step; simulated: where lengths vary"),
        ("step_reserved_bytes", list, "B", "reserved at the end of each measured step, as above"),
        ("step_tokens", list, "tokens", "where lengths vary (data=lengths:...): tokens of each measured step on this rank, padding counted"),
        ("step_growth_bytes", int, "B", "the least by which a step ended with more allocated than the one before it: above 0 every step leaves something behind; measured from three steps on, simulated of the last step, and notes say of what"),
        ("plateau", bool, "", "true if no step in the second half of the measured ones raised the peak reserved, and simulated ones leave nothing behind"),
        ("alloc_retries", int, "", "allocations that only succeeded after cached blocks were released"),
        ("alloc_ooms", int, "", "allocations that failed"),
        ("device_used_bytes", int, "B", "what NVML saw in use on the device after the measured steps; of several ranks the most of any device"),
        ("device_baseline_bytes", int, "B", "what NVML saw in use before the worker touched the device; of several ranks the most of any device"),
        ("device_total_bytes", int, "B", "memory of the device"),
        ("memory_limit_bytes", int, "B", "simulated: what the allocator may reserve on that GPU, its memory less the CUDA context"),
        ("oom_request_bytes", int, "B", "where memory ran out: the request for which there was no room; measured rows: as torch's message rounds it"),
        ("oom_allocated_bytes", int, "B", "where memory ran out: what was allocated then; measured rows: as torch's message rounds it"),
        ("oom_reserved_bytes", int, "B", "where memory ran out: what the allocator held then, its cache given back"),
        ("oom_parts_bytes", dict, "B", "simulated, where memory ran out: what was to be held, by part, the request included; they sum to oom_allocated_bytes + oom_request_bytes"),
        ("unlimited_peak_reserved_bytes", int, "B", "simulated, where memory ran out: what the run would have reserved without a limit"),
        ("rss_baseline_bytes", int, "B", "the process's resident set after the imports, before the model is built"),
        ("rank_peak_allocated_bytes", list, "B", "peak allocated of each rank; simulated: of rank 0, which holds the largest shards"),
        ("worst_rank", int, "", "the rank that every memory column is of: the one with the largest peak reserved (without it, allocated)"),
        ("rank_peak_reserved_bytes", list, "B", "peak reserved of each rank; simulated: of rank 0"),
        ("rank_peak_active_bytes", list, "B", "peak active of each rank; simulated: of rank 0"),
    ),
    *_columns(
        "host",
        ("host_peak_bytes", int, "B", "peak of a node's memory that cannot be given back (anonymous and shared, without mapped files), of all its ranks and the processes that they started: each rank's largest, looked at every 10 ms until the measured steps and once after them, summed; simulated: the parts below, the least that is needed; whether it holds CUDA's page-locked memory is up to the driver"),
        ("host_load_peak_bytes", int, "B", "the same while model and optimizer were built"),
        ("host_processes_bytes", int, "B", "of host_peak_bytes, what the ranks' processes held after their imports; simulated: what they hold on a CPU build of torch, CUDA's own part unknown"),
        ("host_workers_bytes", int, "B", "of host_peak_bytes, what processes that the ranks started (data loader workers) have for themselves, after the measured steps"),
        ("host_peak_parameters_bytes", int, "B", "simulated: of host_peak_bytes, weights that stay in host memory"),
        ("host_peak_gradients_bytes", int, "B", "simulated: of host_peak_bytes, gradients in host memory"),
        ("host_peak_optimizer_state_bytes", int, "B", "simulated: of host_peak_bytes, optimizer state and master weights in host memory"),
        ("host_peak_activations_bytes", int, "B", "simulated: of host_peak_bytes, activations in host memory"),
        ("host_peak_loading_bytes", int, "B", "simulated: of host_peak_bytes, what only loading needs: a model that is read or made on the host, copies"),
        ("host_peak_other_bytes", int, "B", "simulated: of host_peak_bytes, buffers and what is short-lived"),
        ("host_peak_rounding_bytes", int, "B", "simulated: of host_peak_bytes, page-locked blocks being powers of two, and those kept for reuse"),
        ("host_pinned_peak_bytes", int, "B", "peak of page-locked memory that torch's allocator holds, of all ranks of a node; null where torch does not tell, on device=cpu among others"),
        ("host_resident_peak_bytes", int, "B", "largest resident set of each rank until after the measured steps (the kernel's VmHWM), summed: mapped files and shared pages count in each"),
        ("host_ranks", int, "", "number of ranks on the node; simulated: on the fullest"),
        ("host_total_bytes", int, "B", "memory of the node, or what its cgroup may use; simulated: device.node_memory_gib"),
    ),
    *_columns(
        "speed",
        ("warmup_steps", int, "", "steps before the probe step, kept in warmup_step_times_s"),
        ("measured_steps", int, "", "steps that were timed"),
        ("elapsed_s", float, "s", "time of the measured steps, first boundary to last; of several ranks the slowest one's, as are the speeds and times below"),
        ("host_elapsed_s", float, "s", "the same by the host's monotonic clock, to when it knew that the device had ended; null on CPU, where there is no other clock, and for scripts"),
        ("step_times_s", list, "s", "time of each measured step, boundary to boundary"),
        ("warmup_step_times_s", list, "s", "time of each warm-up step on the host's clock"),
        ("compile_s", float, "s", "time that torch.compile took until the last measured step, most of it in the first warm-up step, with what its caches on disk held; null where nothing was compiled"),
        ("step_median_s", float, "s", "median of step_times_s"),
        ("step_iqr_s", float, "s", "interquartile range of step_times_s"),
        ("tokens_per_s", float, "tokens/s", "micro_batch x seq_len x grad_accum x world_size x measured_steps / elapsed_s; where lengths vary the tokens of the measured steps, padding counted / elapsed_s"),
        ("samples_per_s", float, "samples/s", "micro_batch x grad_accum x world_size x measured_steps / elapsed_s"),
        ("skipped_steps", int, "", "measured steps whose update was skipped for an overflow (fp16); null where it is not known"),
        ("padding_fraction", float, "", "share of the counted tokens that is padding"),
        ("shortest_document", int, "tokens", "data=lengths:...: the shortest document of the measured steps, of all ranks, cut to what its sample holds of it"),
        ("mean_document", float, "tokens", "data=lengths:...: their mean length"),
        ("longest_document", int, "tokens", "data=lengths:...: the longest of them"),
        ("model_flops_per_token", float, "FLOP", "3 x the counted forward FLOPs of a step / its tokens (backward is twice the forward); where weights are frozen, or the loss is Liger's, all counted FLOPs but recomputed ones; null where they cannot be told, with a note"),
        ("hardware_flops_per_token", float, "FLOP", "all counted FLOPs of a step, recomputation included / its tokens; null where an operator has no formula, with a note"),
        ("peak_flops", float, "FLOP/s", "published dense peak of this GPU at this precision; null if unknown"),
        ("mfu", float, "", "tokens_per_s x model_flops_per_token / (peak_flops x world_size)"),
        ("hfu", float, "", "tokens_per_s x hardware_flops_per_token / (peak_flops x world_size)"),
        ("loss_first", float, "", "loss of the first step"),
        ("loss_last", float, "", "loss of the last measured step; of several ranks rank 0's"),
    ),
    *_columns(
        "estimate",
        ("estimated_step_s", float, "s", "roofline estimate of a simulated row, not measured, as a rule a lower bound: the four parts below summed, or where that is longer the communication, which is taken to run wholly beside them; where memory runs out, of the step as it would be"),
        ("estimated_tokens_per_s", float, "tokens/s", "roofline estimate, not measured, as a rule an upper bound on speed: tokens of a step / estimated_step_s"),
        ("calibrated_step_s", float, "s", "estimate, not measured: the parts of estimated_step_s and estimated_communication_s, each times a factor that published speeds of this GPU and precision gave, or of all GPUs where there are none; no less than the host's time of all launches"),
        ("calibrated_tokens_per_s", float, "tokens/s", "estimate, not measured: tokens of a step / calibrated_step_s"),
        ("calibration", str, "", "which published speeds the calibrated estimate rests on, and how far sources, or GPUs, that were left out were off"),
        ("estimated_compute_s", float, "s", "roofline estimate, not measured: kernels bound by the peak FLOP/s of their precision, but fused attention's"),
        ("estimated_attention_s", float, "s", "roofline estimate, not measured: fused attention kernels bound by the peak FLOP/s of their precision"),
        ("estimated_memory_s", float, "s", "roofline estimate, not measured: kernels bound by the memory's bandwidth"),
        ("estimated_launch_s", float, "s", "roofline estimate, not measured: kernels bound by the time of a launch, which is assumed"),
        ("estimated_flops", int, "FLOP", "simulated, not measured: matrix products, convolutions and attention of one optimizer step, recomputation included"),
        ("estimated_moved_bytes", int, "B", "simulated, not measured: what the kernels of one optimizer step read and write at least"),
        ("estimated_launches", int, "", "simulated, not measured: kernel launches of one optimizer step"),
        ("estimated_communication_s", float, "s", "estimate, not measured, of several ranks: all collectives of one optimizer step, one after the other, at the published rate of the link; null where that is not known"),
        ("estimated_communication_bytes", int, "B", "estimate, not measured, of several ranks: what each sends in one optimizer step, by the ring algorithm"),
        ("estimated_collectives", int, "", "simulated, not measured, of several ranks: calls to the others in one optimizer step"),
        ("estimated_link", str, "", "the link that communication was estimated for, within a node + between nodes where there are several (harness/hardware/interconnects.py)"),
        ("estimated_step_no_overlap_s", float, "s", "estimate, not measured, of several ranks: the step if no communication runs beside the computation; the truth lies between estimated_step_s and this, were all peaks reached"),
        ("estimated_tokens_per_s_no_overlap", float, "tokens/s", "estimate, not measured, of several ranks: tokens of a step / estimated_step_no_overlap_s"),
    ),
    *_columns(
        "health",
        ("gpu_temperature_c", int, "°C", "temperature after the measured steps; of several ranks the worst value of any device, as in the columns below"),
        ("gpu_power_w", float, "W", "mean power of the device over the measured steps: its energy / elapsed"),
        ("gpu_energy_j", float, "J", "energy of the device over the measured steps; of several ranks the sum of their devices', null where one is not known"),
        ("gpu_sm_clock_before_mhz", int, "MHz", "SM clock right before the measured steps"),
        ("gpu_sm_clock_mhz", int, "MHz", "SM clock right after the measured steps"),
        ("gpu_sm_clock_max_mhz", int, "MHz", "the highest SM clock of the GPU; of several ranks the highest of any"),
        ("throttle_reasons", list, "", "clock event reasons seen around the measured steps, idle left out"),
        ("foreign_processes", list, "", "process ids of others seen on the device, before the attempt or after the measured steps"),
        ("node_trials", list, "", "ids of our own trials that ran on this machine at the same time"),
        ("host_load", float, "", "load average of the machine over a minute when the attempt began, per core"),
        ("flags", list, "", "what speaks against using this row's numbers as they are; null where nothing was measured"),
    ),
    *_columns(
        "provenance",
        ("gpu_name", str, "", "device name"),
        ("gpu_uuid", str, "", "device uuid"),
        ("driver_version", str, "", "NVIDIA driver"),
        ("cuda_version", str, "", "CUDA version torch was built with"),
        ("torch_version", str, "", ""),
        ("transformers_version", str, "", ""),
        ("deepspeed_version", str, "", "null where deepspeed was not used"),
        ("package_versions", dict, "", "versions of the optional packages of the trial's techniques, as installed; null where it needs none"),
        ("python_version", str, "", ""),
        ("cpu_name", str, "", ""),
        ("cpu_threads", int, "", "intra-op threads of torch in the worker; null where it only predicts"),
        ("host", str, "", ""),
        ("vramsweep_version", str, "", "version of this program"),
        ("git_commit", str, "", "commit of the harness, with +dirty if its files were changed"),
        ("environment", dict, "", "variables of the worker's environment that can change what is measured (NCCL_*, OMP_*, TORCH_*, ...)"),
        ("cold_reason", str, "", "why the attempt ran cold although warm was asked for"),
        ("runner_config", dict, "", "configuration that the runner generated and used (DeepSpeed, Trainer)"),
        ("recording", str, "", "allocator events of one untimed step, a file in the sweep's folder, for `replay`"),
        ("notes", list, "", "what a reader of the row should know"),
    ),
)  # fmt: skip

# Every other list holds numbers.
TEXT_LISTS = ("notes", "throttle_reasons", "flags", "node_trials", "attention_kernels", "differences", "unproven")
# What a measurement depends on beside its trial.
SYSTEM = ("gpu_name", "cpu_name", "torch_version", "transformers_version", "deepspeed_version")
# What only the harness says of a row, never the process that is measured: who the row is of, and how it ended.
OF_PARENT = frozenset(
    [column.name for column in COLUMNS if column.group == "identity"]
    + ["trial", "seed", "repeat", "foreign", "flags", "node_trials", "host_load", "git_commit", "vramsweep_version"]
    + ["cold_reason", "recording"]
)
BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}

UNSETTLED = ("estimate", "host")  # groups of predictions that are still being learned


def is_stable(column: Column) -> bool:
    """Whether name, type, unit and meaning stay from version to version (docs/compatibility.md)."""
    return column.group not in UNSETTLED and column.type is not dict


def complete_row(values: Mapping[str, Any]) -> Row:
    """A whole row from what is known: every column present, in the registry's order, null where not given.

    Raises RowError for an unknown column or a value of the wrong type.
    """
    unknown = sorted(set(values) - set(BY_NAME))
    if unknown:
        raise RowError(f"unknown column {', '.join(unknown)}")
    row = {name: values.get(name) for name in BY_NAME}
    row["schema_version"] = SCHEMA_VERSION
    for name, value in row.items():
        _check(BY_NAME[name], value)
    return row


def system_of(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """The system under test, as values of `SYSTEM`: the GPU on cuda, the CPU on cpu, neither where it is simulated.

    Whether a script uses DeepSpeed is known only when it has run, so that is no part of its system.
    """
    where = {"cuda": "gpu_name", "cpu": "cpu_name"}.get(str(row.get("device")))
    out = {"gpu_name", "cpu_name"} - {where}
    if row.get("runner") in STARTING:
        out.add("deepspeed_version")
    return tuple(None if name in out else row.get(name) for name in SYSTEM)


def to_encodable(values: Any) -> Any:
    """JSON values with what no file can hold replaced: half characters (lone surrogates), as of names that are no text."""
    return json.loads(json.dumps(values, ensure_ascii=False).encode(errors="replace"))


def _check(column: Column, value: Any) -> None:
    if value is None:
        return
    kinds = (int, float) if column.type is float else (column.type,)
    if not isinstance(value, kinds) or (column.type is not bool and isinstance(value, bool)):
        raise RowError(f"column {column.name} holds {describe(value)}, expected {column.type.__name__} or null")
    if column.name == "outcome" and value not in set(Outcome):
        raise RowError(f"outcome {describe(value)} is none of {', '.join(Outcome)}")


def is_plausible(values: Mapping[str, Any]) -> bool:
    """Whether what a row from anywhere says can be read as what its columns mean: types, numbers of a sane size, depth.

    More is allowed than may be written: a whole number as a float, other columns, and those that are missing. Whether
    the numbers make sense together is not looked at.
    """
    for name, value in values.items():
        if value is None:
            continue
        column = BY_NAME.get(name)
        kind = None if column is None else column.type
        if kind in (int, float):
            fits = _is_number(value)
        elif kind is list:
            texts, nulls = name in TEXT_LISTS, name.endswith("_bytes")
            fits = isinstance(value, list) and all(
                isinstance(one, str) if texts else _is_number(one) or (nulls and one is None) for one in value
            )
        elif kind in (str, bool):
            fits = isinstance(value, kind)
        else:
            fits = (kind is None or isinstance(value, kind)) and _shallow(value, DEEPEST)
        if not fits:
            return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -LARGEST < value < LARGEST


def _shallow(value: Any, levels: int) -> bool:
    """Whether it is nested no deeper, and none of its numbers is too large to reckon with."""
    if isinstance(value, (dict, list)):
        inner = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_shallow(one, levels - 1) for one in inner)
    return type(value) not in (int, float) or _is_number(value)


def markdown_table() -> str:
    """The columns as tables for the documentation, one a group."""
    lines: list[str] = []
    for group in dict.fromkeys(column.group for column in COLUMNS):
        lines += [f"**{group}**", "", "| column | type | unit | meaning |", "|---|---|---|---|"]
        lines += [f"| `{c.name}` | {c.type.__name__} | {c.unit} | {c.meaning} |" for c in COLUMNS if c.group == group]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
