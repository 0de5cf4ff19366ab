"""Hooks and replaced functions in torch that report to a listener what a script does, whoever wrote the script.

They report module calls that no other module makes, torch.autograd's outermost passes, and steps of
torch.optim.Optimizer and GradScaler. They also report replays of CUDA graphs and saving; for a whole job also loading
and modules that change their mode. They do not report a compiler's tracing, nor what is captured into a CUDA graph. An
error in the listener does not reach the script: the listener gets it, and after that nothing more.

The cost is one module call's hook and two calls around each backward pass and optimizer step. A hook for all modules
costs every call of every module. So it is there only until a forward pass has begun. Once the models' classes are
known it is not there at all, because their calls are followed.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# The first two end in the last one, also if they were imported by name, but make the loss's gradient before it.
BACKWARD = ((torch.autograd, "backward"), (torch.autograd, "grad"), (torch.autograd, "_engine_run_backward"))


class Passes:
    """Autograd's outermost passes, whoever starts them. Passes within another, as of reentrant checkpointing, belong to
    it. `begins` is called before each, `ended` after it, with False if an exception ended it."""

    def __init__(self, begins: Callable[[], None], ended: Callable[[bool], None]) -> None:
        self._begins, self._ended = begins, ended
        self.depth = 0

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the replacement of one of BACKWARD."""

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


class TorchHooks:
    """All hooks, from `install` to `uninstall`; `undo` has the functions that remove them, in reverse order.

    `listener` is runners/scripts/observer.py's Observer, which this room must not import: a method for each event,
    `unevaluated` for whether a call without gradients would be news, `broke` for an error that one of them raised, and
    `done`, which says that it needs no more.
    """

    def __init__(self, listener: Any) -> None:
        self.undo: list[Callable[[], None]] = []
        self._followed: list[tuple[Any, Any, Callable[[], None]]] = []  # classes, their followed call, what restores it
        self._listener = listener
        self._forward, self._evaluation = self._guarded(listener.forward_begins), self._guarded(listener.evaluates)
        self._passes = Passes(self._guarded(listener.backward_begins), self._guarded(listener.backward_ended))
        self._handle: Any = None
        self.fresh()

    def fresh(self) -> None:
        """Forget all calls that are running, as at first and in a forked process."""
        self._passes.depth = 0
        self._inside = False  # a followed call is running
        self._capturing = False  # a CUDA graph, which waiting for the device would break

    def install(self, job: bool) -> None:
        """Install all hooks; for a `job` also those that only tell its parts apart."""
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
        """Replace a function until `uninstall`, or until the returned function is called. If somebody else replaces it
        meanwhile, that replacement stays."""
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
        """Watch for the next forward pass."""
        if self._handle is None and not self._listener.done:
            self._handle = register_module_forward_pre_hook(self._module_called)

    def disarm(self) -> None:
        """Stop watching for the next forward pass."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def follow(self, kind: Any) -> None:
        """Report each call of this class's modules: compiled ones, and a model's class once it is known. No hook is in
        the modules, because it would be saved with them."""
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
        """Return the function, changed so that it raises nothing."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            if self._deaf():
                return
            try:
                function(*args, **kwargs)
            except Exception as error:
                with contextlib.suppress(Exception):  # such as a full disk
                    self._listener.broke(error)

        return call

    def _deaf(self) -> bool:
        return self._listener.done or self._capturing

    def _capture(self, function: Callable[..., Any], begins: bool) -> Callable[..., Any]:
        """Wrap what begins or ends the capture of a CUDA graph. If the begin raises, the capture has not begun."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._capturing = False
            result = function(*args, **kwargs)
            self._capturing = begins
            return result

        return run

    def _tell(self, owner: Any, name: str, told: Callable[..., None], after: bool = False) -> None:
        """Make the function call `told` with the same arguments before each call, or `after` it has returned."""
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
        """Wrap torch.save so that it is reported. Followed classes are restored meanwhile, because picklers may write a
        script's class with all its attributes."""
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
        """Wrap torch.compile so that the class of its module is followed, of which it may be the first."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, torch.nn.Module) and not self._listener.done:
                self.follow(type(result))
            return result

        return run

    def _module_called(self, module: torch.nn.Module, args: Any) -> None:
        """Handle torch's hook before a module's forward."""
        if torch.compiler.is_compiling() or self._passes.depth or self._inside:
            return
        if not torch.is_grad_enabled() and not self._listener.unevaluated():
            return
        called = sys._getframe(1).f_locals  # has the keyword arguments, which the hook does not get
        self._called(module, args, called.get("kwargs") or {})

    def _called(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Report the call of a module that no other module made."""
        if torch.is_grad_enabled():
            self._forward(module, args, kwargs)
        elif self._listener.unevaluated():
            self._evaluation(module)
