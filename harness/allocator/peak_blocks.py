"""The largest blocks at the peak of a recording, and the lines of Python that requested them.

A recording keeps the stack of each request but not its purpose, so categories are unknown here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vramsweep.harness.allocator.initial_state import Start
from vramsweep.harness.allocator.recording import Recording

LARGEST, LONGEST = 10, 2048  # entries listed; characters kept of a frame's file and name
TORCH = re.compile(r"(^|/)(site|dist)-packages/(torch|einops)/|^<frozen |^torch/")
LAYERS = re.compile(r"/torch/nn/modules/(?!module\.py|container\.py)(\w+)\.py$")
_AUTOGRAD = re.compile(r"\btorch::autograd::generated::(?:details::)?(\w+)::apply")

_OTHERS = re.compile(r"\b(torch_npu|torch_mlu|torch_musa|torch_xla|c10_npu|at_npu)(?:/|\\|::)")


@dataclass(frozen=True)
class Holder:
    """Blocks of one size, live at the peak, that the same line requested; `bytes` is the requested size of each.

    `where` is None if the recording has no stack of the request, or none that names a line.
    """

    bytes: int
    count: int
    where: str | None


@dataclass(frozen=True)
class Holders:
    """The recorded peak of allocated memory, after `event` events; `largest`, `rest` and `rounding` sum to it.

    The ten largest blocks are among `largest`; blocks of the same line and size are one entry. `unknown` is the bytes
    of all blocks whose line is unknown.
    """

    event: int
    allocated: int
    largest: tuple[Holder, ...]
    rest: int
    rest_count: int
    rounding: int
    unknown: int


def live_blocks(recording: Recording, start: Start, event: int) -> dict[int, tuple[int, int | None, Any]]:
    """Return the blocks that are live after `event` events: by address, requested bytes, event (None: earlier), stack.

    A stack is as the file has it, None if unknown.
    """
    live: dict[int, tuple[int, int | None]] = {}
    for segment in start.segments:
        live |= {piece.addr: (piece.requested, None) for piece in segment.pieces if piece.state == "live"}
    for index in range(start.first, event):
        action, addr, size, _ = recording.events[index]
        if action == "alloc":
            live[addr] = size, index
        elif action == "free_requested":
            live.pop(addr, None)
    freed = {addr for action, addr, _, _ in recording.events if action == "free_requested"}
    lasting = {addr: recording.held.get(addr) for addr in live.keys() - freed}  # for blocks from before the recording
    return {
        addr: (size, made, lasting.get(addr) if made is None else recording.stacks.get(made))
        for addr, (size, made) in live.items()
    }


def find_live(recording: Recording, start: Start, event: int) -> list[Holder]:
    """Return the blocks that were live after `event` events, by size and line, the largest blocks first."""
    places: dict[int, str | None] = {}  # by id of the frames, because blocks share them
    counts: dict[tuple[int, str | None], int] = {}
    for size, _, frames in live_blocks(recording, start, event).values():
        where = places[id(frames)] if id(frames) in places else places.setdefault(id(frames), innermost_frame(frames))
        counts[size, where] = counts.get((size, where), 0) + 1
    every = [Holder(size, count, where) for (size, where), count in counts.items()]
    every.sort(key=lambda one: (-one.bytes, -one.count, one.where or ""))
    return every


def at_peak(recording: Recording, start: Start, event: int, allocated: int) -> Holders:
    """Return the blocks that were live after `event` events, when `allocated` bytes were allocated."""
    every = find_live(recording, start, event)
    rest = every[LARGEST:]
    return Holders(
        event,
        allocated,
        tuple(every[:LARGEST]),
        sum(one.bytes * one.count for one in rest),
        sum(one.count for one in rest),
        allocated - sum(one.bytes * one.count for one in every),
        sum(one.bytes * one.count for one in every if one.where is None),
    )


def innermost_frame(frames: Any) -> str | None:
    """Return the innermost line outside torch with its function, `model.py:101 forward`, and torch's layer in it.

    A backward pass run by autograd's engine has no such line; then return the autograd node if the stack has C++ in it.
    `frames` come from a file; return None if they are not a stack.
    """
    layer = ""
    stack = list(read_frames(frames))
    for path, line, name in stack:
        path = path.replace("\\", "/")
        if not path.endswith(".py"):
            continue
        if not TORCH.search(path):
            return f"{'/'.join(path.split('/')[-3:])}:{line} {name}{layer}"
        if not layer and (found := LAYERS.search(path)) is not None:
            layer = f" (torch.nn.modules.{found[1]})"
    nodes = (f"{found[1]} (backward)" for _, _, name in stack if (found := _AUTOGRAD.search(name)) is not None)
    return next(nodes, None)


def find_vendor_library(recording: Recording) -> str | None:
    """Return the library of another vendor's devices that the first thousand stacks name; None if they name none."""
    stacks = {id(frames): frames for frames in (*recording.stacks.values(), *recording.held.values())}
    frames = (frame for stack in islice(stacks.values(), 1000) for frame in read_frames(stack))
    return next((found[1] for path, _, name in frames if (found := _OTHERS.search(f"{path} {name}"))), None)


def read_frames(frames: Any) -> Iterable[tuple[str, int, str]]:
    """Yield file, line and function of each frame of a stack, the innermost first; nothing of what is no stack."""
    for frame in frames if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            path, line, name = frame.get("filename"), frame.get("line"), frame.get("name")
            if isinstance(path, str) and isinstance(line, int) and isinstance(name, str) and abs(line) < 1 << 32:
                yield path[:LONGEST], line, name[:LONGEST]
