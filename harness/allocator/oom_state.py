"""The state of a recorded allocator when a request failed: who has the memory, and what would have served the request.

A block's category follows from the stack of its request, or from the annotation around it (`record_function`). Without
either it is unknown.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from vramsweep.harness.allocator.blocks import SMALL_REQUEST, SMALL_SEGMENT, round_request, round_up, segment_size
from vramsweep.harness.allocator.config import MIB, AllocatorConfig, parse
from vramsweep.harness.allocator.initial_state import Start, undo
from vramsweep.harness.allocator.oom_message import AFTER_BACKWARD, PATTERNS
from vramsweep.harness.allocator.peak_blocks import LAYERS, TORCH, innermost_frame, live_blocks, read_frames
from vramsweep.harness.allocator.recording import Recording, RecordingError, Segment, check_every
from vramsweep.harness.allocator.replay import grid, replay_as_recorded, replay_under, without_limits

OPTIMIZER, STATES, PARAMETERS, BACKWARD, FORWARD, UNKNOWN = (
    "optimizer (states and step)", "optimizer states", "parameters", "gradients and backward", "activations", "unknown",
)  # fmt: skip
# The first that matches a frame decides, from the innermost frame outwards.
_PATTERNS: dict[str, str] = {kind: "|".join(several) for kind, several in PATTERNS["phases"].items()}
_RULES = ((OPTIMIZER, AFTER_BACKWARD), *((kind, re.compile(text)) for kind, text in _PATTERNS.items()))
_NAMES = ((OPTIMIZER, "optimizer.step"), (BACKWARD, "backward"), (FORWARD, "forward"))  # in annotations
RECOMPUTED = "recomputed activations"
_RECOMPUTES = re.compile(r"/torch/utils/checkpoint\.py:(unpack_hook|backward)$")
NO_LINE = "no line of Python is recorded"


@dataclass(frozen=True)
class OomState:
    """State of one device at its first failed request; without one, at the peak of allocated memory, or at the end.

    Sizes are bytes. `why` says why this device, `others` describes the rest. `request`, `device_free`, `largest_free`
    (in the pool of the request), `needed`, the least reserved memory that would have served it, and `served` (see
    `try_settings`) are None if no request failed. `own_limit`: the GPU had enough, so a limit of the process refused.
    The dicts give the allocated bytes by category, line of code, module and annotation, the largest first.
    """

    device: int
    why: str
    others: list[str]
    at: str
    request: int | None
    where: str | None
    category: str
    annotation: str | None
    device_free: int | None
    allocated: int
    reserved: int
    largest_free: int | None
    needed: int | None
    own_limit: bool
    served: dict[str, bool] | None
    categories: dict[str, int]
    lines: dict[str, int]
    modules: dict[str, int]
    annotations: dict[str, int]


def find_state(
    snapshot: Any, name: str, device: int | None = None, hear: Callable[[str], None] = lambda text: None
) -> OomState:
    """Return the state of an unpickled snapshot's device that failed first. Raises RecordingError.

    `hear` gets a text before each replay.
    """
    recording, why, others = choose_device(check_every(snapshot, name), name, device)
    start, events, times = undo(recording), recording.events, recording.times
    failed = _first_failed(recording)
    event, at = len(events), "final state"
    if failed is not None:
        event, at = failed, "failed request"
    elif len(events) > 1 and (holders := replay_as_recorded(recording, start).holders) is not None:
        event, at = holders.event, "peak"
    spans = undo(replace(recording, events=events[event:], times=None)).segments
    pieces = [piece for span in spans for piece in span.pieces]
    sizes = {piece.addr: piece.size for piece in pieces if piece.state == "live"}
    reserved = sum(piece.size for piece in pieces if piece.state != "unmapped")
    request, free, largest_free, needed, served, own_limit = None, None, None, None, None, False
    if failed is not None:
        _, free, requested, stream = events[failed]
        request = round_request(requested, recording.settings.roundup_power2_divisions)
        largest_free, more = _room(spans, request, stream, recording.settings)
        needed, own_limit = reserved + more, free >= more
        served = try_settings(recording, start, event, None if own_limit else reserved + free, hear)
    changes = _annotations(snapshot, recording.device)
    frames = recording.stacks.get(event if failed is not None else event - 1)
    around = _around(changes, times[min(event, len(events) - 1)] if times else None)
    category = categorize(frames, around)
    only_states = category != OPTIMIZER and bool(changes or any(read_frames(frames)))  # what past steps left
    predicted = snapshot["device_traces"][recording.device] if recording.simulated else []  # with categories
    sums: tuple[Counter[str], ...] = (Counter(), Counter(), Counter(), Counter())
    for addr, (size, made, stack) in live_blocks(recording, start, event).items():
        within = _around(changes, times[made] if times and made is not None else None)
        named = predicted[made].get("category") if predicted and made is not None else None
        kind = named.replace("_", " ") if isinstance(named, str) else categorize(stack, within)
        kind = STATES if kind == OPTIMIZER and only_states else kind
        keys = (kind, f"{kind}, {innermost_frame(stack) or NO_LINE}", find_module(stack), within or "none")
        for counts, key in zip(sums, keys, strict=True):
            counts[key] += sizes.get(addr, size)
    return OomState(
        recording.device, why, others, at, request, innermost_frame(frames), category, around, free,
        sum(sizes.values()), reserved, largest_free, needed, own_limit, served,
        *(dict(counts.most_common()) for counts in sums),
    )  # fmt: skip


def choose_device(
    recordings: Sequence[Recording], name: str, device: int | None = None
) -> tuple[Recording, str, list[str]]:
    """Return the device to look at, why, and a text for each other: the first to fail, else the most allocated.

    Raises RecordingError if there is no such device.
    """
    found = [one for one in recordings if one.events or one.segments] or list(recordings[:1])
    failed = {one.device: at for one in found if (at := _first_failed(one)) is not None}

    def rank(one: Recording) -> tuple[bool, float]:
        if one.device in failed:
            return False, one.times[failed[one.device]] if one.times else float("inf")
        return True, -sum(piece.size for span in one.segments for piece in span.pieces if piece.state == "live")

    chosen = next((one for one in sorted(found, key=rank) if device in (None, one.device)), None)
    if chosen is None:
        known = ", ".join(str(one.device) for one in found) or "none"
        raise RecordingError(f"{name} has no {'' if device is None else f'device {device} among its '}devices: {known}")
    why = f"its request failed{' first' * (len(failed) > 1)}" if failed else "it has most memory allocated"
    others = [f"{one.device}{' (a request failed)' * (one.device in failed)}" for one in found if one is not chosen]
    return chosen, why if device is None else "--device names it", others


def try_settings(
    recording: Recording, start: Start, failed: int, limit: int | None, hear: Callable[[str], None]
) -> dict[str, bool]:
    """Return for the recorded settings ("") and each of the grid whether a replay serves the request of event `failed`.

    `limit` is the memory that the process could have: its reserved and the free. Under a limit of its own that is
    unknown (None); then it is the most that it ever reserved.
    """
    limit = replay_as_recorded(recording, start).peak_reserved if limit is None else limit
    _, _, size, stream = recording.events[failed]
    address = max((addr + size for _, addr, size, _ in recording.events), default=0) + (1 << 50)
    cut = replace(recording, events=[*recording.events[:failed], ("alloc", address, size, stream)], times=None)
    begun = replace(start, private=[*start.private[:failed], 0] if start.private else [])
    configs = {"": without_limits(recording.settings)} | {text: parse(text) for text in grid(True)}
    served = {}
    for number, (text, config) in enumerate(configs.items(), 1):
        hear(f"replaying under setting {number} of {len(configs)}")
        served[text] = replay_under(cut, begun, config, limit).out_of_memory is None
    return served


def categorize(frames: Any, annotation: str | None = None) -> str:
    """Return the category of a block by the stack of its request, else by the annotation around it."""
    stack = [f"{path}:{name}".replace("\\", "/") for path, _, name in read_frames(frames)]
    for frame in stack:
        if (found := next((kind for kind, rule in _RULES if rule.search(frame)), None)) is not None:
            return RECOMPUTED if found == FORWARD and any(map(_RECOMPUTES.search, stack)) else found
    named = (annotation or "").lower()
    return next((kind for kind, word in _NAMES if word in named), UNKNOWN)


def find_module(frames: Any) -> str:
    """Return the file of the innermost forward function outside torch, and torch's layer in it; else unknown."""
    layer = ""
    for path, _, name in read_frames(frames):
        path = path.replace("\\", "/")
        layer = layer or (f" {found[1]}" if (found := LAYERS.search(path)) is not None else "")
        if name == "forward" and not TORCH.search(path):
            return f"{path.rpartition('/')[2]}{layer}"
    return UNKNOWN


