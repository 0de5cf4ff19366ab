"""Sharded training, predicted against what real ranks hold on this CPU: every way of sharding, one and two ranks.

    python benchmarks/sharded_check.py [WORD...] [--worlds 1,2] [--json]

Words choose the cases whose names hold all of them.

Nothing is timed. The real ranks train over gloo while every tensor storage is counted; the prediction is the runner
traced on fake tensors over a fake process group, as device=simulated does. Both count bytes of rank 0: at rest after
everything is built, at rest between steps, and the largest in each phase of the third step. Left out on both sides:
token ids, one-element tensors, which are on the host for the one and on the device for the other, CUDA's workspaces,
and gloo's own copies: it reduces and scatters in a copy of the input, which NCCL does without. The real ranks'
optimizer updates all parameters at once, as on CUDA, not one after the other.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from vramsweep.harness import gpus, registry, trial  # noqa: E402
from vramsweep.runners import build, simulated, worker  # noqa: E402
from vramsweep.runners.dispatch import LiveBytes  # noqa: E402
from vramsweep.runners.instruments import backward_boundaries  # noqa: E402
from vramsweep.runners.trace import Trace  # noqa: E402

FORK = multiprocessing.get_context("fork")
COLUMNS = ("built", "rest", "forward", "backward", "optimizer")
MODEL = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}  # the default's buckets take 1 GB and more
Case = dict[str, Any]  # a trial's values beside those that all cases share, and its name


def case(name: str, runner: str, sharding: str, precision: str, **over: Any) -> Case:
    """A case; `options` are the runner's."""
    options = over.pop("options", {})
    about = {"sharding": sharding, "precision": precision, "runner": {"name": runner, "options": options}}
    return {"name": f"{name}, {precision}", **about, **over}


DEEPSPEED = {"options": {"zero_optimization": SMALL}}
CASES = [
    case("ZeRO-0", "deepspeed", "zero0", "fp32", **DEEPSPEED),
    *(case(f"ZeRO-{n}", "deepspeed", f"zero{n}", p, **DEEPSPEED) for p in ("bf16", "fp32") for n in (1, 2, 3)),
    *(case("FSDP2", "torch", "fsdp2", p) for p in ("fp32", "bf16")),
]


