"""Watches a training script that knows nothing of us, from inside its process: the same meter as our own runners use.

What is seen: the first call of a module in which gradients are wanted (a forward pass begins), torch.autograd's passes,
the steps of torch.optim.Optimizer and of GradScaler. A step of the meter ends where the first forward pass after an
optimizer step begins, so what comes between them (gradients set to None, schedulers, the next batch) is the earlier
step's. Before the first of them model and optimizer are loaded.

    import torch | the first forward | backward | optimizer.step | the next forward | ...
    `start`      | load ends, step 0 | phase    |                | step 0 ends      |

The cost is one module call's hooks, two calls around each backward pass and one after each optimizer step. What is
written lies in the attempt's folder: `seen-PID.json`, whenever there is more to say. Nothing is printed, and nothing
that goes wrong here reaches the script.

Not covered: how this gets into the script's process (hook/sitecustomize.py), what is made of the files (script.py).
A model that is compiled as a function, or has no module at all, is seen by its backward passes only: its steps then end
with optimizer.step. Top-level imports: the standard library and torch, whatever else the script's environment has.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

if TYPE_CHECKING:
    from vramsweep.runners.measure import Gauges, Meter

ATTEMPT = "VRAMSWEEP_ATTEMPT"  # set where vramsweep started the training (hook/sitecustomize.py)
SPEC = "watch.json"  # what is asked of the observer
SEEN = "seen-{}.json"  # what the process of this number has to say
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
UNLOADED = "what loading took is not known: no module was called, so it was not seen where the first step begins"
MEETING_S = 60.0  # that a rank waits for the others to have measured, before it ends
_BACKWARD = ((torch.autograd, "backward"), (torch.autograd, "grad"), (torch.autograd, "_engine_run_backward"))


def start(folder: str) -> None:
    """Watch this process from now on, and every process that is forked from it."""
    watch = Observer(Path(folder), _storages())
    watch.install()
    os.register_at_fork(after_in_child=watch.forked)
    atexit.register(watch.ended)


class Observer:
    """What is seen of one process; `folder` holds what is asked for, and gets what is said.

    `imported` are the storages that count for nothing (measure.Gauges).
    """

    def __init__(self, folder: Path, imported: Sequence[torch.UntypedStorage] = ()) -> None:
        self.folder, self.imported = folder, imported
        self.asked: dict[str, Any] = json.loads((folder / SPEC).read_text())
        self.variables = {name: os.environ.get(name) for name in VARIABLES}
        self.handle: Any = None
        self.undo: list[Callable[[], None]] = []
        self._fresh()

    def _fresh(self) -> None:
        self.meter: Meter | None = None
        self.gauges: Gauges | None = None
        self.live: Any = None
        self.problem: str | None = None
        self.done = False  # nothing more is looked at
        self.backwards = 0  # since the last step of an optimizer
        self.depth = 0
        self.stepped = False  # since the last forward pass began
        self.forward_seen = False  # since the last step ended
        self.counts = dict.fromkeys(("forwards", "backwards", "steps"), 0)
        self.skips = 0  # optimizer steps that GradScaler left out for an overflow
        self.volume = _Volume()
        self.optimizer: Any = None
        self.net: Any = None
        self.told: dict[str, Any] = {}

    def forked(self) -> None:
        """This is a child of the process that was watched: it has measured nothing yet."""
        self._fresh()
        self.arm()

    # ---- what is hooked

    def install(self) -> None:
        """Hook what there is to hook."""
        self.arm()
        self.undo.append(register_optimizer_step_post_hook(self.guarded(self.optimizer_stepped)).remove)
        for module, name in _BACKWARD:
            self.patch(module, name, self.watched(getattr(module, name)))
        scaler_class = torch.amp.GradScaler
        update = scaler_class.update

        @functools.wraps(update)
        def updated(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = update(scaler, *args, **kwargs)
            self.guarded(self.scaler_updated)()
            return result

        self.patch(scaler_class, "update", updated)
        self.patch(torch, "compile", self.compiling(torch.compile))
        if self.asked["job"]:
            self.install_job()
        if "torch._dynamo.eval_frame" in sys.modules:
            self.patch_compiled(sys.modules["torch._dynamo.eval_frame"].OptimizedModule)

    def patch(self, owner: Any, name: str, function: Any) -> None:
        """Replace a function of torch's, until `uninstall`; one that somebody else replaces meanwhile stays so."""
        before = getattr(owner, name)
        setattr(owner, name, function)

        def restore() -> None:
            if getattr(owner, name) is function:
                setattr(owner, name, before)

        self.undo.append(restore)

    def uninstall(self) -> None:
        """Leave the process as it was found."""
        self.close()
        for one in reversed(self.undo):
            one()
        self.undo.clear()

    def install_job(self) -> None:
        """Tell the parts of a whole job apart; on a CPU count its tensors from here on."""
        if not torch.cuda.is_available():
            from vramsweep.runners.dispatch import LiveBytes

            self.live = LiveBytes(self.imported)
            self.live.__enter__()
            self.undo.append(lambda: self.live.__exit__(None, None, None))
        self.patch(torch, "load", self.before(torch.load, self.loads))
        kind = torch.optim.Optimizer
        self.patch(kind, "load_state_dict", self.before(kind.load_state_dict, self.loads_state))
        self.patch(torch, "save", self.before(torch.save, self.saves))
        self.patch(torch.nn.Module, "train", self.before(torch.nn.Module.train, self.changes_mode))
        self.patch(torch.nn.Module, "state_dict", self.before(torch.nn.Module.state_dict, self.takes_state))

    def before(self, function: Callable[..., Any], told: Callable[..., None]) -> Callable[..., Any]:
        """The function, with `told` called before with the same arguments."""
        tell = self.guarded(told)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tell(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    def arm(self) -> None:
        """Look for the next forward pass."""
        if self.handle is None and not self.done:
            self.handle = register_module_forward_pre_hook(self.module_called)

    def disarm(self) -> None:
        """Look for none: a hook that is there costs every call of every module."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, which raises nothing: what goes wrong is kept, and nothing is looked at any more."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            if self.done:
                return
            try:
                function(*args, **kwargs)
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                self.close()
                self.write()

        return call

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """One of autograd's ways to start a pass; a pass within a pass is none of its own."""
        begins, ends = self.guarded(self.backward_begins), self.guarded(self.backward_ended)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            outer = self.depth == 0
            self.depth += 1
            if outer:
                begins()
            try:
                result = function(*args, **kwargs)
            finally:
                self.depth -= 1
            if outer:
                ends()
            return result

        return run

    def compiling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """torch.compile, which may be the first to make a module of its own kind."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if isinstance(result, torch.nn.Module) and not self.done:
                self.patch_compiled(type(result))
            return result

        return run

    def patch_compiled(self, kind: Any) -> None:
        """Be told of each call of a compiled module, of whose kind this is."""
        call = kind.__call__
        if hasattr(call, "_watched"):
            return

        @functools.wraps(call)
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            with self.compiled_called(module, args, kwargs):
                return call(module, *args, **kwargs)

        run._watched = True  # type: ignore[attr-defined]
        self.patch(kind, "__call__", run)

    def module_called(self, module: torch.nn.Module, args: Any) -> None:
        """torch's hook before a module's forward."""
        if torch.compiler.is_compiling() or self.depth:
            return
        if not torch.is_grad_enabled():
            if self.asked["job"]:
                self.guarded(self.evaluates)(module)
            return
        called = sys._getframe(1).f_locals  # which has the keyword arguments, as the hook has not
        self.guarded(self.forward_begins)(module, args, called.get("kwargs") or {})

    @contextlib.contextmanager
    def compiled_called(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
        """The same around one that torch.compile has made: it would warn of a hook like ours."""
        if self.handle is None:
            yield
        elif torch.is_grad_enabled() and not self.depth:
            self.guarded(self.forward_begins)(module, args, kwargs)
            self.disarm()
            yield
        else:
            if self.asked["job"] and not torch.is_grad_enabled():
                self.guarded(self.evaluates)(module)
            self.disarm()
            yield
            self.arm()

    # ---- what happens

    def forward_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.disarm()
        self.counts["forwards"] += 1
        if self.meter is None:
            self.begin(module)
        elif self.stepped:
            self.boundary()
        elif self.asked["job"]:
            self.part("steps" if self.meter.index else "first_step")
        self.forward_seen = True
        self.volume.add(args, kwargs)

    def backward_begins(self) -> None:
        self.counts["backwards"] += 1
        self.backwards += 1
        if self.meter is None:  # of a model that is no module: what was loaded has not been seen apart
            self.begin(None)
        elif self.stepped:
            self.boundary()

    def backward_ended(self) -> None:
        self.arm()

    def optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if optimizer is not None:
            self.optimizer = optimizer
        if not self.backwards:  # DeepSpeed makes states so; and its third stage steps group by group
            return
        self.backwards = 0
        self.counts["steps"] += 1
        if self.meter is None:
            return
        self.stepped = True
        if not self.forward_seen:
            self.boundary()

    def scaler_updated(self) -> None:
        if self.backwards:  # no optimizer has stepped since
            self.skips += 1
            self.optimizer_stepped(None)

    def begin(self, module: torch.nn.Module | None) -> None:
        """Everything is loaded; the first step begins."""
        from vramsweep.runners import measure

        self.net = module
        gauges = self.look(module)
        asked = measure.Asked(
            self.asked["warmup_steps"],
            self.asked["measured_steps"],
            self.asked["record"],
            precision=self.asked["precision"],
            job=self.asked["job"],
        )
        self.meter = measure.Meter(asked, self.folder, gauges, self.rank(), self.publish)
        self.meter.built(self.describe, lambda: self.skips)
        self.write()  # a process that ends by os._exit says nothing later
        self.volume.begin_step()
        self.meter.step_begin()

    def look(self, module: torch.nn.Module | None) -> Gauges:
        """The instruments, made when they are first needed."""
        from vramsweep.runners.instruments import HostMemory
        from vramsweep.runners.measure import Gauges

        if self.gauges is None:
            self.device = _device(module)
            self.gauges = Gauges(self.device, self.asked["worker"], self.imported)
            if self.asked["job"]:
                self.gauges.part = "load"
                if isinstance(self.gauges.memory, HostMemory):
                    self.gauges.memory.live = self.live
        return self.gauges

    # ---- the parts of a job

    def part(self, name: str) -> None:
        """From now on it is this part; before the card is touched there is none to tell apart."""
        if self.gauges is None and torch.cuda.is_available() and not torch.cuda.is_initialized():
            return
        gauges = self.look(self.net)
        if gauges.part != name:
            gauges.enter(name)

    def evaluates(self, module: torch.nn.Module) -> None:
        """A module is called without gradients between two steps, which evaluates if it is the one that is trained."""
        if self.trains(module):
            self.part("evaluation")

    def changes_mode(self, module: torch.nn.Module, mode: bool = True) -> None:
        """train(mode), which is also what eval() calls, of every module in turn."""
        if not mode and self.gauges is not None and self.gauges.part != "evaluation":
            self.evaluates(module)

    def saves(self, *args: Any, **kwargs: Any) -> None:
        """Something is written; before the first step that is nothing of the training's."""
        if self.meter is not None:
            self.part("save")

    def takes_state(self, module: Any, *args: Any, **kwargs: Any) -> None:
        """Its state is taken: where that is divided among ranks, this is what gathers it."""
        if self.trains(module):
            self.part("save")

    def loads(self, *args: Any, **kwargs: Any) -> None:
        """A file is read. Once there is an optimizer, that is a checkpoint to go on from."""
        if self.meter is None and any(issubclass(type(o), torch.optim.Optimizer) for o in gc.get_objects()):
            self.part("resume")

    def loads_state(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """An optimizer gets a state, which accelerate also does with an empty one."""
        if self.meter is None and isinstance(state, dict) and state.get("state"):
            self.part("resume")

    def trains(self, module: Any) -> bool:
        """Whether it has parameters of what is trained."""
        if self.net is None or self.meter is None:
            return False
        own = {id(parameter) for parameter in self.net.parameters()}
        return any(id(parameter) in own for parameter in module.parameters())

    def boundary(self) -> None:
        """A step has ended, and the next begins."""
        meter = self.meter
        assert meter is not None
        if self.asked["job"]:  # what came in between is another part's
            self.part("steps")
        self.stepped = self.forward_seen = False
        if meter.step() is meter.count:
            meter.count.tokens = self.volume.tokens_of(-1)
        meter.step_end()
        if meter.asked.measured_steps is not None and meter.index == len(meter.plan):
            self.finish(meter)
            return
        self.volume.begin_step()
        meter.step_begin()

    def publish(self, own: dict[str, Any]) -> dict[str, Any]:
        """The measured steps are over."""
        meter = self.meter
        assert meter is not None
        first = len(meter.plan) if meter.asked.measured_steps is None else meter.asked.warmup_steps + 1
        row = own | self.volume.columns(first, own["measured_steps"], own["elapsed_s"])
        if self.net is None:
            row |= dict.fromkeys(("load_peak_allocated_bytes", "load_peak_reserved_bytes"))
            row["notes"] = [*row["notes"], UNLOADED]
        self.told = {"columns": row, "complete": False}
        self.write()
        return row

    def finish(self, meter: Meter) -> None:
        """Every step that was asked for is over."""
        self.told = {"columns": meter.columns(), "complete": True}
        self.write()
        self.close()
        if self.asked["stop"]:
            self.leave()

    def close(self) -> None:
        """Look at nothing any more."""
        self.done = True
        self.disarm()
        if self.meter is not None:
            with contextlib.suppress(Exception):
                self.meter.count.close()
                self.meter.gauges.release()

    def leave(self) -> None:
        """End this process as a trial's worker ends, once the other ranks have measured too: they may wait for us."""
        gone = time.monotonic() + MEETING_S
        while self.others_measure() and time.monotonic() < gone:
            time.sleep(0.02)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)

    def others_measure(self) -> bool:
        """Whether other ranks of this training are still to come to their end."""
        size = self.world_size()
        if size < 2:
            return False
        complete = 0
        for path in self.folder.glob(SEEN.format("*")):
            with contextlib.suppress(OSError, ValueError):
                complete += bool(json.loads(path.read_text()).get("complete"))
        return complete < size

    def block_ended(self) -> None:
        """The training is over. Its last step does not count: nothing says where it ended."""
        if self.meter is not None and not self.done:
            if self.asked["job"]:
                self.meter.gauges.enter(None)
            self.meter.finish()
            if self.meter.row is not None:
                self.told = {"columns": self.meter.columns(), "complete": True}
        self.write()

    def ended(self) -> None:
        """The process comes to its end; what ended it is known if it was an exception."""
        with contextlib.suppress(Exception):
            error = getattr(sys, "last_value", None)  # set before any excepthook is called, the script's own included
            if isinstance(error, BaseException):
                kind = type(error)
                self.told["error"] = {"type": f"{kind.__module__}.{kind.__qualname__}", "message": str(error)}
                if isinstance(error, torch.OutOfMemoryError):
                    from vramsweep.runners import ran_out

                    self.told["error"] |= {"columns": ran_out.columns(error), "phase": ran_out.phase(error)}
            if self.asked["job"]:
                self.guarded(self.block_ended)()
            self.done = True
            self.told["ended"] = True
            self.write()

    # ---- what is said

    def describe(self) -> dict[str, Any]:
        """Columns of what was built, and of the environment that it runs in."""
        from vramsweep.runners import described

        net = getattr(self.net, "_orig_mod", self.net)
        net = getattr(net, "module", net)
        found: dict[str, Any] = {"padding_fraction": None}
        if net is not None and not _divided(self.net):
            found |= described.counts(net)
        if net is not None:
            found["attention_effective"] = getattr(getattr(net, "config", None), "_attn_implementation", None)
        if self.optimizer is not None:
            found["optimizer_effective"] = described.optimizer_name(self.optimizer)
        if "deepspeed" in sys.modules and type(self.net).__name__ == "DeepSpeedEngine":
            found["deepspeed_version"] = _version("deepspeed")
        return found | {
            "torch_version": torch.__version__,
            "transformers_version": _version("transformers"),
            "cuda_version": torch.version.cuda,
            "cpu_threads": torch.get_num_threads(),
        }

    def write(self) -> None:
        """Say what is known by now."""
        gauges = None if self.meter is None else self.meter.gauges
        said = {
            "pid": os.getpid(),
            "at": time.time(),
            "rank": self.rank(),
            "world_size": self.world_size(),
            "program": sys.argv[0] if sys.argv else None,
            "problem": self.problem,
            "ended": False,  # by itself, as far as Python knows
            "variables": {n: os.environ.get(n) for n in VARIABLES if os.environ.get(n) != self.variables[n]},
            "index": None if self.meter is None else self.meter.index,
            **self.counts,
            **self.volume.said(),
            **({} if gauges is None or not gauges.cuda else _cuda(self.device)),
            **self.told,
        }
        path = self.file
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(said))
        aside.rename(path)

    @property
    def file(self) -> Path:
        """Where this process says what it has seen."""
        return self.folder / SEEN.format(os.getpid())

    @staticmethod
    def rank() -> int:
        """This process's rank in its training."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank()
        return int(os.environ.get("RANK", "0"))

    @staticmethod
    def world_size() -> int:
        """How many ranks the training has."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_world_size()
        return int(os.environ.get("WORLD_SIZE", "1"))


