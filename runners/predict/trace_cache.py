"""Cache of traces, which the trial's own runner makes on fake tensors: each is kept for every trial that shares it.

A trace depends on neither the allocator's setting nor the size of the GPU's memory. It is kept in the sweep's folder,
and for the user, under a hash of what it does depend on. The cuBLAS workspaces of the GPU are inserted when it is read.
A file is JSON, with its CRC-32 as the last line; a trace whose file is not as written is made anew.

The user's cache is a private folder of limited size for all that tracing has made, for one user's sweeps and questions:
$VRAMSWEEP_CACHE (empty: nothing is kept), else $XDG_CACHE_HOME/vramsweep, else ~/.cache/vramsweep. A file's name hashes
all that its content depends on: what the caller names, our own code, installed packages, the variables that a row
records. Callers check what a file contains.
"""

import contextlib
import hashlib
import json
import os
import stat
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vramsweep.harness.files import redaction
from vramsweep.harness.files.bounded_reads import read_content, replaced
from vramsweep.harness.files.file_names import CACHE
from vramsweep.harness.hardware.gpu_lookup import Gpu
from vramsweep.harness.machine import machine
from vramsweep.harness.process import worker_environment
from vramsweep.harness.spec import runner_table
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_identity import SIMULATION
from vramsweep.runners.trace import stream_lag
from vramsweep.runners.trace.symbolic_trace import Point, compiled, following, plain
from vramsweep.runners.trace.trace_data import AS_WRITTEN, CATEGORIES, HOST_CATEGORIES, Storages, Trace, generation, on

# Version of a kept trace's layout: raise it when that changes, and trial_identity.SIMULATION when predictions change.
FORMAT = 17
NOT_TRACED = frozenset({"allocator", "protocol", "repeat", "device"})  # axes that a trace does not depend on
MOST = 1 << 63  # bound of any number in a trace
MOST_KEPT = 2 << 30  # bytes of all files of a user; the least recently used are deleted first
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft")
KEPT_ON = (8, 0)  # compute capability whose workspaces a kept trace has, whichever GPU it was made for


@dataclass(frozen=True)
class _Kept:
    """Content of a trace's file."""

    __pydantic_config__ = AS_WRITTEN
    trace: Trace
    details: dict[str, Any]


_KEPT = TypeAdapter(_Kept)


def load_or_trace(trial: Trial, card: Gpu, folder: Path, traces: Path) -> tuple[Trace, dict[str, Any]]:
    """Return the trial's trace and details; if they are not kept yet, make and keep them. Raises InvalidTrial."""
    found = load_trace(trial, card, traces)
    if found is not None:
        return found
    from vramsweep.runners.predict import make_trace  # and torch: seconds that a kept trace saves

    trace, details = make_trace.trace_layers(trial, card, folder)
    told = redaction.redact(details, worker_environment.secrets(os.environ))  # with a library's configuration
    content = serialize({"trace": plain(on(trace, KEPT_ON)), "details": told})
    traces.mkdir(parents=True, exist_ok=True)
    with replaced(trace_path(trial, card, traces)) as aside:
        aside.write_bytes(content)
    if (kept := users_file(trace_key(trial, card), trial)) is not None:
        keep(kept, content)
    return trace, details


def load_trace(trial: Trial, card: Gpu, traces: Path) -> tuple[Trace, dict[str, Any]] | None:
    """Return the trial's trace from the folder `traces`, else from the user's cache; None if neither has it intact."""
    found = _read_whole(trace_path(trial, card, traces), read_content)
    if found is None and (kept := users_file(trace_key(trial, card), trial)) is not None:
        found = _read_whole(kept, load)
    return None if found is None or not found[0].serves(trial) else (on(found[0], card.capability), found[1])


