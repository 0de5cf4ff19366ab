"""Which kernel of torch's serves a call of scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from vramsweep.harness.trial import Trial
from vramsweep.runners import attention


def flash_first(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """cuDNN's comes last on every card."""
    return mock.patch.object(attention, "CUDNN_FIRST", False)


def any_dropout(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """cuDNN's takes every probability of dropout."""
    return mock.patch.object(attention, "IN_SIXTEENTHS", False)