class _Volume:
    """How many tokens and samples each step had: the shapes of the token ids that a model was called with."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int] | None]] = []

    def begin_step(self) -> None:
        """What follows is the next step's."""
        self.steps.append([])

    def add(self, args: Any, kwargs: Any) -> None:
        """A forward pass with these arguments."""
        if self.steps:
            self.steps[-1].append(_shape(args, kwargs))

    def tokens_of(self, step: int) -> int | None:
        """Tokens of a step; None where they were not seen."""
        shapes = self.steps[step] if self.steps else []
        return None if not shapes or None in shapes else sum(b * n for b, n in shapes if b)  # type: ignore[misc]

    def columns(self, first: int, count: int, elapsed: float | None) -> dict[str, Any]:
        """Columns of this rank, `count` steps of which were measured from `first` on; what was not seen is left out."""
        tokens = [self.tokens_of(step) for step in range(first, first + count)]
        if not tokens or None in tokens or elapsed is None:
            return {}
        shapes = [shape for step in self.steps[first : first + count] for shape in step if shape]
        return {
            "tokens_per_s": sum(t for t in tokens if t) / elapsed,
            "samples_per_s": sum(b for b, _ in shapes) / elapsed,
        }

    def said(self) -> dict[str, Any]:
        """The distinct shapes, passes per step, and the tokens and samples so far."""
        shapes = [shape for step in self.steps for shape in step]
        return {
            "shapes": sorted({shape for shape in shapes if shape is not None}),
            "shapes_known": bool(shapes) and None not in shapes,
            "passes": sorted({len(step) for step in self.steps[:-1]}),
        }


