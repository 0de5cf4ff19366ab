"""A trial as short text, and sentences on whether it fits, for lines and tables of every verb. Sizes are in bytes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES, SHORTFALL, reported_bytes
from vramsweep.harness.hardware.step_time import UNALIGNED_PRODUCT
from vramsweep.harness.messages.units import format_gib
from vramsweep.harness.spec import command_template, length_distribution, trial_rules
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_identity import ID_DEFAULTS

AHEAD = "the peak grows if the CPU runs ahead of the GPU"
ADAPTED = ("bf16", "fp16")  # precisions with fp32 weights; often an adapter's model has others
NEAR = 0.01  # share of the limit; a trial that leaves less only just fits
COMMUNICATION_GIB = 2
PADDING = 0.1  # share of a step that unaligned products must take before padding is worth a word
NO_ROOM = "NCCL's buffers of 1 to 2 GiB, which may not fit next to this peak (device.headroom_gib=2 includes them)"
COMMUNICATION = "NCCL's buffers; leave 1 to 2 GiB of each GPU for them (device.headroom_gib=2)"


def describe_trial(trial: Trial) -> str:
    """Return the trial as one line: model, runner, length, batch, precision, and what is not the default."""
    if trial.runner.command is not None:
        return _describe_command(trial)
    parts = [trial.model.name, trial.runner.name, f"seq {trial.seq_len}", f"batch {trial.micro_batch}", trial.precision]
    if trial.sharding != "none":
        parts.insert(2, f"{trial.sharding} x {trial.world_size}")
    if trial.ds_config is not None:
        parts.append(f"ds_config={Path(trial.ds_config).name}")
    for name in ("offload_optimizer", "offload_param", "zero_init"):
        if getattr(trial, name) != ID_DEFAULTS[(name,)]:
            parts.append(f"{name}={str(getattr(trial, name)).lower()}")
    parts += [f"like {package} {version}" for package, version in trial.versions.items()]
    if trial.model.trust_remote_code:
        parts.append("its own code")
    for name in trial_rules.SIMULATED[1:]:
        if getattr(trial.device, name) != ID_DEFAULTS["device", name]:
            own = getattr(trial.device, name)
            parts.append(f"device.{name}={round(own, 2) if isinstance(own, float) else own}")
    if trial.data != ID_DEFAULTS[("data",)]:
        drawn_from = length_distribution.lengths_file(trial.data)
        parts.append(f"data={trial.data if drawn_from is None else length_distribution.PREFIX + drawn_from.name}")
    parts += catalog.changed_settings(trial)
    if trial.allocator.conf:
        parts.append(trial.allocator.name)
    return " · ".join(parts)


def _describe_command(trial: Trial) -> str:
    """Return the name of a script, and what its command is given."""
    told = command_template.placeholder_names(str(trial.runner.command))
    parts = [trial.model.name]
    for name, words in (("seq_len", "seq"), ("micro_batch", "batch")):
        parts += [f"{words} {getattr(trial, name)}"] * (name in told)
    others = [name for name in command_template.UNSAID if name in told - {"seq_len", "micro_batch"}]
    parts += [f"{name}={catalog.text(getattr(trial, name))}" for name in others]
    parts += [f"{name}={catalog.text(value)}" for name, value in trial.runner.options.items()]
    parts += [f"x {trial.world_size}"] * (trial.world_size > 1)
    return " · ".join([*parts, *([trial.allocator.name] if trial.allocator.conf else [])])


def describe_run(trial: Trial, without: str = "") -> str:
    """Return the trial as people ask about it: model, GPUs and sharding, batch per GPU, length, what is not default.

    `without` is the setting to leave out because it is the question, seq_len or micro_batch.
    """
    name, *parts = describe_trial(trial).split(" · ")
    gpus = f"{trial.world_size} x {trial.device.card.name}" if trial.device.name == "simulated" else ""
    if trial.runner.command is not None:
        return " · ".join(filter(None, [name, gpus, *parts]))
    sharding = f"with {trial.sharding}" if trial.sharding != "none" else ""
    batch, length = f"batch {trial.micro_batch}", f"seq {trial.seq_len}"
    told = (trial.runner.name, f"{trial.sharding} x {trial.world_size}", trial.precision, batch, length)
    full = trial.adapter != "none" and trial.quantization == "none" and trial.precision in ADAPTED
    first = [
        "" if trial.runner.name == "torch" else trial.runner.name,
        " ".join(filter(None, (gpus, sharding))),
        trial.precision + " (fp32 weights)" * full,
        "" if without == "micro_batch" else f"{batch} per GPU",
        f"grad_accum={trial.grad_accum}" if trial.grad_accum > 1 else "",
        "" if without == "seq_len" else f"{trial.seq_len:,} tokens",
    ]
    return " · ".join(filter(None, [name, *first, *(part for part in parts if part not in told)]))


def bound_reserved(low: int, most: int | None) -> int:
    """Return the upper bound of what a run that fits reserves: a row's `most` if it has one, never below the peak."""
    return max(low, most or 0)


