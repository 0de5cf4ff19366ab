"""Replacements by which the tracer records streams, events and `record_stream` (for runners/trace/stream_lag.py).

A library gets torch.cpu's streams in place of CUDA's; they can only be told apart.
"""

import itertools
from typing import Any

import torch

from vramsweep.runners.trace import step_tracer


def replaced(tracer: step_tracer.Tracer) -> list[tuple[Any, str, Any]]:
    """Return replacements (owner, name, stand-in) with which the tracer records what streams and events do.

    An event never reports that it has passed, as on a GPU that is behind, so the caller waits for it.
    """
    tracer.noting = True
    numbers: dict[int, int] = {}
    counter = itertools.count()
    kept: list[Any] = []  # so that no other event gets the same id

    def here(stream: Any = None) -> int:
        return tracer.stream(torch.cpu.current_stream() if stream is None else stream)

    def record(event: Any, stream: Any = None) -> None:
        kept.append(event)
        numbers[id(event)] = next(counter)  # an event can be recorded again; the last time counts
        tracer.note("record", numbers[id(event)], here(stream))

    def record_event(stream: Any, event: Any = None) -> Any:
        event = torch.cpu.Event() if event is None else event
        record(event, stream)
        return event

    def of(event: Any) -> int:
        return numbers.get(id(event), -1)

    return [
        (torch.cpu.Stream, "wait_stream", lambda self, other: tracer.note("wait", here(self), here(other))),
        (torch.cpu.Stream, "wait_event", lambda self, event: tracer.note("await", here(self), of(event))),
        (torch.cpu.Stream, "record_event", record_event),
        (torch.cpu.Stream, "synchronize", lambda self: tracer.note("join", here(self))),
        (torch.cpu.Event, "record", record),
        (torch.cpu.Event, "query", lambda self: False),
        (torch.cpu.Event, "synchronize", lambda self: tracer.note("sync", of(self))),
        (torch.cpu.Event, "wait", lambda self, stream=None: tracer.note("await", here(stream), of(self))),
        (torch.Tensor, "record_stream", lambda self, stream: tracer.used(self, here(stream))),
    ]
