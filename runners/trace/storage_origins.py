"""The origin of a storage: the module in whose forward pass an operator runs, or whose operator a backward pass undoes,
and the source line that called the operator.

In a forward pass, hooks on every module keep a stack of paths. A backward pass gets no hooks, because they would change
its graph. Instead each autograd node has a sequence number; the numbers at which modules were entered and left give its
module. A path is the one in named_modules of the outermost module, without modules that only wrap another. The
outermost module itself goes by the name of its class, and code outside every module by "".

A line is that of the innermost frame whose code is neither torch's, Python's own nor ours. In a backward pass it is the
line of the forward operator that made the node, found by sequence numbers too: an operator's node exists when the
operator is dispatched. Lines of a runner's own loop are "".
"""

import contextlib
import sys
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import checkpoint

from vramsweep.runners.measure.patches import patched
from vramsweep.runners.trace.trace_data import AGAIN, Maker

# Classes, by the package of their code, whose only child is the module that they stand for.
WRAPPERS = {
    "torch": ("DistributedDataParallel", "FullyShardedDataParallel", "ActivationWrapper", "OptimizedModule"),
    "deepspeed": ("DeepSpeedEngine",),
    "peft": ("PeftModel", "BaseTuner"),
}
OPTIMIZER = "optimizer"
OURS = Path(__file__).parents[2]
# The rooms that call the model or the user's code; frames outside them are of a worker, or of a caller of ours.
DRIVERS = tuple(f"{OURS}/runners/{room}/" for room in ("loops", "predict", "symbolic", "worker"))
NOT_USERS = (f"{OURS}/", f"{Path(torch.__file__).parent}/", "<")
PYTHONS = sysconfig.get_path("stdlib")


