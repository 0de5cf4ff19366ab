"""PYTORCH_CUDA_ALLOC_CONF as data: one table of options, and functions that parse, render and check settings.

The grammar and the ranges are those of upstream's `ConfigTokenizer`, `AcceleratorAllocatorConfig::parseArgs` and
`CUDAAllocatorConfig::parseArgs` (torch 2.13), with two deliberate differences. Upstream reads only the first digits of
"128.7"; here such a number must be whole. An unknown option is always an error.
"""

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError, describe

MIB = 1 << 20
INTERVALS = 16  # roundup_power2_divisions: one entry per power of two from 1 MiB to 32 GiB (and above)
NO_ROUNDUP = (0,) * INTERVALS
OLDEST_TORCH = "2.6"

Kind = Literal["bool", "whole number", "number", "name", "divisions"]
Scope = Literal["backend", "device", "host"]


# Lowest and highest ratio, less 1, of cudaMallocAsync's peak reserved to that of expandable segments, of eight pairs
# in results/reference/h100-80gb.
ASYNC_RESERVED = (-0.021, 0.007)


class AllocatorConfigError(UserError):
    """A PYTORCH_CUDA_ALLOC_CONF that torch would refuse or misread."""


@dataclass(frozen=True)
class Option:
    """One option of PYTORCH_CUDA_ALLOC_CONF.

    `since` is the first torch release with it; "2.6" also stands for anything earlier, because 2.6 is the oldest
    release this project supports. `scope` says what the option affects: the choice of backend ("backend"), the native
    caching allocator ("device") or pinned host memory ("host").
    """

    name: str
    kind: Kind
    allowed: str
    since: str
    scope: Scope
    meaning: str
    accepts: Callable[[Any], bool] = field(repr=False)
    alias: str | None


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@dataclass(frozen=True)
class AllocatorConfig:
    """Settings of PyTorch's CUDA allocator; each field has the name of its option and torch's default.

    Sizes are in MiB as in the variable; None means "no limit" or "not set". `roundup_power2_divisions` holds the
    divisions for requests from 1, 2, 4 ... 32768 MiB; 0 is off (1 divides nothing, so it is stored as 0).
    Raises AllocatorConfigError if a value is out of range.
    """

    backend: str = "native"
    expandable_segments: bool = False
    large_segment_size_mb: int = 20
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None
    roundup_power2_divisions: tuple[int, ...] = NO_ROUNDUP
    garbage_collection_threshold: float | None = None
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False
    release_lock_on_cudamalloc: bool = False
    graph_capture_record_stream_reuse: bool = False
    pinned_use_cuda_host_register: bool = False
    pinned_num_register_threads: int = 1
    pinned_use_background_threads: bool = False
    pinned_reserve_segment_size_mb: int | None = None
    pinned_max_round_threshold_mb: int | None = None
    pinned_max_cached_size_mb: int | None = None
    pinned_free_catch_all: bool = False

    def __post_init__(self) -> None:
        divisions = tuple(0 if d == 1 else d for d in self.roundup_power2_divisions)
        object.__setattr__(self, "roundup_power2_divisions", divisions)
        for option in OPTIONS:
            value = getattr(self, option.name)
            if value is not None and not option.accepts(value):
                raise _wrong(option, format_value(option, value))
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < self.large_segment_size_mb:
                limit = f"at least large_segment_size_mb ({self.large_segment_size_mb})"
                raise AllocatorConfigError(f"{name}:{value} is too small: allowed is {limit}")

    def set_options(self) -> list[Option]:
        """Return the options whose value is not torch's default, in the order of the table."""
        return [o for o in OPTIONS if getattr(self, o.name) != getattr(_DEFAULT, o.name)]

    def render(self, only: Collection[str] | None = None) -> str:
        """Return the canonical text: the options that differ from the defaults, in the table's order; "" if none does.

        `only` names the options that may be in it. `>` is never written, because releases disagree about the interval
        from which it starts.
        """
        chosen = [o for o in self.set_options() if only is None or o.name in only]
        return ",".join(f"{o.name}:{format_value(o, getattr(self, o.name))}" for o in chosen)


