"""The state of a recorded allocator when a request failed: who has the memory, and what would have served the request.

A block's category follows from the stack of its request, or from the annotation around it (`record_function`). Without
either it is unknown.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vramsweep.harness.allocator.config import MIB, AllocatorConfig, parse
from vramsweep.harness.allocator.initial_state import Start, undo
from vramsweep.harness.allocator.oom_message import AFTER_BACKWARD
from vramsweep.harness.allocator.peak_blocks import LAYERS, TORCH, innermost_frame, live_blocks, read_frames
from vramsweep.harness.allocator.recording import Recording, Segment, check
from vramsweep.harness.allocator.replay import replay_as_recorded, replay_under
from vramsweep.harness.allocator.settings_grid import grid
from vramsweep.harness.allocator.sizes import SMALL_REQUEST, SMALL_SEGMENT, round_request, round_up, segment_size

OPTIMIZER, STATES, PARAMETERS, BACKWARD, FORWARD, UNKNOWN = (
    "optimizer (states and step)", "optimizer states", "parameters", "gradients and backward", "activations", "unknown",
)  # fmt: skip
# The first that matches a frame decides, from the innermost frame outwards.
_RULES = (
    (OPTIMIZER, AFTER_BACKWARD),
    (PARAMETERS, re.compile(
        r"/torch/nn/modules/module\.py:(_apply|convert|to|cuda|load_state_dict|_load_from_state_dict)$"
        r"|/torch/nn/modules/\w+\.py:(__init__|reset_parameters)$|/torch/nn/parameter\.py:"
        r"|/transformers/.*:(from_pretrained|_load\w*)$|/fsdp/.*:\w*(unshard|all_gather)\w*$"
    )),
    (BACKWARD, re.compile(
        r":_engine_run_backward$|/torch/_tensor\.py:backward$|/torch/autograd/__init__\.py:(backward|grad)$"
        r"|:torch::autograd::(Engine|AccumulateGrad|generated::\w+Backward|generated::details)"
    )),
    (FORWARD, re.compile(r":forward$|/torch/nn/(functional\.py:\w+|modules/module\.py:_(wrapped_)?call_impl)$")),
)  # fmt: skip
_NAMES = ((OPTIMIZER, "optimizer.step"), (BACKWARD, "backward"), (FORWARD, "forward"))  # in annotations
MOST_ANNOTATIONS = 2000


@dataclass(frozen=True)
class OomState:
    """State of one device at its first failed request; without one, at the peak of allocated memory, or at the end.

    Sizes are bytes. `why` says why this device, `others` describes the rest. `event` counts the events before it;
    `request`, `device_free` and `largest_free` (in the pool of the request) are None if no request failed. `needed` is
    the least reserved memory that would have served it. `own_limit`: the GPU had enough, so a limit of the process
    refused. The dicts give the allocated bytes by category, line of code, module and annotation, the largest first;
    `parts` gives those of a line by category too.
    """

    recording: Recording
    start: Start
    why: str
    others: tuple[str, ...]
    event: int
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
    categories: dict[str, int]
    lines: dict[tuple[str, str], int]
    modules: dict[str, int]
    annotations: dict[str, int]


def find_state(snapshot: Any, name: str, device: int | None = None) -> OomState:
    """Return the state of an unpickled snapshot's device that failed first. Raises RecordingError."""
    device, why, others = choose_device(snapshot, device)
    recording = check(snapshot, name, device, any_device=True)
    start = undo(recording)
    events = recording.events
    failed = next((index for index, event in enumerate(events) if event[0] == "oom"), None)
    if failed is not None:
        event, at = failed, "failed request"
    elif len(events) > 1:
        holders = replay_as_recorded(recording, start).holders
        event, at = 0 if holders is None else holders.event, "peak"
    else:
        event, at = len(events), "final state"
    spans = undo(replace(recording, events=events[event:], times=None)).segments
    pieces = [piece for span in spans for piece in span.pieces]
    sizes = {piece.addr: piece.size for piece in pieces if piece.state == "live"}
    annotations = _annotations(snapshot, recording.device)
    request = round_request(events[failed][2], recording.settings.roundup_power2_divisions) if failed is not None else 0
    cause = recording.events[max(event - (failed is None), 0)] if events else None
    frames = _frames_at(snapshot, recording.device, failed) if failed is not None else recording.stacks.get(event - 1)
    moment = recording.times[min(event, len(events) - 1)] if recording.times else None
    category = categorize(frames, around := _around(annotations, moment))
    of = [
        (sizes.get(addr, size), _describe(frames, recording, made, annotations))
        for addr, (size, made, frames) in live_blocks(recording, start, event).items()
    ]
    if category != OPTIMIZER and (annotations or any(read_frames(frames))):  # of past steps only the states are left
        of = [(size, (STATES if kind == OPTIMIZER else kind, *rest)) for size, (kind, *rest) in of]
    reserved = sum(piece.size for piece in pieces if piece.state != "unmapped")
    serving = _serving(spans, request, events[failed][3]) if failed is not None else []
    free = None if failed is None else events[failed][1]
    more = _growth(request, serving, recording.settings) if failed is not None else None
    return OomState(
        recording, start, why, others, event, at, request if failed is not None else None,
        innermost_frame(frames) if cause else None, category, around, free, sum(sizes.values()), reserved,
        None if failed is None else max((p.size for s in serving for p in s.pieces if p.state == "free"), default=0),
        None if more is None else reserved + more, free is not None and more is not None and free >= more,
        _sum(of, lambda one: one[0]), _sum(of, lambda one: (one[0], one[1])), _sum(of, lambda one: one[2]),
        _sum(of, lambda one: one[3]),
    )  # fmt: skip