def _first_failed(recording: Recording) -> int | None:
    return next((index for index, event in enumerate(recording.events) if event[0] == "oom"), None)


def _annotations(snapshot: Any, device: int) -> list[tuple[int, str | None]]:
    """Return the moments at which the innermost annotation of the device changes, and its name from then on."""
    raw = snapshot.get("external_annotations")
    inside: list[str] = []
    found: list[tuple[int, str | None]] = []
    for one in raw if isinstance(raw, list) else ():
        name, at = (one.get("name"), one.get("time_us")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or type(at) is not int or one.get("device") != device:
            continue
        if one.get("stage") == "START":
            inside.append(name)
        elif name in inside:
            del inside[len(inside) - 1 - inside[::-1].index(name) :]
        found.append((at, inside[-1] if inside else None))
    return found


def _around(changes: Sequence[tuple[int, str | None]], moment: int | None) -> str | None:
    """Return the innermost annotation around a moment."""
    at = 0 if moment is None else bisect_right(changes, moment, key=lambda one: one[0])
    return changes[at - 1][1] if at else None


def _room(spans: Sequence[Segment], request: int, stream: int, config: AllocatorConfig) -> tuple[int, int]:
    """Return the largest free block that could serve a request, and the bytes to reserve more for it.

    Free blocks serve requests of their stream and pool, none of a private one.
    """
    small = request <= SMALL_REQUEST
    serving = [one.pieces for one in spans if (one.small, one.stream, one.private) == (small, stream, 0)]
    largest = max((piece.size for pieces in serving for piece in pieces if piece.state == "free"), default=0)
    large = config.large_segment_size_mb * MIB
    if not config.expandable_segments:
        return largest, segment_size(request, large)
    pairs = (pair for pieces in serving for pair in pairwise(pieces))
    tails = [left.size for left, right in pairs if (left.state, right.state) == ("free", "unmapped")]
    return largest, round_up(request - min(request, max(tails, default=0)), SMALL_SEGMENT if small else large)
