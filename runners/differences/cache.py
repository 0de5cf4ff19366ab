"""The key-value cache while the Trainer of transformers trains."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from transformers import Trainer

from vramsweep.harness.trial import Trial


def left_on(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """The Trainer leaves it as the model's configuration has it: on."""
    original = Trainer.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(getattr(self.model, "config", None), "use_cache", None) is not None:
            self.model.config.use_cache = True

    return mock.patch.object(Trainer, "__init__", init)
