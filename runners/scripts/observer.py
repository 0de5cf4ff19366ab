"""Observer of a training script that knows nothing of us: inside its process, with the meter of our own runners.

Hooks in torch report what the script does (torch_hooks.py). A step of the meter ends where the first forward pass after
an optimizer step begins. So all between the two (gradients set to None, schedulers, the next batch) belongs to the
earlier step. Before the first forward pass, model and optimizer are loaded. Only modules whose parameters an optimizer
steps count: not a teacher, a transform of the data, or an evaluation between two steps.

    import torch | the first forward | backward | optimizer.step | the next forward | ...
    `start`      | load ends, step 0 | phase    |                | step 0 ends      |

The observer writes `seen-PID.json` in the attempt's folder whenever there is more to report. It prints nothing, and
none of its errors reaches the script. A model that is compiled as a function, or has no module at all, shows only its
backward passes; its steps then end with optimizer.step. Top-level imports are the standard library and torch, because
the script's environment may have nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vramsweep.runners.measure import model_description
from vramsweep.runners.measure.compile_events import Compiler
from vramsweep.runners.measure.peak_counters import SHARED
from vramsweep.runners.measure.torch_hooks import TorchHooks
from vramsweep.runners.scripts import import_constants
from vramsweep.runners.scripts.observation_files import SEEN, UNASKED, WATCH
from vramsweep.runners.scripts.token_volume import Volume

if TYPE_CHECKING:
    from vramsweep.runners.measure.rank_instruments import Gauges
    from vramsweep.runners.measure.step_meter import Meter

UNLOADED = "memory of loading is unknown, because no call of a module on the GPU shows where the first step begins"
DISTURBED = "the optimizer's peak is unknown, because the script evaluated or saved before the next step began"
HELD_S = 5.0  # seconds that the process waits after its last report: the worker ends it, and what would follow it
SETTLED = 3  # steps without a new model; then hooks on the classes of known models are enough
MEETING_S = 60.0  # longest wait of a rank in seconds, before it ends, until the others have measured


def start(folder: str) -> None:
    """Watch this process from now on, and every process forked from it."""
    cards = _cards()
    imported = [] if cards else import_constants.constants_so_far()  # a GPU's counter does not count them
    watch = Observer(Path(folder), imported)
    if not cards:
        watch.hooks.undo.append(import_constants.collect(imported))
    watch.install()
    os.register_at_fork(after_in_child=watch.forked)
    atexit.register(watch.ended)


class Observer:
    """The observer of one process. It reads its request from `folder` and writes its reports there. `imported` are
    storages that are not counted (rank_instruments.py)."""

    def __init__(self, folder: Path, imported: Sequence[torch.UntypedStorage] = ()) -> None:
        self.folder, self.imported = folder, imported
        self.asked: dict[str, Any] = UNASKED | json.loads((folder / WATCH).read_text())
        self._fresh()
        self.hooks = TorchHooks(self)

    def _fresh(self) -> None:
        self.meter: Meter | None = None
        self.gauges: Gauges | None = None
        self.live: Any = None
        self.problem: str | None = None
        self.done = False  # observing has stopped
        self.backwards = 0  # since the last step of an optimizer
        self.stepped = False  # since the last forward pass began
        self.forward_seen = False  # since the last step ended
        self.settled = 0  # steps since the last new model
        self.trained = False  # a model in train() has had a backward pass
        self.closures: int | None = None  # backward passes within an optimizer's current step, of its closure
        self.late = False  # the meter began with a backward pass
        self.elsewhere: set[int] = set()  # steps in which the script also evaluated or saved
        self.counts = dict.fromkeys(("forwards", "backwards", "steps"), 0)
        self.skips: int | None = 0  # optimizer steps that GradScaler skipped for an overflow
        self.volume = Volume()
        self.modules: list[weakref.ref[torch.nn.Module]] = []  # modules called that have parameters to train
        self.optimizers: list[weakref.ref[Any]] = []
        self.built: dict[str, Any] | None = None
        self.place = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.told: dict[str, Any] = {}

    def forked(self) -> None:
        """Start afresh in a forked child of the watched process, because it has measured nothing yet."""
        self._fresh()
        self.hooks.fresh()
        self.hooks.arm()

    def install(self) -> None:
        """Begin to watch. For a whole job without a GPU, count its tensors from now on."""
        SHARED.install()
        self.hooks.undo.append(SHARED.uninstall)
        self.compiler = Compiler(ours=False)
        if self.asked["job"] and not _cards():
            from vramsweep.runners.measure.dispatch_modes import LiveBytes

            self.live = LiveBytes(self.imported)
            self.live.__enter__()
            self.hooks.undo.append(lambda: self.live.__exit__(None, None, None))
        self.hooks.install(self.asked["job"])

    def uninstall(self) -> None:
        """Stop observing and remove all hooks from the process."""
        self.close()
        self.hooks.uninstall()

    def broke(self, error: Exception) -> None:
        """Record an error of the observer and stop observing, so that it does not disturb the script."""
        self.problem = f"{type(error).__name__}: {error}"
        self.close()
        self.write()

    # ---- events of the script

    def forward_begins(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the first or next step at a trained module's call; skip frozen modules, and note evaluations."""
        known = any(one() is module for one in self.modules)
        if not known and not any(parameter.requires_grad for parameter in module.parameters()):
            frozen = next(module.parameters(), None) is not None
            if frozen and self.meter is not None and self.meter.step() is self.meter.count:
                self.meter.count.uneven = True  # its forward pass has no backward pass
            return  # a transform of the data; a teacher
        if self.trained and not module.training:
            self.evaluates(module)  # with gradients on, but never asked for
            return
        self.hooks.disarm()
        self.hooks.follow(type(module))
        self.counts["forwards"] += 1
        if not known:
            self.settled = 0
            self.modules.append(weakref.ref(module))
        if self.meter is None and _device(list(module.parameters())).type == "cpu" and _cards():
            return  # it may still be moved: it trains where its backward pass runs
        if self.meter is None:
            self.begin(module)
        elif self.stepped:
            self.boundary()
        elif self.asked["job"]:
            self.part("steps" if self.meter.index else "first_step")
        self.forward_seen = True
        self.volume.forward(module, args, kwargs)

    def forward_failed(self) -> None:
        """Drop the pending forward passes after an exception, because none of them gets a backward pass."""
        self.volume.backward(over=False)

    def backward_begins(self) -> None:
        """Count the pass, and begin the first or next step if no forward pass has done so."""
        self.counts["backwards"] += 1
        self.backwards += 1
        if self.closures is not None:
            self.closures += 1  # Lightning always passes a closure, and calls it once
            if self.closures > 1:
                self.volume.again()
        if self.meter is None:  # the model is no module, or was on the host when it was called
            self.late = True
            self.begin(next((module for one in self.modules if (module := one()) is not None), None))
        elif self.stepped:
            self.boundary()

    def backward_ended(self, over: bool) -> None:
        """Count the pass's tokens, and arm the hooks again until SETTLED steps brought no new model."""
        if over and not self.trained:
            self.trained = any(module.training for one in self.modules if (module := one()) is not None)
        self.volume.backward(over)
        if self.settled < SETTLED:
            self.hooks.arm()

    def optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        """Count backward passes from here on as those of the optimizer's closure."""
        self.closures = 0

    def optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        """Count a step that follows a backward pass; end it at once if no forward pass was seen."""
        self.closures = None
        if optimizer is not None and all(one() is not optimizer for one in self.optimizers):
            self.optimizers.append(weakref.ref(optimizer))
        if not self.backwards:  # DeepSpeed makes states by such a step; its third stage steps group by group
            return
        self.backwards = 0
        self.counts["steps"] += 1
        if self.meter is None:
            return
        self.stepped = True
        if not self.forward_seen:
            self.boundary()

    def replays(self, *args: Any, **kwargs: Any) -> None:
        """Tell the meter that a CUDA graph replays, because counters do not see its memory."""
        if self.meter is not None:
            self.meter.graphed = True

    def scaler_stepped(self, scaler: Any, *_: Any, **__: Any) -> None:
        """Count a step that GradScaler skipped for an overflow; the count is None if fused steps hide them."""
        if not scaler.is_enabled():
            return
        if any(getattr(one(), "_step_supports_amp_scaling", False) for one in self.optimizers):
            self.skips = None  # a fused step skips itself on the GPU and does not report it
        if self.backwards:  # no optimizer has stepped since the backward pass
            self.skips = None if self.skips is None else self.skips + 1
            self.optimizer_stepped(None)

    def begin(self, module: torch.nn.Module | None) -> None:
        """Begin the first step, because everything is loaded."""
        from vramsweep.runners.measure import step_meter

        held = [] if module is None else list(module.parameters())
        if held and self.gauges is not None and self.gauges.device != _device(held):  # moved since a file was read
            self.gauges = None
        asked = step_meter.MeterSpec(
            self.asked["warmup_steps"],
            self.asked["measured_steps"],
            self.asked["record"],
            precision=self.asked["precision"],
            job=self.asked["job"],
            fused_loss="liger_kernel" in sys.modules,
        )
        self.meter = step_meter.Meter(asked, self.folder, self.look(held), self.ranks()[0], self.publish)
        self.meter.built(self.describe, lambda: self.skips)
        self.write()  # a process that ends by os._exit reports nothing later
        self.volume.begin_step()
        self.meter.step_begin()

    def look(self, held: Sequence[torch.Tensor]) -> Gauges:
        """Return the instruments of the device with these tensors of the training; make them at the first call."""
        from vramsweep.runners.measure.counters import HostMemory
        from vramsweep.runners.measure.rank_instruments import Gauges

        if self.gauges is None:
            self.gauges = Gauges(_device(held), self.asked["worker"], self.imported, self.compiler)
            if self.asked["job"]:
                self.gauges.part = "load"
                if isinstance(self.gauges.memory, HostMemory):
                    self.gauges.memory.live = self.live
        return self.gauges

    # ---- the parts of a job

    def part(self, name: str, optimizer: Any = None) -> None:
        """Count memory as of this part of the job from now on; do nothing before the GPU is first used."""
        if self.gauges is None and not torch.cuda.is_initialized() and _cards():
            return
        gauges = self.look([] if optimizer is None else optimizer.param_groups[0]["params"])
        if gauges.part != name:
            gauges.enter(name)

    def evaluates(self, module: torch.nn.Module) -> None:
        """Note an evaluation, if a module called without gradients between two steps is the trained one."""
        if self.meter is not None and self.unevaluated() and self.whole(module):
            self.elsewhere.add(self.meter.index)
            if self.asked["job"]:
                self.part("evaluation")

    def unevaluated(self) -> bool:
        """Return whether an evaluation is not recorded yet."""
        if self.meter is None or self.gauges is None:
            return False
        return self.gauges.part != "evaluation" if self.asked["job"] else self.meter.index not in self.elsewhere

    def changes_mode(self, module: torch.nn.Module, mode: bool = True) -> None:
        """Note an evaluation at train(False), which eval() calls for each module in turn. Some scripts call it in every
        step for some modules, such as frozen batch norms."""
        if not mode and self.gauges is not None and self.gauges.part != "evaluation":
            self.evaluates(module)

    def saves(self, *args: Any, **kwargs: Any) -> None:
        """Note that the script saves; before the first step a file is not of the training."""
        if self.meter is not None:
            self.elsewhere.add(self.meter.index)
            if self.asked["job"]:
                self.part("save")

    def takes_state(self, module: Any, *args: Any, **kwargs: Any) -> None:
        """Note a save when a trained module's state is taken; if ranks share it, this call gathers it."""
        if self.whole(module):
            self.saves()

    def loads(self, *args: Any, **kwargs: Any) -> None:
        """Note that a file is read. Once there is an optimizer, it is a checkpoint to resume from."""
        if self.meter is None:
            every = (one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer))
            if (optimizer := next(every, None)) is not None:
                self.part("resume", optimizer)

    def loads_state(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """Note that an optimizer gets a state; skip an empty one, which accelerate also loads."""
        if self.meter is None and isinstance(state, dict) and state.get("state"):
            self.part("resume", optimizer)

    def whole(self, module: Any) -> bool:
        """Return whether the module has all parameters of some trained module."""
        if self.meter is None:
            return False
        own = {id(parameter) for parameter in module.parameters()}
        return any({id(parameter) for parameter in net.parameters()} <= own for net in self.nets())

    def nets(self) -> list[torch.nn.Module]:
        """Return the live trained modules: those with a parameter that an optimizer steps, else the last one called."""
        alive = [module for one in self.modules if (module := one()) is not None]
        groups = [group for one in self.optimizers if (optimizer := one()) for group in optimizer.param_groups]
        stepped = {id(parameter) for group in groups for parameter in group["params"]}
        found = [net for net in alive if any(id(parameter) in stepped for parameter in net.parameters())]
        return found or alive[-1:]  # an optimizer may step copies, as DeepSpeed's and FSDP1's do

    def boundary(self) -> None:
        """End the current step and begin the next one."""
        meter = self.meter
        assert meter is not None
        if self.asked["job"]:  # the time between two steps may be in another part
            self.part("steps")
        self.stepped = self.forward_seen = False
        self.settled += 1
        self.built = self.describe()
        if meter.step() is meter.count:
            meter.count.tokens = self.volume.tokens_of(-1)
        meter.step_end()
        if meter.asked.measured_steps is not None and meter.index == len(meter.plan):
            self.finish(meter)
            return
        self.volume.begin_step()
        meter.step_begin()

    def publish(self, own: dict[str, Any]) -> dict[str, Any]:
        """Report and return the columns once the measured steps are over."""
        meter = self.meter
        assert meter is not None
        if own.get("parameters_without_gradient") != 0:  # in the first step; another may have reached more of them
            own = own | model_description.script(self.nets(), [one for ref in self.optimizers if (one := ref())])
        first = len(meter.plan) if meter.asked.measured_steps is None else meter.asked.warmup_steps + 1
        steps = range(first, first + own["measured_steps"])
        row = own | self.undisturbed(steps, own)
        disturbed = meter.plan.index(meter.probe) in self.elsewhere and not self.each_time(steps)
        for phase, unknown, why in (("optimizer", disturbed, DISTURBED), ("load", self.late, UNLOADED)):
            if unknown:
                row |= dict.fromkeys((f"{phase}_peak_allocated_bytes", f"{phase}_peak_reserved_bytes"))
                row["notes"] = [*row["notes"], why]
        self.told = {"columns": row, "complete": False}
        self.write()
        return row

    def undisturbed(self, steps: Sequence[int], own: dict[str, Any]) -> dict[str, Any]:
        """Return columns of speed over the steps in which the script did nothing else, or over all if `each_time`."""
        from vramsweep.runners.measure import step_meter

        clean = [step for step in steps if step not in self.elsewhere]
        if own["elapsed_s"] is None or len(clean) == len(steps):
            return self.volume.columns(clean, own["elapsed_s"])
        what = f"{len(steps) - len(clean)} of {len(steps)} measured steps evaluated or saved; they count for memory"
        if self.each_time(steps):
            return self.volume.columns(list(steps), own["elapsed_s"]) | {"notes": [*own["notes"], f"{what} and speed"]}
        notes = [*own["notes"], f"{what}, not for speed"]
        times = [seconds for step, seconds in zip(steps, own["step_times_s"], strict=True) if step in clean]
        energy = dict.fromkeys(("gpu_energy_j", "gpu_power_w", "issue_fraction", "bound_by"))
        return energy | step_meter.timed(times) | self.volume.columns(clean, sum(times)) | {"notes": notes}

    def each_time(self, steps: Sequence[int]) -> bool:
        """Return whether most steps evaluate or save, so that this is part of them: the model is its own reference."""
        return 2 * len(self.elsewhere.intersection(steps)) > len(steps)

    def finish(self, meter: Meter) -> None:
        """Report once all requested steps are over; stop observing, and end the process if requested."""
        self.told = {"columns": meter.columns(), "complete": True}
        self.write()
        self.close()
        if self.asked["stop"]:
            self.leave()

    def close(self) -> None:
        """Stop observing."""
        self.done = True
        self.hooks.disarm()
        if self.meter is not None:
            with contextlib.suppress(Exception):
                self.meter.abandon()

    def leave(self) -> None:
        """End this process as a trial's worker ends, after other ranks have measured, because they may wait for it."""
        gone = time.monotonic() + MEETING_S
        while self.others_measure() and time.monotonic() < gone:
            time.sleep(0.02)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        time.sleep(HELD_S)
        os._exit(0)

    def others_measure(self) -> bool:
        """Return whether other ranks of this training have not completed their steps yet."""
        size, complete = self.ranks()[1], 0
        if size < 2:
            return False
        for path in self.folder.glob(SEEN.format("*")):
            with contextlib.suppress(OSError, ValueError):
                complete += bool(json.loads(path.read_text()).get("complete"))
        return complete < size

    def block_ended(self) -> None:
        """Finish when the training is over. Its last step is not counted, because its end is unknown."""
        if self.meter is not None and not self.done:
            if self.asked["job"]:
                self.meter.gauges.enter(None)
            self.meter.finish()
            if self.meter.row is not None:
                self.told = {"columns": self.meter.columns(), "complete": True}
        self.write()

    def ended(self) -> None:
        """Report the end of the process, with the exception that ended it, if any."""
        with contextlib.suppress(Exception):
            error = getattr(sys, "last_value", None)  # set before any excepthook runs, even the script's own
            if isinstance(error, BaseException):
                from vramsweep.runners.rank import oom_details

                self.told["error"] = oom_details.describe_oom(error, self.meter.gauges.device if self.meter else None)
            if self.asked["job"]:
                try:
                    self.block_ended()
                except Exception as problem:
                    self.broke(problem)
            self.done = True
            self.told["ended"] = True
            self.write()

    # ---- reports

    def describe(self) -> dict[str, Any]:
        """Return columns about what was built and the environment in which it runs."""
        if self.built is not None:
            return self.built
        optimizers = [optimizer for one in self.optimizers if (optimizer := one()) is not None]
        return model_description.script(self.nets(), optimizers) | {
            "torch_version": torch.__version__,
            "transformers_version": getattr(sys.modules.get("transformers"), "__version__", None),
            "cuda_version": torch.version.cuda,
            "cpu_threads": torch.get_num_threads(),
        }

    def write(self) -> None:
        """Write all that is known by now to this process's file."""
        gauges = None if self.meter is None else self.meter.gauges
        gpu = None if gauges is None or not gauges.cuda else gauges.device.index
        said = {
            "pid": os.getpid(),
            "at": time.time(),
            "rank": self.ranks()[0],
            "world_size": self.ranks()[1],
            "program": sys.argv[0] if sys.argv else None,
            "problem": self.problem,
            "ended": False,  # by itself, as far as Python knows
            "variables": {n: os.environ.get(n) for n, v in self.asked["variables"].items() if os.environ.get(n) != v},
            "index": None if self.meter is None else self.meter.index,
            **self.counts,
            **self.volume.said(),
            **({} if gpu is None else {"card": gpu} | model_description.allocator()),
            **self.told,
        }
        aside = self.file.with_suffix(".new")
        aside.write_text(json.dumps(said))
        aside.rename(self.file)

    @property
    def file(self) -> Path:
        """Return the path of this process's reports."""
        return self.folder / SEEN.format(os.getpid())

    def ranks(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks, also once the process group is gone."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.place = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return self.place


def _device(held: Sequence[torch.Tensor]) -> torch.device:
    """Return the device on which a training with these parameters runs."""
    place = next((one.device for one in held if one.device.type in ("cpu", "cuda")), torch.device("cpu"))
    if place.type == "cpu" and torch.cuda.is_initialized():  # parameters that are offloaded, or on no device
        place = torch.device("cuda")
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return place


def _cards() -> int:
    """Return the number of GPUs that the script may use. It asks NVML; `is_available` asks the driver, after which no
    forked child could use a GPU."""
    return torch.cuda.device_count()
