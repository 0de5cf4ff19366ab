"""DeepSpeed's ZeRO."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from deepspeed.runtime.zero.partition_parameters import Init

from vramsweep.harness.trial import Trial


@contextlib.contextmanager
def linear_by_init(trial: Trial) -> Iterator[None]:
    """A model that exists already keeps torch's own linear layers when it is divided."""
    original = Init.__init__

    @functools.wraps(original)
    def init(self: Any, module: Any = None, *args: Any, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:
            if module is not None:
                stack.enter_context(mock.patch.object(Init, "_enable_mem_efficient_linear", lambda self: None))
            original(self, module, *args, **kwargs)

    with mock.patch.object(Init, "__init__", init):
        yield