class Origins:
    """Finds the module and operator that request memory now (`maker`); valid inside `watch`."""

    def __init__(self) -> None:
        self._paths: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._owners: dict[int, ref[torch.nn.Module]] = {}  # by the parameter's id
        self._stack: list[tuple[int, str, int]] = []  # a module's id, its path, the backward pass that it runs in
        self._numbers: list[int] = [0]  # from this sequence number on,
        self._makers: list[str] = [""]  # nodes are this module's
        self._ends: list[int] = [torch._C._autograd._get_sequence_nr()]  # before this sequence number,
        self._lines: list[str] = [""]  # and from the one before on, nodes are this line's
        self._optimizers = 0

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Watch modules, checkpointed functions and optimizers inside the context."""
        hook, function = checkpoint._recomputation_hook, checkpoint.CheckpointFunction
        patches = [
            (checkpoint, "_recomputation_hook", lambda *args: self._recomputing(hook(*args))),
            (function, "backward", staticmethod(self._recomputing(contextlib.nullcontext())(function.backward))),
        ]
        with (
            patched(patches),
            register_module_forward_pre_hook(lambda module, args: self._entered(module)),
            register_module_forward_hook(lambda module, args, result: self._left(module), always_call=True),
            register_optimizer_step_pre_hook(lambda *args: self._stepping(1)),
            register_optimizer_step_post_hook(lambda *args: self._stepping(-1)),
        ):
            yield

    def maker(self, operator: str) -> Maker:
        """Return the maker of a storage that this operator requests now."""
        task = torch._C._current_graph_task_id()
        if self._stack and self._stack[-1][2] == task:
            return Maker(self._stack[-1][1], operator if task == -1 else operator + AGAIN, find_line())
        if task != -1:
            node = torch._C._current_autograd_node()
            return Maker(self._of_node(node), f"{operator} (backward)", self._line_of_node(node))
        return Maker(OPTIMIZER if self._optimizers else "", operator, find_line())

    def in_module(self) -> bool:
        """Return whether a module's forward pass or a backward pass runs."""
        return bool(self._stack) or torch._C._current_graph_task_id() != -1

    def dispatched(self) -> None:
        """Note the line of the operator that is being dispatched, if it has made nodes of a graph."""
        if (number := torch._C._autograd._get_sequence_nr()) > self._ends[-1]:
            self._ends.append(number)
            self._lines.append(find_line())

    def path(self, module: torch.nn.Module | None) -> str | None:
        """Return the dotted path of a module that was seen, as `model.layers.0.mlp`, or None for any other."""
        return None if module is None else self._paths.get(module)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of the modules seen so far, each with its name, or the first of several."""
        seen: set[int] = set()
        for module, path in self._paths.items():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{path}.{name}", parameter

    def _of_node(self, node: Any) -> str:
        if node is None:  # a hook between two nodes
            return ""
        if node.name().endswith("AccumulateGrad"):
            owner = self._owners.get(id(node.variable), lambda: None)()
            known = owner is not None and any(own is node.variable for own in owner.parameters(recurse=False))
            return self._paths[owner] if owner is not None and known else ""
        return self._makers[bisect_right(self._numbers, node._sequence_nr()) - 1]

    def _line_of_node(self, node: Any) -> str:
        if node is None or node.name().endswith("AccumulateGrad"):
            return ""
        at = bisect_right(self._ends, node._sequence_nr())
        return self._lines[at] if at < len(self._lines) else ""

    def _entered(self, module: torch.nn.Module) -> None:
        if module not in self._paths:
            if self._stack:  # it is nobody's child: kept in a list, or made on the way
                self._paths[module] = f"{self._stack[-1][1]}.{type(module).__name__}"
            else:
                self._paths.update(paths := _named(module))
                self._owners |= {id(p): ref(owner) for owner in paths for p in owner.parameters(recurse=False)}
        self._push(module, self._paths[module])

    def _push(self, what: object, path: str) -> None:
        self._stack.append((id(what), path, torch._C._current_graph_task_id()))
        self._noted()

    def _left(self, what: object) -> None:
        while self._stack and self._stack.pop()[0] != id(what):
            pass  # an exception ended it before its hooks could run
        self._noted()

    @contextlib.contextmanager
    def _recomputing(self, inner: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        """Take what runs inside for what a backward pass recomputes, as a function may call no module."""
        self._push(what := object(), self._of_node(torch._C._current_autograd_node()))
        try:
            with inner:
                yield
        finally:
            self._left(what)

    def _noted(self) -> None:
        number, path = torch._C._autograd._get_sequence_nr(), self._stack[-1][1] if self._stack else ""
        if number == self._numbers[-1]:
            self._makers[-1] = path
        elif number > self._numbers[-1]:  # each thread counts for itself
            self._numbers.append(number)
            self._makers.append(path)

    def _stepping(self, change: int) -> None:
        self._optimizers += change


def _named(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Return the paths of a module and all below it; a wrapped module has its wrapper's path."""
    found: dict[torch.nn.Module, str] = {}

    def name(one: torch.nn.Module, path: str, outermost: bool) -> None:
        if one in found:
            return
        found[one] = type(one).__name__ if outermost else path
        wraps = any(kind.__name__ in WRAPPERS.get(kind.__module__.partition(".")[0], ()) for kind in type(one).__mro__)
        for child_name, child in one.named_children():
            name(child, path if wraps else f"{path}.{child_name}" if path else child_name, outermost and wraps)

    name(module, "", True)
    return found


def find_line() -> str:
    """Return the innermost source line of the model's or the user's code that runs now, as "model.py:88", or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (name := _name_file(frame.f_code.co_filename)) is not None:
            return f"{name}:{frame.f_lineno}" if name else ""
        frame = frame.f_back
    return ""


@cache
def _name_file(file: str) -> str | None:
    """Return the short name of a file of the model or the user; "" if no such code calls this one; None: look there."""
    if file.startswith(DRIVERS):
        return ""
    path = Path(file)
    if file.startswith(NOT_USERS) or (file.startswith(PYTHONS) and "site-packages" not in path.parts):
        return None
    return "/".join(path.parts[-2:]) if path.name == "__init__.py" else path.name
