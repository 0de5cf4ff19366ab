"""A worker as a program of its own, with something made different: `python patched_worker.py FOLDER [WHAT ...]`.

more: rank 1 holds 64 MiB more than rank 0. fail: it runs out of memory in the step whose FLOPs are counted, where
rank 0 would wait for it for ever. killed, raises, exits, leaves (with status 0): rank 1 ends so before its first step,
where rank 0 waits for it too. fp16: DeepSpeed takes any CPU for one with half precision. averages: rank 0 writes a line
to the folder's file `averages` for each bucket of gradients that is averaged. late: rank 1 comes half a second late to
the measured steps; a line in the file `order` for each rank that is there, and for each mark of its clock. A test
cannot fork ranks itself: its process has run tensor operations.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from vramsweep.runners.measure.counters import Clock
from vramsweep.runners.measure.flop_step import Count
from vramsweep.runners.measure.step_meter import Measured
from vramsweep.runners.model import build
from vramsweep.runners.rank import process_end
from vramsweep.runners.worker import worker

HELD: list[torch.Tensor] = []


def data(trial: Any, original: Any = build.data) -> Any:
    if os.environ["RANK"] == "1":
        HELD.append(torch.ones(64 << 20, dtype=torch.uint8))
    return original(trial)


def ending(how: str) -> Any:
    def data(trial: Any) -> Any:
        if os.environ["RANK"] != "1":
            return original(trial)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how in ("exits", "leaves"):
            os._exit(7 if how == "exits" else 0)
        raise ValueError("the data of this rank are bad")

    original = build.data
    return data


def enter(count: Count, original: Any = Count.enter) -> None:
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    original(count)


class Averaging(DistributedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, averaged)


def averaged(state: Any, bucket: Any) -> Any:
    if os.environ["RANK"] == "0":
        with (Path(sys.argv[1]) / "averages").open("a") as file:
            file.write("one\n")
    return allreduce_hook(None, bucket)


def telling(what: str, original: Any) -> Any:
    def tell(self: Any) -> None:
        if what == "there" and os.environ["RANK"] == "1":
            time.sleep(0.5)
        with (Path(sys.argv[1]) / "order").open("a") as file:
            file.write(f"{what}\n")
        original(self)

    return tell


averaged.__annotations__.clear()  # which torch compares with its own types, and these are texts

if __name__ == "__main__":
    folder, *what = sys.argv[1:]
    if "averages" in what:
        torch.nn.parallel.DistributedDataParallel = Averaging  # type: ignore[misc]
    for how in {"killed", "raises", "exits", "leaves"}.intersection(what):
        build.data = ending(how)
    if "more" in what:
        build.data = data
    if "fail" in what:
        Count.enter = enter  # type: ignore[method-assign]
    if "late" in what:
        Measured.start = telling("there", Measured.start)  # type: ignore[method-assign]
        Clock.mark = telling("mark", Clock.mark)  # type: ignore[method-assign]
    if "fp16" in what:
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        CPU_Accelerator.is_fp16_supported = lambda self: True
    process_end.exit_now(worker.main(Path(folder), os.getppid()))
