"""The process group of a traced script: the script is rank 0, and the other ranks do not exist.

Collectives return at once and move nothing, as in a simulated run of our own runners (process_group.py). What ranks
exchange is rank 0's own. FSDP, DDP and DeepSpeed work as there, but devices have CUDA's names (traced_devices.py).
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d, run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _runtime_utils
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp2_api
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.rank import rank_launcher
from vramsweep.runners.scripts.traced_devices import TwoMemories
from vramsweep.runners.shardings import ddp, fsdp_traced, stream_events
from vramsweep.runners.trace import cuda_emulation

LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.launch"}  # and their modules
# torch.cuda's arguments
_ANY = {"__init__": lambda *args, **kwargs: None, "elapsed_time": lambda *events: float("nan")}
_STREAM, _EVENT = (type(kind.__name__, (kind,), _ANY) for kind in (torch.cpu.Stream, torch.cpu.Event))


def launched(module: str, words: Sequence[str], trial: Trial) -> tuple[list[str], dict[str, str]]:
    """Return the words that rank 0 of a launcher's command gives to Python, and its environment variables."""
    found: list[Any] = [(run.get_args_parser().parse_args(words), {})] if module == LAUNCHERS["torchrun"] else []
    if not found:
        from accelerate.commands import launch

        started = (run, "run", lambda args: found.append((args, dict(os.environ))))
        with patched([started, (torch.cuda, "device_count", lambda: trial.world_size)]):
            args = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))[0]
            if args.use_deepspeed:
                raise InvalidTrial("accelerate launch --use_deepspeed cannot be predicted; use runner=deepspeed")
            launch.multi_gpu_launcher(args)
    args, variables = found[0]
    each = trial.world_size if args.nproc_per_node in ("auto", "gpu") else int(args.nproc_per_node)
    size = each * run.parse_min_max_nnodes(args.nnodes)[1]
    told = rank_launcher.environment(0, size, args.master_port or 29500, "simulated", os.environ.get("OMP_NUM_THREADS"))
    variables |= told | {"LOCAL_WORLD_SIZE": str(each)}
    return [*["-m"] * bool(args.module), args.training_script, *args.training_script_args], variables


class Ranks(contextlib.ExitStack):
    """The ranks of one traced script, `size` of them; inside, a process group that the script makes is simulated."""

    def __init__(self, trial: Trial, memories: TwoMemories) -> None:
        super().__init__()
        self.trial, self.memories, self.size, self._join = trial, memories, 1, dist.init_process_group
        if dist.is_initialized():
            dist.destroy_process_group()  # an earlier trial's, in this process

    def replacements(self) -> Iterator[Replacement]:
        """Yield the functions by which a script joins a group and its ranks exchange objects, with stand-ins."""
        answers: dict[str, Any] = {
            "init_process_group": self.join,
            "get_backend": lambda group=None: "nccl",
            "is_nccl_available": lambda: True,
            **dict.fromkeys(("barrier", "monitored_barrier", "broadcast_object_list"), lambda *args, **kwargs: None),
            "gather_object": lambda one, every=None, *_, **__: (
                every and every.__setitem__(slice(None), [one] * len(every))
            ),
            "scatter_object_list": lambda out, given=None, *_, **__: given and out.__setitem__(0, given[0]),
            "all_gather_object": lambda every, one, group=None: every.__setitem__(slice(None), [one] * len(every)),
        }
        for owner in (dist, distributed_c10d):
            yield from ((owner, *one) for one in answers.items())
        yield torch.multiprocessing, "spawn", lambda fn, args=(), *rest, **kwargs: fn(0, *args)
        yield torch.cuda.nccl, "version", lambda: (2, 27, 5)

    def join(
        self, backend: Any = None, method: Any = None, timeout: Any = None, world_size: int = -1, *_: Any, **__: Any
    ) -> None:
        """Make the script's process group; let the libraries that divide a model work on fake tensors."""
        self.size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "0"))
        if not self.size:
            raise InvalidTrial("init_process_group is given no number of ranks; use torchrun --nproc-per-node=N")
        if self.size > 1:
            self.memories.tracer.trace.not_covered.setdefault("ranks", [])
        with _disable_current_modes():
            self._join("fake", store=FakeStore(), rank=0, world_size=self.size)
        self.enter_context(patched(self._libraries(), create=True))
        self.enter_context(ddp.traced(self.trial))
        if "deepspeed" in sys.modules:
            from vramsweep.runners.shardings import zero_traced
            from vramsweep.runners.techniques import deepspeed_adam

            self.enter_context(zero_traced.traced(self.trial))
            self.enter_context(deepspeed_adam.around(self.trial, torch.device("cpu")))

    def _libraries(self) -> Iterator[Replacement]:
        tracer, wrap, modes = self.memories.tracer, FullyShardedDataParallel.__init__, cuda_emulation.CudaIsHere

        def wrapped(*args: Any, **kwargs: Any) -> None:
            tracer.noting = True  # FSDP2 and DDP free nothing that another stream may use
            wrap(*args, **kwargs)

        @contextlib.contextmanager
        def here() -> Iterator[None]:
            with modes(), self.memories:
                yield

        yield from stream_events.replaced(tracer)
        tracer.noting = False
        for module in (_flat_param, _runtime_utils):  # FSDP1's own leaves out a CPU's tensors
            yield module, "_no_dispatch_record_stream", lambda tensor, stream: tensor.record_stream(stream)
        yield FullyShardedDataParallel, "__init__", wrapped
        yield fsdp2_api, fsdp_traced.DEFAULT_MESH, lambda *args, **kwargs: init_device_mesh("cuda", (self.size,))
        yield DeviceMesh, "__init__", _disable_current_modes()(DeviceMesh.__init__)
        yield cuda_emulation, "CudaIsHere", here  # in backward passes, where hooks ask tensors for their devices
        # a tensor saved within an operator has the trace's device; in the backward pass its copy has CUDA's name
        yield torch.utils.checkpoint._allowed_determinism_checks_to_fns, "default", lambda one: (one.shape, one.dtype)
        # fake mode looks up earlier results by an operator's arguments, and groups cannot be compared
        yield torch.ScriptObject, "__eq__", lambda one, other: one is other
        streams = {"stream": torch.cpu.stream, "current_stream": torch.cpu.current_stream}
        yield from ((torch.cuda, *one) for one in {**streams, "Stream": _STREAM, "Event": _EVENT}.items())
