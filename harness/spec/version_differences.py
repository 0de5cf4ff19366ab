"""Known differences of earlier versions of packages, by which a simulated run is predicted as it really ran.

A simulated run traces the installed code, but `versions` may name other versions. An entry applies if its range
contains the named version, but not the installed one. It then changes the trace as upstream's code of that version did
(runners/trace/version_patches/). Each entry was found by reading that code and cites it; none is a setting. Behaviour
that is not listed here is predicted as that of the installed version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vramsweep.harness.spec.shardings import ZERO
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.transformers_differences import TRANSFORMERS, Difference, uses_sdpa

if TYPE_CHECKING:
    from vramsweep.harness.spec.trial import Trial


def _zero3(trial: Trial) -> bool:
    return trial.sharding == "zero3"


LT_WORKSPACES = ("torch", ">=2.9,<2.12")
"""Where cuBLASLt's handles keep a workspace of their own: pytorch #156495 to #173002. Seen on a GPU with 2.11."""

FLASH_FIRST = ("torch", "<2.11")
"""Where flash attention comes before cuDNN's on every GPU: 2.10 goes by cuDNN's version, and brings one too old; 2.11
brings 9.19."""
ANY_DROPOUT = ("torch", "<2.12")
"""Where cuDNN's attention takes every probability of dropout: before pytorch #174245. Seen on a GPU with 2.11."""

# fmt: off
DIFFERENCES = (
    Difference("flash_first", *FLASH_FIRST, "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, "
               "check_prefer_cudnn_attention (2.10; the wheels of 2.11 bring cuDNN 9.19, later than the 9.15 that it "
               "asks for)", "scaled_dot_product_attention takes flash attention before cuDNN's on Hopper and data "
               "centres' Blackwell too", ("cuda", "flash_first"), uses_sdpa),
    Difference("any_dropout", *ANY_DROPOUT, "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, "
               "can_use_cudnn_attention (pytorch #174245 in 2.12)", "cuDNN's attention is taken for every probability "
               "of dropout, not only for sixteenths", ("cuda", "any_dropout"), uses_sdpa),
    Difference("lt_workspaces", *LT_WORKSPACES, "aten/src/ATen/cuda/CublasHandlePool.cpp, getCUDABlasLtWorkspace "
               "(pytorch #156495 in 2.9; shared with cuBLAS since #173002 in 2.12)", "products that add a bias, which "
               "cuBLASLt does, keep another MiB for each thread's handle", ("cuda", "lt_apart"),
               lambda trial: True),
    Difference("zero_linear_by_init", "deepspeed", "<0.19.4", "runtime/zero/partition_parameters.py, Init.__init__ and "
               "patch_init_and_builtins (0.14.2; ended by #8189)", "linear layers keep no gathered weight for the "
               "backward pass only where the model was made under zero.Init; otherwise autograd holds all of them",
               ("zero", "linear_by_init"), _zero3),
    Difference("zero_live_parameters", "deepspeed", "<0.15.4", "runtime/zero/stage3.py, backward: reset_step (0.14.2, "
               "0.15.3); runtime/zero/parameter_offload.py, _start_of_forward_hook (0.15.4)", "embeddings, gathered "
               "still when the backward pass ends, are subtracted from a count that was set to 0 before; so "
               "stage3_max_live_parameters allows as many more parameters, which are prefetched and kept",
               ("zero", "live_parameters"), _zero3),
    Difference("zero_half_buffers", "deepspeed", "<0.19.2", "runtime/engine.py, _configure_distributed_model: "
               "module.half() (0.14.2; ended by #8066)", "buffers are cast to the precision of the weights; later they "
               "stay as the model has them", ("zero", "half_buffers"),
               lambda trial: trial.sharding in ZERO and trial.precision in ("bf16", "fp16")),
    *TRANSFORMERS,
)
# fmt: on


def find_differences(trial: Trial) -> list[Difference]:
    """Return the known differences between the versions that a simulated trial names and the installed ones."""
    return [one for one in DIFFERENCES if one.when(trial) and _differs(one, trial.versions.get(one.package))]


def installed_is(package_and_versions: tuple[str, str]) -> bool:
    """Return whether the installed version of a package is in a range; False if none is installed."""
    package, versions = package_and_versions
    version = catalog.version(package)
    return version is not None and _within(versions, version)


def _within(versions: str, version: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def _differs(one: Difference, asked: str | None) -> bool:
    return asked is not None and _within(one.versions, asked) and not installed_is((one.package, one.versions))


def rule(trial: Trial) -> Iterator[str]:
    """Yield why the trial's `versions` cannot be followed."""
    if not trial.versions:
        return
    known = sorted({one.package for one in DIFFERENCES})
    if trial.device.name != "simulated":
        yield "versions can only be predicted; leave them out, or use device=simulated"
    for package, version in trial.versions.items():
        if package not in known:
            yield f"versions.{package}: no differences of its versions are known, only those of {', '.join(known)}"
        try:
            asked = Version(version)
        except InvalidVersion:
            yield f"versions.{package}={version} is not a version; write it like 0.14.2"
            continue
        installed = catalog.version(package)
        # "+cu130" and "+cpu" are builds of one version
        if installed is not None and Version(asked.public) > Version(Version(installed).public):
            yield (
                f"versions.{package}={version} is later than {installed}, which is installed and traced; "
                "install the later one and leave versions out"
            )