# How the value of a field is read, by its type; a size that may have no limit is also a whole number.
_KINDS: dict[Any, Kind] = {
    str: "name", bool: "bool", int: "whole number", int | None: "whole number", float: "number",
    float | None: "number", tuple[int, ...]: "divisions",
}  # fmt: skip
# The values that torch accepts for an option, if it does not accept all of its type.
_ACCEPTS: dict[str, Callable[[Any], bool]] = {
    "backend": lambda v: v in ("native", "cudaMallocAsync"),
    "large_segment_size_mb": lambda v: v > 10,
    "roundup_power2_divisions": lambda v: len(v) == INTERVALS and all(d == 0 or _power_of_two(d) for d in v),
    "garbage_collection_threshold": lambda v: 0 < v < 1,
    "per_process_memory_fraction": lambda v: 0 <= v <= 1,
    "pinned_num_register_threads": lambda v: _power_of_two(v) and v <= 128,
    "pinned_reserve_segment_size_mb": lambda v: v > 0,
}


def _read_options() -> tuple[Option, ...]:
    """Return the option of each field of AllocatorConfig, described by its line of options.tsv."""
    _, *lines = Path(__file__).with_name("options.tsv").read_text("utf-8").splitlines()
    about: dict[str, list[Any]] = {name: others for name, *others in (line.split("\t") for line in lines)}
    found = []
    for one in fields(AllocatorConfig):
        since, scope, alias, allowed, meaning = about[one.name]
        accepts = _ACCEPTS.get(one.name, lambda _value: True)
        found.append(Option(one.name, _KINDS[one.type], allowed, since, scope, meaning, accepts, alias or None))
    return tuple(found)


OPTIONS = _read_options()
_BY_NAME = {o.name: o for o in OPTIONS} | {o.alias: o for o in OPTIONS if o.alias}
_GONE = {"roundup_bypass_threshold_mb": "use roundup_power2_divisions, which has a value for each interval of sizes"}
_DEFAULT = AllocatorConfig()


@lru_cache(maxsize=256)  # because every rule about a trial's allocator parses its text again
def parse(text: str) -> AllocatorConfig:
    """Read PYTORCH_CUDA_ALLOC_CONF; "" gives the defaults.

    As in torch, white space is ignored, empty entries are skipped and the last of two equal options wins.
    Raises AllocatorConfigError naming the option, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    for entry in _entries("".join(text.split())):
        name, colon, value = entry.partition(":")
        option = _BY_NAME.get(name)
        if option is None:
            raise AllocatorConfigError(_unknown(name))
        if not colon or not value:
            raise AllocatorConfigError(f"{name} has no value: write {name}:VALUE, allowed is {option.allowed}")
        values[option.name] = _read(option, value)
    return AllocatorConfig(**values)


# The keys of `allocator_settings` and the options whose value they report (`torch::cuda::_memory_snapshot_pickled`).
_SAME_NAME = (
    "expandable_segments", "release_lock_on_cudamalloc", "pinned_use_cuda_host_register",
    "graph_capture_record_stream_reuse", "pinned_num_register_threads", "garbage_collection_threshold",
    "roundup_power2_divisions",
)  # fmt: skip
_REPORTED = {name: name for name in _SAME_NAME} | {"max_split_size": "max_split_size_mb"}


def reported(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the options whose value `allocator_settings` reports; of the others it only keeps the requested text.

    cudaMallocAsync takes no snapshot, so its settings are empty and only the backend is known.
    """
    return frozenset({"backend"} | {option for key, option in _REPORTED.items() if key in settings})


def from_settings(settings: Mapping[str, Any]) -> AllocatorConfig:
    """Return the settings in force, from `torch.cuda.memory._snapshot()["allocator_settings"]`.

    Options that `reported` names have the value in the snapshot. The others come from the variable's text in the
    snapshot, which proves nothing. Raises AllocatorConfigError on a malformed or unknown entry.
    """
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not isinstance(text, str):
        raise AllocatorConfigError("allocator_settings: PYTORCH_CUDA_ALLOC_CONF is not text")
    return replace(parse(text), **{name: _value(settings, key) for key, name in _REPORTED.items() if key in settings})


def to_settings(config: AllocatorConfig) -> dict[str, Any]:
    """Return `allocator_settings` as torch reports them under this setting: what `from_settings` reads."""
    size, threshold = config.max_split_size_mb, config.garbage_collection_threshold
    return {
        "PYTORCH_CUDA_ALLOC_CONF": config.render(),
        **{key: getattr(config, name) for key, name in _REPORTED.items()},
        "max_split_size": -1 if size is None else size * MIB,
        "garbage_collection_threshold": threshold or 0.0,
        "roundup_power2_divisions": {str(1 << i): n for i, n in enumerate(config.roundup_power2_divisions)},
    }