def _shape(args: Any, kwargs: Any) -> tuple[int, int] | None:
    """(samples, tokens) of the token ids among a model's arguments; None where there are none."""
    ids = kwargs.get("input_ids")
    if ids is None:
        ids = next((one for one in args if isinstance(one, torch.Tensor)), None)
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        return None
    return int(ids.shape[0]), int(ids.shape[1])


def _device(module: torch.nn.Module | None) -> torch.device:
    """Where the training runs."""
    tensor = None if module is None else next(iter(module.parameters()), None)
    if tensor is not None and tensor.device.type in ("cpu", "cuda"):
        place = tensor.device
    else:
        place = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    if place.type == "cpu" and torch.cuda.is_initialized():  # parameters that are offloaded
        place = torch.device("cuda")
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return place


def _divided(net: Any) -> bool:
    """Whether a rank holds only its part of the weights, so that they cannot be counted."""
    return any(type(one).__name__ == "FullyShardedDataParallel" for one in net.modules())


def _cuda(device: torch.device) -> dict[str, Any]:
    """What torch says of its allocator, and which of the visible cards this is."""
    backend = torch.cuda.get_allocator_backend()
    settings = torch.cuda.memory._snapshot()["allocator_settings"] if backend == "native" else {}
    return {"card": device.index, "backend": backend, "allocator_settings": settings}


def _version(package: str) -> str | None:
    module = sys.modules.get(package)
    return None if module is None else getattr(module, "__version__", None)


def _storages() -> list[torch.UntypedStorage]:
    """What the imports so far hold of tensors in host memory."""
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    return [t.untyped_storage() for t in tensors if t.device.type == "cpu" and t.layout is torch.strided]