def choose_device(snapshot: Any, device: int | None = None) -> tuple[int, str, tuple[str, ...]]:
    """Return the device to look at, why, and a text for each other: the first to fail, else the most allocated."""
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else None
    failed: dict[int, float] = {}
    for number, trace in enumerate(traces if isinstance(traces, list) else ()):
        entries = [one for one in trace if isinstance(one, dict)] if isinstance(trace, list) else []
        if (first := next((one for one in entries if one.get("action") == "oom"), None)) is not None:
            failed[number] = first["time_us"] if type(first.get("time_us")) is int else float("inf")
    allocated: Counter[int] = Counter()
    for one in segments if isinstance(segments, list) else ():
        if isinstance(one, dict) and type(one.get("device")) is int and type(one.get("allocated_size")) is int:
            allocated[one["device"]] += one["allocated_size"]
    found = {*failed, *allocated, *(n for n, trace in enumerate(traces if isinstance(traces, list) else ()) if trace)}
    if device is None:
        by_bytes = max(found, key=lambda one: (allocated[one], -one), default=0)
        device = min(failed, key=lambda one: (failed[one], one)) if failed else by_bytes
        why = "its request failed first" if len(failed) > 1 else "its request failed"
        why = why if failed else "it has most memory allocated" if len(found) > 1 else "it is the only one"
    else:
        why = "--device names it"
    texts = {n: f"{n}{' (a request failed)' * (n in failed)}" for n in sorted(found - {device})}
    return device, why, tuple(texts.values())


def try_settings(state: OomState, hear: Callable[[str], None] = lambda text: None) -> dict[str, bool] | None:
    """Return for the recorded settings ("") and each of the grid whether a replay serves the failed request.

    The limit is the memory that the process could have: its reserved and the free. Under a limit of its own that is
    unknown; then it is the most that it ever reserved. None if no request failed.
    """
    if state.request is None or state.device_free is None:
        return None
    recording, start, event = state.recording, state.start, state.event
    limit = state.reserved + state.device_free
    if state.own_limit:
        limit = max(state.reserved, replay_as_recorded(recording, start).peak_reserved or 0)
    address = max((addr + size for _, addr, size, _ in recording.events), default=0) + (1 << 50)
    failed = ("alloc", address, recording.events[event][2], recording.events[event][3])
    cut = replace(recording, events=[*recording.events[:event], failed], times=None)
    begun = replace(start, private=[*start.private[:event], 0] if start.private else [])
    own = replace(recording.settings, per_process_memory_fraction=1.0, throw_on_cudamalloc_oom=False)
    configs: dict[str, AllocatorConfig] = {"": own} | {text: parse(text) for text in grid(True)}
    served = {}
    for number, (text, config) in enumerate(configs.items(), 1):
        hear(f"replaying under setting {number} of {len(configs)}")
        served[text] = replay_under(cut, begun, config, limit).out_of_memory is None
    return served