def _value(settings: Mapping[str, Any], key: str) -> Any:
    """Return one reported setting in the option's own unit."""
    if key == "max_split_size":  # bytes; -1 (all bits set, read as signed) is "no limit"
        size = _typed(settings, key, int)
        return None if size < 0 else size // MIB
    if key == "garbage_collection_threshold":
        return _typed(settings, key, float) or None
    if key == "roundup_power2_divisions":
        table = _typed(settings, key, dict)
        divisions = [table.get(str(1 << i)) for i in range(INTERVALS)]
        if not all(type(d) is int and 0 <= d < 1 << 64 for d in divisions):
            raise AllocatorConfigError("allocator_settings: roundup_power2_divisions is not complete")
        return tuple(divisions)
    return _typed(settings, key, int if key == "pinned_num_register_threads" else bool)


def without_effect(config: AllocatorConfig, *, memory_limited: bool = False) -> list[str]:
    """List the options that have no effect, and what would change that. torch accepts them all the same.

    `memory_limited` says that the process sets a memory limit by other means
    (`torch.cuda.set_per_process_memory_fraction`). Sources: `CUDAAllocatorConfig::parseArgs` for the backend,
    `DeviceCachingAllocator::malloc`, `alloc_block` and `get_free_block` for the rest.
    """
    found: list[str] = []
    chosen = {o.name for o in config.set_options()}
    if config.backend == "cudaMallocAsync":
        idle = [o.name for o in config.set_options() if o.scope == "device"]
        found += [f"{name} has no effect with backend:cudaMallocAsync" for name in idle]
    limited = memory_limited or config.per_process_memory_fraction < 1
    for name in ("garbage_collection_threshold", "throw_on_cudamalloc_oom"):
        if name in chosen and config.backend == "native" and not limited:
            found.append(f"{name} has no effect without a memory limit: set per_process_memory_fraction below 1")
    if config.max_non_split_rounding_mb is not None and config.max_split_size_mb is None:
        found.append("max_non_split_rounding_mb has no effect without max_split_size_mb")
    if "pinned_num_register_threads" in chosen and not config.pinned_use_cuda_host_register:
        found.append("pinned_num_register_threads has no effect without pinned_use_cuda_host_register:True")
    rounding, cached = config.pinned_max_round_threshold_mb, config.pinned_max_cached_size_mb
    if rounding is not None and cached is not None and rounding > cached:
        found.append("pinned_max_round_threshold_mb has no effect, because it is above pinned_max_cached_size_mb")
    return found


def as_simulated(config: AllocatorConfig) -> AllocatorConfig:
    """Return the settings to simulate: expandable segments for cudaMallocAsync, because the driver's own policy is
    closed source, else `config`."""
    if config.backend == "native":
        return config
    return AllocatorConfig(expandable_segments=True, per_process_memory_fraction=config.per_process_memory_fraction)


def estimates(config: AllocatorConfig) -> list[str]:
    """Return the caveats that a prediction under these settings must state."""
    if config.backend == "native":
        return []
    low, high = (f"{100 * end:+.1f}" for end in ASYNC_RESERVED)
    return [
        "cudaMallocAsync is predicted as expandable_segments. On an H100 its peak allocated differed by up to 0.1 MiB, "
        f"its peak reserved by {low} to {high} % (8 pairs)"
    ]


def unknown_options(config: AllocatorConfig, torch_version: str) -> list[str]:
    """List the options that `torch_version` ("2.9.1+cu128") does not know and would refuse."""
    try:
        have = Version(torch_version).release
    except InvalidVersion:
        raise AllocatorConfigError(f"torch version {describe(torch_version)} is not of the form 2.13.0") from None
    new = [o for o in config.set_options() if Version(o.since).release > have]
    return [f"torch {torch_version} does not know {o.name}, which is new in {o.since}" for o in new]


def differences(asked: AllocatorConfig, effective: AllocatorConfig, only: Collection[str] | None = None) -> list[str]:
    """Return a line for each option whose value in force is not the requested one; empty if all took effect.

    `only` names the options to compare, if not all of `effective` is known.
    """
    chosen = (o for o in OPTIONS if only is None or o.name in only)
    both = ((o, getattr(asked, o.name), getattr(effective, o.name)) for o in chosen)
    differ = ((o.name, format_value(o, mine), format_value(o, its)) for o, mine, its in both if mine != its)
    return [f"{name}: requested {mine}, in force {its}" for name, mine, its in differ]


