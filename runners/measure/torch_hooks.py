"""Where torch tells what a script does, whoever wrote it: hooks and replaced functions, which tell a listener.

Told are the calls of modules that no other module makes, torch.autograd's outermost passes, the steps of
torch.optim.Optimizer and of GradScaler, replays of CUDA graphs, what is saved; of a whole job also what is loaded and
when modules change their mode. Not told is what a compiler does while it traces, and what is captured into a CUDA
graph. What goes wrong in the listener does not reach the script: the listener is told, and after that nothing more.

The cost is one module call's hook, two calls around each backward pass and one after each optimizer step: a hook for
all modules costs every call of every module, so it is there only until a forward pass has begun, and not at all once
the classes of the models are known, whose calls are followed.

Not covered: what is made of it (observer.py).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._guards import TracingContext
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# All ends in the last one, also for those who imported the first two by name; these make the loss's gradient before.
BACKWARD = ((torch.autograd, "backward"), (torch.autograd, "grad"), (torch.autograd, "_engine_run_backward"))


class Passes:
    """Autograd's passes, whoever starts them; one within another, as reentrant checkpointing has them, is none of its
    own. `begins` is called before each, `ended` after it, with False where an exception ended it."""

    def __init__(self, begins: Callable[[], None], ended: Callable[[bool], None]) -> None:
        self._begins, self._ended = begins, ended
        self.depth = 0

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of one of BACKWARD."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or TracingContext.try_get() is not None:  # a compiler's own pass
                return function(*args, **kwargs)
            outer, over = self.depth == 0, False
            self.depth += 1
            try:
                if outer:
                    self._begins()
                result = function(*args, **kwargs)
                over = True
            finally:
                self.depth -= 1
                if outer:
                    self._ended(over)
            return result

        return run


class Listener(Protocol):
    """What is told; `done` says that nothing more need be."""

    done: bool

    def broke(self, error: Exception) -> None:
        """One of the methods below raised this."""

    def unevaluated(self) -> bool:
        """Whether a call without gradients would be news."""

    def forward_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called where gradients are wanted. If that is a forward pass of the training, it disarms."""

    def forward_failed(self) -> None:
        """An exception came out of a call that was followed."""

    def evaluates(self, module: torch.nn.Module) -> None:
        """A module is called where no gradients are wanted."""

    def backward_begins(self) -> None:
        """One of autograd's passes begins, and is within no other."""

    def backward_ended(self, over: bool) -> None:
        """It has ended; not `over`: by an exception."""

    def optimizer_begins(self, optimizer: Any, *args: Any) -> None:
        """An optimizer's `step` is called."""

    def optimizer_stepped(self, optimizer: Any, *args: Any) -> None:
        """It has returned."""

    def scaler_stepped(self, scaler: Any, *args: Any, **kwargs: Any) -> None:
        """GradScaler's `step` has returned."""

    def replays(self, *args: Any, **kwargs: Any) -> None:
        """A CUDA graph is replayed."""

    def saves(self, *args: Any, **kwargs: Any) -> None:
        """torch.save is called."""

    def loads(self, *args: Any, **kwargs: Any) -> None:
        """torch.load is called."""

    def loads_state(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """An optimizer gets a state."""

    def changes_mode(self, module: torch.nn.Module, mode: bool = True) -> None:
        """A module's train(mode) is called, which eval() calls, too."""

    def takes_state(self, module: Any, *args: Any, **kwargs: Any) -> None:
        """A module's state_dict() is called."""


class TorchHooks:
    """All of them, from `install` to `uninstall`; `undo` is what takes them back, in reverse order."""

    def __init__(self, listener: Listener) -> None:
        self.undo: list[Callable[[], None]] = []
        self._followed: list[tuple[Any, Any, Callable[[], None]]] = []  # classes, what is called, and what ends that
        self._listener = listener
        self._forward, self._evaluation = self._guarded(listener.forward_begins), self._guarded(listener.evaluates)
        self._passes = Passes(self._guarded(listener.backward_begins), self._guarded(listener.backward_ended))
        self._handle: Any = None
        self.fresh()

    def fresh(self) -> None:
        """Nothing is going on: this is so at first, and in a process that was forked."""
        self._passes.depth = 0
        self._inside = False  # of a call of a class whose calls are followed
        self._capturing = False  # a CUDA graph, which whatever waits for the device would break

    def install(self, job: bool) -> None:
        """Hook what there is to hook; for a `job` also what only its parts are told apart by."""
        told = self._listener
        self.arm()
        self.undo.append(register_optimizer_step_pre_hook(self._guarded(told.optimizer_begins)).remove)
        self.undo.append(register_optimizer_step_post_hook(self._guarded(told.optimizer_stepped)).remove)
        for module, name in BACKWARD:
            self.patch(module, name, self._passes.watched(getattr(module, name)))
        self._tell(torch.amp.GradScaler, "step", told.scaler_stepped, after=True)
        for name, begins in (("capture_begin", True), ("capture_end", False)):
            self.patch(torch.cuda.CUDAGraph, name, self._capture(getattr(torch.cuda.CUDAGraph, name), begins))
        self._tell(torch.cuda.CUDAGraph, "replay", told.replays)
        self.patch(torch, "compile", self._compiling(torch.compile))
        self.patch(torch, "save", self._saving(torch.save))
        if job:
            self._tell(torch, "load", told.loads)
            self._tell(torch.optim.Optimizer, "load_state_dict", told.loads_state)
            self._tell(torch.nn.Module, "train", told.changes_mode)
            self._tell(torch.nn.Module, "state_dict", told.takes_state)
        if "torch._dynamo.eval_frame" in sys.modules:
            self.follow(sys.modules["torch._dynamo.eval_frame"].OptimizedModule)

    def uninstall(self) -> None:
        """Leave torch as it was found."""
        self.disarm()
        for one in reversed(self.undo):
            one()
        self.undo.clear()
        self._followed.clear()

    def patch(self, owner: Any, name: str, function: Any) -> Callable[[], None]:
        """Replace a function until `uninstall`, or until what is returned is called. One that somebody else replaces
        meanwhile stays so."""
        before, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, function)

        def restore() -> None:
            if getattr(owner, name) is function and own:
                setattr(owner, name, before)
            elif getattr(owner, name) is function:
                delattr(owner, name)

        self.undo.append(restore)
        return restore

    def arm(self) -> None:
        """Look for the next forward pass."""
        if self._handle is None and not self._listener.done:
            self._handle = register_module_forward_pre_hook(self._module_called)

    def disarm(self) -> None:
        """Look for none."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def follow(self, kind: Any) -> None:
        """Be told of each call of the modules of this class, without a hook in the modules, which would be saved with
        them: of compiled ones, and of a model's class once it is known."""
        call = kind.__call__
        if hasattr(call, "_followed"):
            return

        @functools.wraps(call)
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._deaf() or self._inside or self._passes.depth:
                return call(module, *args, **kwargs)
            self._inside, waits = True, False
            try:
                self._called(module, args, kwargs)
                waits = self._handle is not None  # for another call than this one
                self.disarm()  # torch.compile would warn of a hook like ours
                return call(module, *args, **kwargs)
            except BaseException:
                self._listener.forward_failed()
                raise
            finally:
                self._inside = False
                if waits:
                    self.arm()

        run._followed = True  # type: ignore[attr-defined]
        self._followed.append((kind, run, self.patch(kind, "__call__", run)))

    def _guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, which raises nothing."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            if self._deaf():
                return
            try:
                function(*args, **kwargs)
            except Exception as error:
                with contextlib.suppress(Exception):  # no room to write it down
                    self._listener.broke(error)

        return call

    def _deaf(self) -> bool:
        return self._listener.done or self._capturing

    def _capture(self, function: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        """What begins or ends the capture of a CUDA graph; one whose begin raises has not begun."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._capturing = False
            result = function(*args, **kwargs)
            self._capturing = begins
            return result

        return run

    def _tell(self, owner: Any, name: str, told: Callable[..., None], after: bool = False) -> None:
        """Have the function tell of each call, with the same arguments, before it is made, or when it has returned."""
        function, tell = getattr(owner, name), self._guarded(told)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not after:
                tell(*args, **kwargs)
            result = function(*args, **kwargs)
            if after:
                tell(*args, **kwargs)
            return result

        self.patch(owner, name, run)

    def _saving(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """torch.save, which is told of. Picklers that write a class of the script's with all that it has find it as it
        was."""
        tell = self._guarded(self._listener.saves)

        @functools.wraps(save)
        def run(*args: Any, **kwargs: Any) -> Any:
            tell(*args, **kwargs)
            with contextlib.ExitStack() as stack:
                for kind, called, restore in self._followed:
                    if kind.__dict__.get("__call__") is called:
                        restore()
                        stack.callback(setattr, kind, "__call__", called)
                return save(*args, **kwargs)

        return run

    def _compiling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch.compile, which may be the first to make a module of its own kind."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, torch.nn.Module) and not self._listener.done:
                self.follow(type(result))
            return result

        return run

    def _module_called(self, module: torch.nn.Module, args: Any) -> None:
        """torch's hook before a module's forward."""
        if torch.compiler.is_compiling() or self._passes.depth or self._inside:
            return
        if not torch.is_grad_enabled() and not self._listener.unevaluated():
            return
        called = sys._getframe(1).f_locals  # which has the keyword arguments, as the hook has not
        self._called(module, args, called.get("kwargs") or {})

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A module is called, not by another."""
        if torch.is_grad_enabled():
            self._forward(module, args, kwargs)
        elif self._listener.unevaluated():
            self._evaluation(module)