def _read_whole(file: Path, load: Callable[[Path], bytes]) -> tuple[Trace, dict[str, Any]] | None:
    try:
        return read(load(file))
    except OSError:
        return None
    except ValueError as error:
        print(f"{file} is damaged ({error!s:.80}), so the trial is traced again", flush=True)
        file.unlink(missing_ok=True)
        return None


def is_kept(trial: Trial, card: Gpu, traces: Path) -> bool:
    """Check that a file of the trial's trace exists, in the folder `traces` or in the user's cache."""
    kept = users_file(trace_key(trial, card), trial)
    return trace_path(trial, card, traces).is_file() or (kept is not None and kept.is_file())


def users_file(name: str, trial: Trial) -> Path | None:
    """Return the file of `name` in the user's cache; None if none is kept, as for trials that need the user's files."""
    model = trial.model
    own = (model.path, trial.ds_config, trial.runner.target, trial.runner.command, model.trust_remote_code or None)
    if any(one is not None for one in own) or trial.data != "synthetic" or trial.runner.name in runner_table.USER_CODE:
        return None
    return place_of(name)


def serialize(values: Mapping[str, Any]) -> bytes:
    """Encode values as a file's content: JSON and its checksum."""
    text = json.dumps(values).encode()
    return text + b"\n%08x\n" % zlib.crc32(text)


def checked(content: bytes) -> bytes:
    """Return the JSON that `serialize` wrote. Raises ValueError if the checksum does not match."""
    text, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    if checksum != b"%08x" % zlib.crc32(text):
        raise ValueError("its checksum does not match its content")
    return text


def read(content: bytes) -> tuple[Trace, dict[str, Any]]:
    """Parse the content of a trace's file. Raises ValueError for anything that is not as it was written."""
    kept = _KEPT.validate_json(checked(content))
    check(kept.trace)
    return kept.trace, kept.details


def trace_path(trial: Trial, card: Gpu, traces: Path) -> Path:
    """Return the file of the trial's trace in the folder `traces`."""
    return traces / f"{trace_key(trial, card)}.json"


def family_key(trial: Trial, card: Gpu) -> str:
    """Hash what a trace depends on, except length and batch: traces of a family differ in sizes, or little more."""
    return trace_key(trial, card, NOT_TRACED | {"seq_len", "micro_batch"})