def categorize(frames: Any, annotation: str | None = None) -> str:
    """Return the category of a block by the stack of its request, else by the annotation around it."""
    for path, _, name in read_frames(frames):
        frame = f"{path}:{name}".replace("\\", "/")
        if (found := next((kind for kind, rule in _RULES if rule.search(frame)), None)) is not None:
            return found
    named = (annotation or "").lower()
    return next((kind for kind, word in _NAMES if word in named), UNKNOWN)


def _describe(frames: Any, recording: Recording, made: int | None, annotations: Sequence[tuple[int, int, str]]) -> Any:
    """Return category, line, module and annotation of a block."""
    around = _around(annotations, recording.times[made]) if recording.times and made is not None else None
    layer, module = "", "unknown"
    for path, _, name in read_frames(frames):
        path = path.replace("\\", "/")
        layer = layer or (f" {found[1]}" if (found := LAYERS.search(path)) is not None else "")
        if name == "forward" and not TORCH.search(path):
            module = f"{path.rpartition('/')[2]}{layer}"
            break
    return categorize(frames, around), innermost_frame(frames) or "unknown", module, around or "none"


def _sum(of: Iterable[tuple[int, Any]], key: Callable[[Any], Any]) -> dict[Any, int]:
    found: Counter[Any] = Counter()
    for size, about in of:
        found[key(about)] += size
    return dict(sorted(found.items(), key=lambda one: (-one[1], str(one[0]))))


def _annotations(snapshot: Any, device: int) -> list[tuple[int, int, str]]:
    """Return start, end and name of the device's annotated stretches; an open one has no end."""
    raw = snapshot.get("external_annotations")
    begun: dict[str, list[int]] = {}
    found: list[tuple[int, int, str]] = []
    for one in raw if isinstance(raw, list) else ():
        name, at = (one.get("name"), one.get("time_us")) if isinstance(one, dict) else (None, None)
        if not isinstance(name, str) or type(at) is not int or one.get("device") != device:
            continue
        if one.get("stage") == "START":
            begun.setdefault(name, []).append(at)
        elif begun.get(name):
            found.append((begun[name].pop(), at, name))
    found += [(at, 1 << 62, name) for name, starts in begun.items() for at in starts]
    return sorted(found)[-MOST_ANNOTATIONS:]


def _around(annotations: Sequence[tuple[int, int, str]], moment: int | None) -> str | None:
    """Return the innermost annotation around a moment."""
    return next((name for at, end, name in reversed(annotations) if moment is not None and at <= moment <= end), None)


def _frames_at(snapshot: Any, device: int, failed: int) -> Any:
    kept = [one for one in snapshot["device_traces"][device] if one["action"] != "snapshot"]
    return kept[failed].get("frames")


def _serving(spans: Sequence[Segment], request: int, stream: int) -> list[Segment]:
    """Return the segments whose free blocks could serve a request: those of its stream and pool, none private."""
    small = request <= SMALL_REQUEST
    return [one for one in spans if (one.small, one.stream, one.private) == (small, stream, 0)]


def _growth(request: int, serving: Sequence[Segment], config: AllocatorConfig) -> int:
    """Return the bytes that the allocator must reserve more to serve a request."""
    if not config.expandable_segments:
        return segment_size(request, config.large_segment_size_mb * MIB)
    page = SMALL_SEGMENT if request <= SMALL_REQUEST else config.large_segment_size_mb * MIB
    tails = [
        left.size
        for one in serving
        for left, right in zip(one.pieces, one.pieces[1:], strict=False)
        if left.state == "free" and right.state == "unmapped"
    ]
    return round_up(request - min(request, max(tails, default=0)), page)