@dataclass(frozen=True)
class ReadBack:
    """The settings in force, in canonical form, as far as torch reports them.

    `mismatch` lists the values that differ from the request, `notes` options that torch does not report or that have
    no effect.
    """

    effective: str
    mismatch: str | None
    notes: list[str]


def read_back(asked: AllocatorConfig, backend: str, settings: Mapping[str, Any]) -> ReadBack:
    """Compare the requested settings with those in force, by a process's `backend` and its snapshot's
    `allocator_settings`. Raises AllocatorConfigError on a malformed entry."""
    effective = replace(from_settings(settings), backend=backend)
    known = reported(settings)
    found = differences(asked, effective, known)
    silent = [option.name for option in asked.set_options() if option.name not in known]
    notes = [f"the {backend} allocator does not report whether these took effect: {', '.join(silent)}"] * bool(silent)
    return ReadBack(effective.render(known), "; ".join(found) or None, notes + without_effect(asked))


def _entries(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]*\])*", text):
        raise AllocatorConfigError("the brackets [ ] do not match: a list is written name:[key:value,key:value]")
    return re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text)


def _read(option: Option, text: str) -> Any:
    match option.kind:
        case "name":
            return text
        case "bool" if text in ("True", "False"):
            return text == "True"
        case "whole number" if (number := _parse_whole(text)) is not None:
            return number
        case "number":
            with suppress(ValueError):
                return float(text)
        case "divisions":
            return _read_divisions(option, text)
    raise _wrong(option, text)


def _read_divisions(option: Option, text: str) -> tuple[int, ...]:
    """Read the divisions of all intervals as `AcceleratorAllocatorConfig::parseRoundUpPower2Divisions` does.

    The first interval's value also fills every smaller one. Intervals not named stay off. `>` fills those above the
    last one named.
    """
    if not text.startswith("["):
        everywhere = _parse_whole(text)
        if everywhere is None or not _power_of_two(everywhere):
            raise _wrong(option, text)
        return (everywhere,) * INTERVALS
    divisions = [0] * INTERVALS
    last = -1
    for entry in filter(None, text.removeprefix("[").removesuffix("]").split(",")):
        key, _, value = entry.partition(":")
        count, interval = _parse_whole(value), _parse_whole(key)
        if count is None:
            raise _wrong(option, text)
        if key == ">":
            divisions[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        if interval is None or not _power_of_two(interval):
            raise _wrong(option, text)
        index = min(interval.bit_length() - 1, INTERVALS - 1)
        if last < 0:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return tuple(divisions)


def _parse_whole(text: str) -> int | None:
    """Return a plain decimal number; None for anything else, and for more digits than any size in MiB can have."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 13 else None


def format_value(option: Option, value: Any) -> str:
    """Return a value as the variable writes it."""
    if value is None:
        return "none"
    if option.kind == "number":
        return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))
    if option.kind != "divisions":
        return str(value)
    if len(set(value)) == 1:
        return str(value[0])
    first = next(i for i in range(len(value)) if value[i + 1] != value[0])  # its value fills all smaller ones
    end = max(i for i, d in enumerate(value) if d != 0)
    return "[" + ",".join(f"{1 << i}:{value[i]}" for i in range(first, max(end, first) + 1)) + "]"


def _wrong(option: Option, text: str) -> AllocatorConfigError:
    return AllocatorConfigError(f"{option.name}:{text[:60]} is not valid: allowed is {option.allowed}")


def _unknown(name: str) -> str:
    if name in _GONE:
        return f"no supported torch has {name}; {_GONE[name]}"
    near = suggestions.find_closest(name, _BY_NAME)
    hint = f"did you mean {near}?" if near else f"options are {', '.join(o.name for o in OPTIONS)}"
    return f"unknown allocator option {name[:60]!r}: {hint}"


def _typed(settings: Mapping[str, Any], name: str, kind: type) -> Any:
    value = settings[name]
    sane = kind is dict or (isinstance(value, (int, float)) and abs(value) < 1 << 64)
    if not sane or not isinstance(value, (kind, int) if kind is float else kind):
        raise AllocatorConfigError(f"allocator_settings: {name} is {describe(value)}, expected {kind.__name__}")
    return value
