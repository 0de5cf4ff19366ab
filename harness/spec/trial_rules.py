"""Rules against settings that contradict each other; each says why a trial cannot run, and what to change."""

from collections.abc import Callable, Iterator
from pathlib import Path

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.hardware import gpu_lookup, interconnects
from vramsweep.harness.hardware.gpu_lookup import GPUS
from vramsweep.harness.messages import suggestions
from vramsweep.harness.spec import command_template, gpu_names, length_distribution, runner_table, version_differences
from vramsweep.harness.spec.shardings import ZERO
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial

# Fields of a device that only a simulated one has.
SIMULATED = ("gpu", "gpus_per_node", "link", "interconnect", "node_memory_gib", "memory_gib", "capability",
             "headroom_gib")  # fmt: skip


def _model(trial: Trial) -> Iterator[str]:
    path, limit, trusted = trial.model.path, trial.model.max_positions, trial.model.trust_remote_code
    if trial.runner.name in runner_table.USER_CODE:
        if trusted:
            runner = f"runner={trial.runner.name}"
            yield f"model.trust_remote_code has no effect with {runner}, which loads its model itself; leave it out"
        return
    if (trial.model.model_type is None) == (path is None):
        yield "model: give either a built-in model or model.path (a folder or hub id)"
    if trial.weights == "pretrained" and path is None:
        yield "weights=pretrained needs model.path (a folder or hub id): model=hub model.path=..."
    if trial.data != "synthetic" and not length_distribution.names_lengths(trial.data) and path is None:
        yield "a text data set needs a tokenizer; give model.path (a folder or hub id): model=hub model.path=..."
    if trusted and path is None:
        yield "model.trust_remote_code needs a model that brings code (model=hub model.path=...); else leave it out"
    if limit is not None and trial.seq_len > limit:
        yield f"seq_len {trial.seq_len} is longer than {trial.model.name}'s {limit} positions; take a model with more"


def _device(trial: Trial) -> Iterator[str]:
    if trial.device.name == "simulated":
        yield from _simulated(trial)
        return
    defaults = type(trial.device).model_fields
    if given := [name for name in SIMULATED if getattr(trial.device, name) not in (None, defaults[name].default)]:
        yield f"device.{given[0]} belongs to device=simulated, not {trial.device.name}; leave it out"
    if trial.device.name == "cuda":
        return
    if trial.allocator.conf:
        yield f"allocator {trial.allocator.name}: the CUDA allocator is not in use on device=cpu; use allocator=default"
    own = trial.runner.name in runner_table.STARTING
    if trial.precision == "fp16" and trial.sharding not in ZERO and not own:
        yield "precision fp16 (autocast with GradScaler) is not supported on device=cpu; use bf16"


def _simulated(trial: Trial) -> Iterator[str]:
    if trial.device.gpu not in {gpu.name for gpu in GPUS}:
        yield gpu_names.unknown_gpu(f"device.gpu={trial.device.gpu}", str(trial.device.gpu))
        return
    if trial.device.capability is not None and trial.device.memory_gib is None:
        yield f"device.capability={trial.device.capability} needs device.memory_gib, the memory of that GPU"
    card = trial.device.card
    if gpu_lookup.memory_limit(card) <= 0:
        yield (
            f"{card.name} has no memory left after its CUDA context and device.headroom_gib; lower "
            "device.headroom_gib, or choose a larger GPU"
        )
    for name, between_nodes in (("link", False), ("interconnect", True)):
        chosen, listed = getattr(trial.device, name), interconnects.link_names(between_nodes)
        if chosen is not None and chosen not in listed:
            yield suggestions.no_such_value(f"device.{name}={chosen}", name, chosen, listed)
    conf = allocator_config.parse(trial.allocator.conf)
    if conf.throw_on_cudamalloc_oom:
        yield (
            f"allocator {trial.allocator.name}: throw_on_cudamalloc_oom cannot be predicted; leave it out, because "
            "it only changes how PyTorch handles a failed allocation"
        )
    if trial.weights == "pretrained" and trial.quantization != "none":
        yield (
            f"weights=pretrained with quantization={trial.quantization} cannot be predicted; use weights=random, which "
            "takes the same memory on the GPU"
        )


def _allocator(trial: Trial) -> Iterator[str]:
    conf = allocator_config.parse(trial.allocator.conf)
    if trial.record and (trial.device.name != "cuda" or conf.backend != "native"):
        yield "record=true needs device=cuda and PyTorch's native allocator; no other keeps a history of its events"
    torch = catalog.version("torch")
    for unknown in [] if torch is None else allocator_config.unknown_options(conf, torch):
        yield f"allocator {trial.allocator.name}: {unknown}"


def _runner(trial: Trial) -> Iterator[str]:
    name = trial.runner.name
    for setting, takers in (("target", runner_table.TARGETED), ("command", runner_table.STARTING)):
        if getattr(trial.runner, setting) and name not in takers:
            yield f"runner.{setting} belongs to runner={' or '.join(takers)}, not {name}; leave it out"
    if name in runner_table.STARTING:
        yield from command_template.command_problems(trial)
    elif not trial.runner.stop:
        which = " or ".join(runner_table.STARTING)
        yield f"runner.stop belongs to runner={which}, not {name}, which ends with the protocol's steps; leave it out"
    if name in runner_table.TARGETED:
        path, colon, function = (trial.runner.target or "").rpartition(":")
        if not colon or not function.isidentifier():
            yield f"runner={name} needs runner.target=path/to/file.py:function"
        if not Path(path).is_file():
            yield f"runner.target: there is no file {path}"


def _job(trial: Trial) -> Iterator[str]:
    if not trial.protocol.job:
        return
    if trial.device.name == "simulated":
        yield (
            "protocol=job cannot be predicted; measure loading, evaluation and checkpoints on device=cuda or device=cpu"
        )
    ours = [r.name for r in runner_table.RUNNERS if r.jobs and not r.starts]
    if not runner_table.runner(trial.runner.name).jobs:
        which = " or ".join(ours)
        yield f"protocol=job is for runner={which} and scripts (vramsweep run), not runner={trial.runner.name}"
    if trial.runner.name in ours and trial.sharding != "none":
        yield f"protocol=job with sharding={trial.sharding} works with scripts only: vramsweep run protocol=job ..."


# Each yields reasons why a trial cannot run; only the first reason of all rules is shown.
RULES: tuple[Callable[[Trial], Iterator[str]], ...] = (
    _model, _device, _allocator, _runner, _job, length_distribution.lengths_problem, version_differences.rule,
)  # fmt: skip