def describe_range(low: int, high: int) -> str:
    """Return two sizes as a range in GiB; one number if both read the same."""
    return " to ".join(dict.fromkeys(map(format_gib, (low, high))))


def describe_fit(low: int | None, high: int, limit: int) -> str:
    """Return a sentence on a peak that fits: its share of the limit, and what is free. `high` is its upper bound.

    Upper bounds end at the limit, so a peak whose bound reaches the limit is not known to fit.
    """
    low = high if low is None else low
    of = f"peak reserved {describe_range(low, high)} of {format_gib(limit)} GiB ({_percent(high, limit)})"
    if low < high >= limit:
        return f"probably fits: {of}; {AHEAD}; once the GPU is full, PyTorch waits; this delay is not predicted"
    free, fits = f"{format_gib(limit - high)} GiB free", "fits" if limit - high >= NEAR * limit else "only just fits"
    if format_gib(low) == format_gib(high):
        return f"{fits}: {of}, {free}"
    return f"{fits}: {of}, at least {free}; {AHEAD}"


def describe_misfit(need: int | None, limit: int) -> str:
    """Return a sentence on what a run that does not fit is missing; `need` None: unknown."""
    most = format_gib(limit)
    if need is None:
        return f"does not fit into {most} GiB; how much it needs is unknown"
    if need <= limit:  # the order of the requests leaves gaps
        share = f"{format_gib(need)} of {most} GiB ({_percent(need, limit)})"
        return f"does not fit: {share} would be enough, but no free block is large enough for one request"
    return f"does not fit: needs {format_gib(need)} GiB, {format_gib(need - limit)} GiB above the limit of {most} GiB"


def list_exclusions(trial: Trial, free: int | None = None) -> Iterator[str]:
    """Yield what the peak of a predicted trial does not include; `free` bytes are known to be left next to it."""
    if beside := communication_bytes(trial):
        yield NO_ROOM if free is not None and 0 <= free < beside else COMMUNICATION
    if trial.optimizer.startswith("paged_"):
        yield f"pages of {trial.optimizer}"


def communication_bytes(trial: Trial) -> int:
    """Return the bytes that a GPU may need for NCCL's buffers, next to its peak and its headroom."""
    return COMMUNICATION_GIB << 30 if trial.world_size > 1 and trial.device.headroom_gib < COMMUNICATION_GIB else 0


def describe_padding(trial: Trial, row: Mapping[str, Any]) -> str | None:
    """Say what to pad if products with unaligned rows are a tenth of a predicted step that the GPU limits, or None."""
    kernels = row.get("estimated_kernels_s") or {}
    seconds, step = kernels.get(UNALIGNED_PRODUCT, 0.0), row.get("calibrated_step_s") or 0.0
    if row.get("estimated_bound_by") != "gpu" or kernels["collectives"] >= step or seconds < PADDING * step:
        return None
    size = trial.model.config.get("vocab_size")
    what = "the odd sizes of the model to multiples of 64"
    if isinstance(size, int) and size % 8:
        what = f"the vocabulary from {size:,} to {-(-size // 64) * 64:,}"
    share = f"{100 * seconds / step:.0f} % of the estimated step"
    return f"matrix products whose rows do not begin at multiples of 16 bytes take {share}; pad {what}"


def describe_limit(trials: Sequence[Trial]) -> str:
    """Return a sentence on what the limit of a GPU is in these predictions."""
    unknown = any(reported_bytes(trial.device.card) is None for trial in trials)
    less = f"{SHORTFALL:.0%} (the size that it reports is unknown) and ".replace("%", " %") * unknown
    most = max((trial.device.headroom_gib for trial in trials), default=0.0)
    up_to = "up to " * any(trial.device.headroom_gib < most for trial in trials)
    context = f"{format_gib(CONTEXT_BYTES)} GiB for the CUDA context"
    left = f", and {up_to}{most:g} GiB headroom" * (most > 0)
    return f"limit: the GPU's memory minus {less}{context}{left}"


def _percent(size: int, limit: int) -> str:
    return f"{100 * size / limit:.0f} %" if size >= limit / 200 else "<1 %"
