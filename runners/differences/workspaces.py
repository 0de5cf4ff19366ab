"""Where torch's handles of CUDA libraries keep their workspaces."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

from vramsweep.harness.trial import Trial
from vramsweep.runners import allocations


def lt_apart(trial: Trial) -> contextlib.AbstractContextManager[Any]:
    """cuBLASLt's have their own."""
    return mock.patch.object(allocations, "LT_APART", True)
