"""What a traced run's streams and events do, and `record_stream`, noted for runners/trace/stream_lag.py.

The streams are torch.cpu's, which are only told apart; a library is given them in the place of CUDA's.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from vramsweep.runners.trace import step_tracer


def replaced(tracer: step_tracer.Tracer) -> list[tuple[Any, str, Any]]:
    """What streams and events are replaced by so that the tracer takes note: owner, name, stand-in.

    An event is never found to have passed, as on a card that is behind: who asks then waits for it.
    """
    tracer.noting = True
    numbers: dict[int, int] = {}
    counter = itertools.count()
    kept: list[Any] = []  # so that no other event gets the same id

    def here(stream: Any = None) -> int:
        return tracer.stream(torch.cpu.current_stream() if stream is None else stream)

    def record(event: Any, stream: Any = None) -> None:
        kept.append(event)
        numbers[id(event)] = next(counter)  # events are recorded again, and mean the last time
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
