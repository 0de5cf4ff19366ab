"""Sharded training, predicted against what real ranks hold on this CPU: every way of sharding, one and two ranks.

    python benchmarks/sharded_check.py [WORD...] [--worlds 1,2] [--json]

Words choose the cases whose names hold all of them.

Nothing is timed. The real ranks train over gloo while every tensor storage is counted; the prediction is the runner
traced on fake tensors over a fake process group, as device=simulated does. Both count bytes of rank 0: at rest after
everything is built, at rest between steps, and the largest in each phase of the third step. Left out on both sides:
token ids, one-element tensors, which are on the host for the one and on the device for the other, and CUDA's
workspaces. The real ranks' optimizer updates all parameters at once, as on CUDA, not one after the other.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
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
from deepspeed.runtime import base_optimizer  # noqa: E402

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


OWN_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}


def ds_config(stage: int, **more: Any) -> dict[str, str]:
    """A file as users of the Trainer have it, with buckets of the size above; what `more` says goes over it."""
    zero = {"stage": stage, **SMALL, **more.pop("zero_optimization", {})}
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    text = json.dumps({**auto, "zero_optimization": zero, **more}, sort_keys=True)
    path = Path(tempfile.gettempdir()) / f"ds_config-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text)
    return {"ds_config": str(path)}


CASES = [
    case("ZeRO-0", "deepspeed", "zero0", "fp32", **DEEPSPEED),
    *(case(f"ZeRO-{n}", "deepspeed", f"zero{n}", p, **DEEPSPEED) for p in ("bf16", "fp32") for n in (1, 2, 3)),
    *(case("ZeRO-3 whole first", "deepspeed", "zero3", p, zero_init=False, **DEEPSPEED) for p in ("bf16", "fp32")),
    case("Trainer ZeRO-0", "trainer", "zero0", "fp32", **ds_config(0)),
    *(case(f"Trainer ZeRO-{n}", "trainer", f"zero{n}", p, **ds_config(n)) for p in ("bf16", "fp32") for n in (1, 2, 3)),
    *(
        case("Trainer ZeRO-3 whole first", "trainer", "zero3", p, zero_init=False, **ds_config(3))
        for p in ("bf16", "fp32")
    ),
    *(
        case(
            f"Trainer ZeRO-{n} {'+'.join(where)}",
            "trainer",
            f"zero{n}",
            p,
            **dict.fromkeys(where, True),
            **ds_config(n, zero_optimization={axis: {"device": "cpu"} for axis in where}, **(OWN_ADAM if own else {})),
            **({"optimizer": "deepspeed_cpu_adam"} if own else {}),
        )
        for n, where, own, p in (
            (2, ("offload_optimizer",), False, "bf16"),
            (2, ("offload_optimizer",), True, "fp32"),
            (3, ("offload_optimizer",), True, "bf16"),
            (3, ("offload_param",), False, "bf16"),
            (3, ("offload_param",), False, "fp32"),
            (3, ("offload_optimizer", "offload_param"), True, "bf16"),
        )
    ),
    *(case(f"Trainer ZeRO-{n} LoRA", "trainer", f"zero{n}", "bf16", adapter="lora", **ds_config(n)) for n in (2, 3)),
    case("ZeRO-3 LoRA", "deepspeed", "zero3", "bf16", adapter="lora", **DEEPSPEED),
    *(case("DDP", "torch", "ddp", p) for p in ("fp32", "bf16")),
    *(case("Trainer DDP", "trainer", "ddp", p) for p in ("fp32", "bf16")),
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


def impossible(case: Case) -> str | None:
    """Why this machine cannot run the case, as for want of an optional package; None if it can."""
    try:
        make(case, 1, {"name": "cpu"})
    except trial.InvalidTrial as error:
        return str(error)
    return None


def runner(chosen: trial.Trial) -> Any:
    """The module that drives it."""
    return importlib.import_module(registry.runner(chosen.runner.name).module)


class Rests:
    """A measure.StepMeter that notes what is alive at rest and the peaks of the third step's phases, in bytes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.index = rank, 0
        self.found: dict[str, int] = {}
        self.live = LiveBytes()

    def built(self, describe: Any, skipped: Any = None) -> None:
        self.found["built"] = resting() - offloaded()

    def step_begin(self) -> None:
        if self.index == 2:
            self.apart = resting()
            self.live.__enter__()
            self.apart = self.live.live - self.apart + offloaded()  # ids and counters, and what is not the device's

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        if self.index == 2:
            self.mark("optimizer")
            self.live.__exit__(None, None, None)
        del loss
        self.found["rest"] = resting() - offloaded()
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


def offloaded() -> int:
    """Bytes of what DeepSpeed's optimizer keeps in host memory, which a CPU cannot tell from the device's."""
    zero = next((o for o in gc.get_objects() if issubclass(type(o), base_optimizer.ZeROOptimizer)), None)
    names = ["param_groups_fp16_flat_cpu_memory"]
    kept: list[Any] = []
    if getattr(zero, "offload_optimizer", False) or getattr(zero, "cpu_offload", False):
        masters = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")
        names += [*masters, "grad_partitions_flat_buffer", "temp_grad_buffer_for_cpu_offload"]
        names += ["param_buffer_of_bit16_for_cpu_offload_groups"]
        for master in (tensor for name in masters for tensor in getattr(zero, name, ())):
            kept += [master.grad, *zero.optimizer.state.get(master, {}).values()]
    for value in (getattr(zero, name, None) for name in names):
        kept += value if isinstance(value, list) else [value]
    tensors = [tensor for tensor in kept if isinstance(tensor, torch.Tensor) and tensor.numel() > 1]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


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
    ids *= chosen.runner.name != "trainer"  # which leaves it to the loader to bring it to the device
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
    named = [one for one in CASES if all(word.lower() in one["name"].lower() for word in chosen.words)]
    lacking = {one["name"]: reason for one in named if (reason := impossible(one)) is not None}
    for name, reason in lacking.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    cases = [one for one in named if one["name"] not in lacking]
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