def trace_key(trial: Trial, card: Gpu, without: Set[str] = NOT_TRACED) -> str:
    """Hash what a trace depends on: all of a trial that can change it, the GPU's generation, versions."""
    axes = trial.model_dump(mode="json", exclude=set(without))
    versions = [machine.version(package) for package in ("torch", "transformers", "accelerate", "deepspeed")]
    half = trial.attention in ("sdpa", "sdpa_cudnn") and trial.precision not in ("fp32", "tf32")  # cuDNN may serve it
    kind = generation(card.capability, half or trial.runner.name in runner_table.USER_CODE)  # whose calls are unknown
    of_the_card: list[Any] = [kind, card.multiprocessors if trial.kernels == "liger" else None]
    of_the_card += [card.name] * bool(trial.runner.command)  # torch.cuda answers a script as this GPU
    text = json.dumps([FORMAT, SIMULATION, axes, of_the_card, versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(trace: Trace, sized: bool = True) -> None:
    """Raise ValueError, with what is wrong, unless every number is in its range and every list has its length.

    Otherwise predictions from the trace would be silently wrong, or fail far from here. `sized`: it has its own sizes,
    kernels and collectives. pydantic checks types. Nothing checks whether the storages are those of any program.
    """
    for storages, categories in ((trace, CATEGORIES), (trace.host, HOST_CATEGORIES)):
        _storages(storages, categories, sized)
    count = len(trace.categories)
    _need(len(trace.streams) == len(trace.origins) == count, "there is not one stream and one origin for each storage")
    _need(len(trace.host.pinned) == len(trace.host.categories), "there is not one pinned for each storage")
    _need(all(origin < len(trace.makers) for origin in trace.origins), "origins are not among the makers")
    for work, _ in trace.kernels:
        _need(_numbers((work.flops, work.nbytes, work.launches)), "kernels are wrong")
    _need(_numbers([called.nbytes for called, _ in trace.collectives]), "collectives are wrong")
    for storage, text, of in trace.stepwise:
        _need(storage < count, "a size that depends on a number belongs to no storage")
        _need(not sized or compiled(following(text, str(of)))(Point(0, 0)) == trace.sizes[storage], "stepwise is wrong")
    for at, kind, one, other in trace.notes:
        _need(kind in stream_lag.KINDS and _numbers((at, one, other)), "notes are wrong")


def _storages(storages: Storages, categories: Collection[str], sized: bool) -> None:
    count, marks = len(storages.categories), storages.marks
    _need(set(storages.categories) <= set(categories), "a category is unknown")
    _need(len(storages.sizes) == count * sized, "there is not one size for each storage")
    _need(all(-count <= event <= count for event in storages.events), "an event belongs to no storage")
    _need(all(mark.end <= len(storages.events) for mark in marks), "a mark is after the last event")
    _need(all(before.end <= after.end for before, after in pairwise(marks)), "marks are not in order")


def _numbers(values: Sequence[int]) -> bool:
    return all(0 <= value < MOST for value in values)


def _need(well: bool, what: str) -> None:
    if not well:
        raise ValueError(f"not a valid trace: {what}")


def load(place: Path) -> bytes:
    """Return the content of a file of `place_of`, and mark it as used now. Raises OSError."""
    content = read_content(place, links=False)
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(place, follow_symlinks=False)
    return content


def keep(place: Path, content: bytes) -> None:
    """Keep content in a file of `place_of`; a write that fails, as on a full disk, is ignored."""
    with contextlib.suppress(OSError):
        with replaced(place) as aside:
            aside.touch(0o600, exist_ok=False)
            aside.write_bytes(content)
        _make_room(place.parent)


def place_of(name: str) -> Path | None:
    """Return the file of this name; None if nothing is kept."""
    if (folder := _folder()) is None or (state := _installed_state()) is None:
        return None
    environment = worker_environment.recorded_variables(os.environ)
    text = json.dumps([name, state, environment], sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _folder() -> Path | None:
    """Return the folder, made if needed; None if it is switched off, cannot be made, or is not this user's alone."""
    named = os.environ.get(CACHE)
    if named == "":
        return None
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vramsweep"
        folder = (Path(named) if named else base) / "traces"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except (OSError, RuntimeError):  # there is no home
        return None
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if private else None


@cache
def _installed_state() -> str | None:
    """Hash our code and tables, and what is installed; None if a library may change under one version (editable)."""
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
            origin = json.loads(metadata.distribution(name).read_text("direct_url.json") or "{}")
            if origin.get("dir_info", {}).get("editable"):
                return None
    found = hashlib.sha256(sys.version.encode())
    for place in sys.path:
        with contextlib.suppress(OSError):  # their names have versions
            found.update(repr(sorted(one.name for one in Path(place or ".").glob("*.*-info"))).encode())
    root = Path(__file__).parents[2]  # not resolved: its folders may be links
    for part in ("harness", "runners"):
        for file in sorted(file for kind in ("py", "json", "tsv") for file in (root / part).rglob(f"*.{kind}")):
            found.update(f"{file.relative_to(root)} ".encode() + file.read_bytes())
    return found.hexdigest()


def _make_room(folder: Path) -> None:
    files = []
    for file in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process deletes files too
            found = file.stat(follow_symlinks=False)
            files.append((found.st_mtime, found.st_size, file.path))
    beyond = sum(size for _, size, _ in files) - MOST_KEPT
    for _, size, path in sorted(files) if beyond > 0 else ():
        if beyond > 0:
            Path(path).unlink(missing_ok=True)
            beyond -= size
