"""State of a process that tracing may change, kept: random numbers, modes, hooks, settings, environment, groups.

Other threads of the process must not use torch meanwhile, because operators are replaced (runners/trace).
"""

import contextlib
import itertools
import logging
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.runners.measure.patches import patched


def _read_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # backends have precisions of their own, of which it knows none
        return None


def _restore_precision(found: str | None) -> None:
    if found not in (None, _read_precision()):  # because it sets those of all backends
        torch.set_float32_matmul_precision(found)


# Functions that read and restore a setting of torch.
SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.random.get_rng_state, torch.random.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),  # has warn_only, too
    (_read_precision, _restore_precision),
    (random.getstate, random.setstate),
)
_TABLES = ("_pg_map", "_pg_names", "_pg_group_ranks", "_pg_backend_config", "_pg_to_tag", "_tags_to_pg")
_LOG = logging.getLogger("torch._subclasses.fake_tensor")  # prints the traceback of a user's mistake, which we raise


@contextlib.contextmanager
def kept_state(groups: bool) -> Iterator[None]:
    """Enter with torch's modes and global hooks off and gradients on; leave all as it was, also after an error.

    With `groups`, process groups can be made inside, as if there were none.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(mock.patch.object(_LOG, "disabled", True))
        for read, restore in _settings():
            stack.callback(restore, read())
        if groups:
            stack.enter_context(_other_groups())
        hooks = [name for name, one in vars(modules).items() if name.startswith("_global_") and isinstance(one, dict)]
        stack.enter_context(patched((modules, name, OrderedDict()) for name in hooks))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(_no_autocast())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    yield from SETTINGS
    if (numpy := sys.modules.get("numpy")) is not None:
        yield numpy.random.get_state, numpy.random.set_state
    if torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    else:  # a seed would wait there for the GPU
        calls: list[Any] = torch.cuda._queued_calls
        yield calls.copy, lambda found: calls.__setitem__(slice(None), found)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Leave all autocasts, because only the outermost clears its cast weights."""
    on, depth = torch.is_autocast_enabled("cpu"), torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", on)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


@contextlib.contextmanager
def _other_groups() -> Iterator[None]:
    """Set the user's process groups aside; groups made inside have names of their own, and are forgotten at the end."""
    numbers, made = itertools.count(), list[str]()
    library: Any = c10d
    register = library._register_process_group

    def name(*ranks: Any, **options: Any) -> str:
        return f"vramsweep estimate {next(numbers)}"

    def note(group_name: Any, group: Any) -> None:
        made.append(group_name)
        register(group_name, group)

    kept, count = c10d._world.default_pg, c10d._world.group_count
    replaced: list[Any] = [(c10d, table, {}) for table in _TABLES]
    replaced += [(c10d, "_process_group_name", name), (c10d, "_register_process_group", note)]
    replaced += [(c10d, "_unregister_all_process_groups", lambda: None), (c10d, "_default_pg_init_method", None)]
    with patched(replaced):
        c10d._update_default_pg(None)
        try:
            yield
        finally:
            for one in made:
                library._unregister_process_group(one)
            c10d._update_default_pg(kept)
            c10d._world.group_count = count