def make(case: Case, world: int, device: dict[str, str]) -> trial.Trial:
    """One trial of the check."""
    values = {
        "model": {"name": "check", "model_type": "qwen2", "config": MODEL},
        "seq_len": 64, "micro_batch": 2, "world_size": world, "device": device,
        "allocator": {"name": "default"}, "protocol": {"name": "check", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    return trial.parse(values | {key: value for key, value in case.items() if key != "name"})


def runner(chosen: trial.Trial) -> Any:
    """The module that drives it."""
    return importlib.import_module(registry.runner(chosen.runner.name).module)


class WithoutGloo(LiveBytes):
    """Live bytes but those of tensors that no operator made: gloo's, first seen when it hands out a view of one
    (ProcessGroupGloo.cpp, reduce_scatter_tensor_coalesced)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view and isinstance(args[0], torch.Tensor) and args[0].untyped_storage()._cdata not in self._sizes:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Rests:
    """A measure.StepMeter that notes what is alive at rest and the peaks of the third step's phases, in bytes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.index = rank, 0
        self.found: dict[str, int] = {}
        self.live = WithoutGloo()

    def built(self, describe: Any, skipped: Any = None) -> None:
        self.found["built"] = resting()

    def step_begin(self) -> None:
        if self.index == 2:
            self.apart = resting()
            self.live.__enter__()
            self.apart = self.live.live - self.apart  # ids and counters

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        if self.index == 2:
            self.mark("optimizer")
            self.live.__exit__(None, None, None)
        del loss
        self.found["rest"] = resting()
        self.index += 1

    def mark(self, phase: Any) -> None:
        if self.index == 2:
            self.found[phase] = self.live.take() - self.apart


def resting() -> int:
    """Bytes of the floating-point storages that are alive now, one-element ones left out."""
    gc.collect()
    storages = {}
    for tensor in [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]:
        for held in (tensor, tensor.grad if tensor.is_leaf else None):
            if held is not None and held.is_floating_point() and held.device.type == "cpu":
                held = getattr(held, "_local_tensor", held)
                storage = held.untyped_storage()
                storages[storage._cdata] = storage.nbytes() if storage.nbytes() > held.element_size() else 0
    return sum(storages.values())


def real(case: Case, world: int) -> dict[str, int]:
    """What rank 0 of `world` real ranks held."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [forked(as_rank, case, world, rank, port) for rank in range(world)]
    found = [dict(rank.recv()) for rank in ranks]
    return found[0]


def forked(function: Callable[..., dict[str, int]], *arguments: Any) -> Any:
    """Call the function in a process of its own; the result comes through the connection that is returned."""
    here, there = FORK.Pipe(duplex=False)

    def run() -> None:
        there.send(function(*arguments))
        os._exit(0)  # without interpreter teardown, as a worker ends

    FORK.Process(target=run).start()
    there.close()
    return here


def as_rank(case: Case, world: int, rank: int, port: int) -> dict[str, int]:
    """Train as one real rank."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()})
    chosen = make(case, world, {"name": "cpu"})
    for owner in (importlib.import_module("torch.optim.optimizer"), torch.utils._foreach_utils):
        owner._get_foreach_kernels_supported_devices = lambda: ["cpu"]
    meter = Rests(rank)
    build.prepare(chosen)
    boundaries = backward_boundaries(lambda: meter.mark("forward"), lambda: meter.mark("backward"))
    with boundaries, tempfile.TemporaryDirectory() as folder:
        runner(chosen).run(chosen, torch.device("cpu"), meter, Path(folder))
    return meter.found


def predicted(case: Case, world: int) -> dict[str, int]:
    """The same of the trace."""
    chosen = make(case, world, {"name": "simulated", "gpu": "a100-80gb"})
    with tempfile.TemporaryDirectory() as folder:
        trace, _ = simulated.trace_trial(chosen, gpus.named("a100-80gb"), Path(folder), runner(chosen))
    ids = 2 * 8 * chosen.micro_batch * chosen.seq_len  # a batch: token ids and labels, 8 bytes each
    return {name: size - (name != "built") * ids for name, size in sums(trace).items()}


def sums(trace: Trace) -> dict[str, int]:
    """Bytes at rest and peaks of the third step's phases, workspaces and one-element tensors left out."""
    found: dict[str, int] = {}
    live = start = 0
    for mark in trace.marks:
        peak = live
        for event in trace.events[start : mark.end]:
            number = abs(event) - 1
            if event and trace.categories[number] != "workspaces" and trace.sizes[number] > 8:
                live += trace.sizes[number] if event > 0 else -trace.sizes[number]
                peak = max(peak, live)
        start = mark.end
        if mark.step is None:
            found["built"] = live
        elif mark.step == 2:
            found[mark.phase] = max(peak, found.get(mark.phase, 0))
    return found | {"rest": live}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="parts of the cases' names")
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON instead of a table")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    cases = [one for one in CASES if all(word.lower() in one["name"].lower() for word in chosen.words)]
    for template in sorted({registry.template(make(one, 1, {"name": "cpu"})) for one in cases}):
        worker.preload(template)
    results = []
    for world in map(int, chosen.worlds.split(",")):
        for one in cases:
            found = {"real": real(one, world), "predicted": forked(predicted, one, world).recv()}
            results.append({"case": one["name"], "ranks": world, **found})
            if not chosen.json:
                print(line(results[-1]), flush=True)
    if chosen.json:
        print(json.dumps(results))


def line(result: dict[str, Any]) -> str:
    """One row of the table: real bytes, and how far the prediction is off."""
    cells = []
    for column in COLUMNS:
        bytes_, off = result["real"][column], result["predicted"][column] - result["real"][column]
        cells.append(
            f"{bytes_:,} ({'exact' if not off else f'{off:+,} B' if abs(off) < 1000 else f'{off / bytes_:+.1%}'})"
        )
    return " | ".join([f"| {result['case']}", str(result["ranks"]), *cells]) + " |"


if __name__ == "__main__":
    main()
