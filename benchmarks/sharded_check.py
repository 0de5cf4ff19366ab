"""Compare predictions of sharded training with real ranks on this CPU: every way of sharding, one and two ranks.

    python benchmarks/sharded_check.py [WORD...] [--exact] [--worlds 1,2] [--json]

WORDs choose the cases whose names contain all of them; with --exact each WORD is the whole name of a case.

Nothing is timed. The real ranks train over gloo while we count every tensor storage. The prediction traces the runner
on fake tensors over a fake process group, as device=simulated does. Both count bytes of rank 0: at rest after
everything is built, at rest between steps, and the peak of each phase of the third step. "sent" is what collectives
move in that step, all of what is gathered, scattered or reduced. Both sides leave out token ids, CUDA's workspaces and
one-element tensors, which one side has on the host and the other on the device. gloo's own copies are left out too: it
reduces and scatters in a copy of the input, and NCCL does not. The real ranks' optimizer updates all parameters at
once, as on CUDA, not one after the other.
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
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from deepspeed.runtime import base_optimizer  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from vramsweep.harness.hardware import gpu_lookup  # noqa: E402
from vramsweep.harness.spec import (  # noqa: E402
    runner_table,
    trial,
    trial_parser,
)
from vramsweep.runners.measure.counters import backward_boundaries  # noqa: E402
from vramsweep.runners.measure.dispatch_modes import (  # noqa: E402
    LiveBytes,
    gradient,
    held_by_code,
    sharded,
    storages_alive,
    tensors_alive,
)
from vramsweep.runners.model import build  # noqa: E402
from vramsweep.runners.predict import make_trace  # noqa: E402
from vramsweep.runners.rank.entry_modules import import_entry  # noqa: E402
from vramsweep.runners.trace import operator_cost  # noqa: E402
from vramsweep.runners.trace.trace_data import Trace  # noqa: E402
from vramsweep.runners.worker import worker  # noqa: E402

FORK = multiprocessing.get_context("fork")
IMPORTED: list[torch.UntypedStorage] = []  # constants of libraries, in a real rank
COLUMNS = ("built", "rest", "forward", "backward", "optimizer", "sent")
MODEL = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
SMALL = {"reduce_bucket_size": 1 << 20, "allgather_bucket_size": 1 << 20}  # the default's buckets take 1 GB and more
Case = dict[str, Any]  # a case's name, and its values besides those that all cases share


def case(name: str, runner: str, sharding: str, precision: str, **over: Any) -> Case:
    """Return a case; `options` in `over` are the runner's."""
    options = over.pop("options", {})
    about = {"sharding": sharding, "precision": precision, "runner": {"name": runner, "options": options}}
    return {"name": f"{name}, {precision}", **about, **over}


DEEPSPEED = {"options": {"zero_optimization": SMALL}}


OWN_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}}


def ds_config(stage: int, **more: Any) -> dict[str, str]:
    """Write a file as users of the Trainer have it, with the bucket sizes of SMALL; `more` overrides its keys."""
    zero = {"stage": stage, **SMALL, **more.pop("zero_optimization", {})}
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    text = json.dumps({**auto, "zero_optimization": zero, **more}, sort_keys=True)
    path = Path(tempfile.gettempdir()) / f"ds_config-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text)
    return {"ds_config": str(path)}


CASES = [
    case("ZeRO-0", "deepspeed", "zero0", "fp32", **DEEPSPEED),
    *(case(f"ZeRO-{n}", "deepspeed", f"zero{n}", p, **DEEPSPEED) for p in ("bf16", "fp32") for n in (1, 2, 3)),
    *(case("ZeRO-3 zero_init=false", "deepspeed", "zero3", p, zero_init=False, **DEEPSPEED) for p in ("bf16", "fp32")),
    case("Trainer ZeRO-0", "trainer", "zero0", "fp32", **ds_config(0)),
    *(case(f"Trainer ZeRO-{n}", "trainer", f"zero{n}", p, **ds_config(n)) for p in ("bf16", "fp32") for n in (1, 2, 3)),
    *(
        case("Trainer ZeRO-3 zero_init=false", "trainer", "zero3", p, zero_init=False, **ds_config(3))
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
    case(
        "DDP, buckets of 2 MiB as gradients",
        "torch",
        "ddp",
        "fp32",
        options={"bucket_cap_mb": 2, "gradient_as_bucket_view": True},
    ),
    case("DDP, find_unused_parameters", "torch", "ddp", "fp32", options={"find_unused_parameters": True}),
    *(
        case(f"DDP, 2 passes{each}", "torch", "ddp", "fp32", grad_accum=2, no_sync=not each)
        for each in ("", ", no_sync=false")
    ),
    *(case("Trainer DDP", "trainer", "ddp", p) for p in ("fp32", "bf16")),
    *(case("FSDP1", "torch", "fsdp1", p) for p in ("fp32", "bf16")),
    *(case("FSDP2 offload", "torch", "fsdp2", p, offload_param=True) for p in ("fp32", "bf16")),
    case("Trainer FSDP2 offload", "trainer", "fsdp2", "bf16", offload_param=True),
    *(case(f"Trainer FSDP{v}", "trainer", f"fsdp{v}", p) for v in (1, 2) for p in ("fp32", "bf16")),
    *(case("FSDP2", "torch", "fsdp2", p) for p in ("fp32", "bf16")),
]


def make(case: Case, world: int, device: dict[str, str]) -> trial.Trial:
    """Return the case as a trial of `world` ranks on the device."""
    values = {
        "model": {"name": "check", "model_type": "qwen2", "config": MODEL},
        "seq_len": 64, "micro_batch": 2, "world_size": world, "device": device,
        "allocator": {"name": "default"}, "protocol": {"name": "check", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    return trial_parser.parse(values | {key: value for key, value in case.items() if key != "name"})


def impossible(case: Case) -> str | None:
    """Return why this machine cannot run the case, such as a missing optional package; None if it can."""
    try:
        make(case, 1, {"name": "cpu"})
    except trial.InvalidTrial as error:
        return str(error)
    return None


def runner(chosen: trial.Trial) -> Any:
    """Return the module of the trial's runner."""
    return import_entry(runner_table.runner(chosen.runner.name).module)


class Sent(TorchDispatchMode):
    """Counts the bytes that collectives move."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if sharded(types):
            return NotImplemented  # the operators that DTensor makes of it come here
        if func.namespace in operator_cost.C10D and (called := operator_cost.collective(func, args)) is not None:
            self.nbytes += called.nbytes
        return func(*args, **(kwargs or {}))


class Host:
    """The storages of a real rank that FSDP2's offloading would keep in host memory; on a CPU both memories are one.

    They are the divided parameters, what FSDP2 copies to the "cpu" (gradients), the optimizer's state, and what
    operators compute from any of these. A copy that FSDP2 makes from there to the device is a copy here too.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.leaving = False  # a copy to the device is under way
        to = torch.Tensor.to

        def placed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            caller = str(sys._getframe(1).f_globals.get("__name__")).rpartition(".")[2]
            if caller == "_fsdp_param":
                self.leaving = True
                copy = tensor.clone()
                self.leaving = False
                return copy
            if caller == "_fsdp_collectives":
                with _disable_current_modes():
                    copy = tensor.clone()
                self.add(copy)
                return copy
            return to(tensor, *args, **kwargs)

        torch.Tensor.to = placed  # type: ignore[method-assign,assignment]
        register_optimizer_step_post_hook(
            lambda optimizer, *rest: self.add_all(t for state in optimizer.state.values() for t in state.values())
        )

    def add_all(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            weakref.finalize(storage, self.storages.discard, storage._cdata).atexit = False

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 1 and tensor.untyped_storage()._cdata in self.storages


class Live(LiveBytes):
    """Live bytes without those in host memory, and without the copy that gloo makes of what it reduces and scatters.

    gloo's reduce-scatter all-reduces a clone, of which each rank takes its chunk (ProcessGroupGloo.cpp,
    reduce_scatter_tensor_coalesced); NCCL makes no clone. We first see the clone when it is cut, in `Work.wait`.
    """

    def __init__(self, host: Host | None) -> None:
        super().__init__(IMPORTED)
        self.host = host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view and isinstance(args[0], torch.Tensor) and not sharded(types):
            storage = args[0].untyped_storage()
            if storage._cdata not in self._sizes:
                self._others.add(storage._cdata)
                weakref.finalize(storage, self._others.discard, storage._cdata).atexit = False
        if self.host is None or self.host.leaving or sharded(types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        stays = any(self.host.holds(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                if stays and leaf.untyped_storage()._cdata not in self._sizes:
                    self.host.add(leaf)
                self._track(leaf)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if self.host is None or storage._cdata not in self.host.storages:
            super()._follow(storage)


class Rests:
    """A StepMeter that notes the bytes alive at rest, the peaks of the third step's phases, and the bytes it sends."""

    def __init__(self, rank: int, host: Host | None) -> None:
        self.rank, self.index, self.host = rank, 0, host
        self.found: dict[str, int] = {}
        self.live, self.sent = Live(host), Sent()

    def built(self, describe: Any, skipped: Any = None) -> None:
        if self.host is not None:
            for tensor in [t for t in tensors_alive() if isinstance(t, DTensor)]:
                self.host.add(tensor)
        self.found["built"] = resting(self.host) - offloaded()

    def step_begin(self) -> None:
        if self.index == 2:
            self.apart = resting(self.host)
            self.live.__enter__()
            self.apart = self.live.live - self.apart + offloaded()  # not counted: ids, counters, and host memory
            self.sent.__enter__()

    def fed(self, batch: Any) -> None: ...

    def run_pass(self, one: Callable[[], torch.Tensor]) -> torch.Tensor:
        return one()

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        if self.index == 2:
            self.mark("optimizer")
            self.sent.__exit__(None, None, None)
            self.found["sent"] = self.sent.nbytes
            self.live.__exit__(None, None, None)
        del loss
        self.found["rest"] = resting(self.host) - offloaded()
        self.index += 1

    def mark(self, phase: Any) -> None:
        if self.index == 2:
            self.found[phase] = self.live.take() - self.apart


def resting(host: Host | None) -> int:
    """Return the bytes of the live floating-point storages, without one-element ones and those in host memory."""
    gc.collect()
    storages = {}
    for tensor in tensors_alive():
        for held in (tensor, gradient(tensor)):
            if held is not None and held.is_floating_point() and held.device.type == "cpu":
                held = getattr(held, "_local_tensor", held)
                storage = held.untyped_storage()
                storages[storage._cdata] = storage.nbytes() if storage.nbytes() > held.element_size() else 0
    storages |= {storage._cdata: storage.nbytes() for storage in held_by_code()}
    others = {storage._cdata for storage in IMPORTED} | (host.storages if host else set())
    return sum(size for key, size in storages.items() if key not in others)


def offloaded() -> int:
    """Return the bytes that DeepSpeed's optimizer keeps in host memory; a CPU cannot tell them from the device's."""
    zero = next((o for o in gc.get_objects() if issubclass(type(o), base_optimizer.ZeROOptimizer)), None)
    if zero is None:
        return 0
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
    """Train on `world` real ranks; return the bytes that rank 0 held and sent."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [forked(as_rank, case, world, rank, port) for rank in range(world)]
    found = [dict(rank.recv()) for rank in ranks]
    return found[0]


def forked(function: Callable[..., dict[str, Any]], *arguments: Any) -> Any:
    """Call the function in a new process; return the connection through which its result comes."""
    here, there = FORK.Pipe(duplex=False)

    def run() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the Trainer prints its figures
        there.send(function(*arguments))
        os._exit(0)  # without interpreter teardown, as a worker ends

    FORK.Process(target=run, daemon=True).start()  # daemon: if one fails, the others wait for it and end with us
    there.close()
    return here


def as_rank(case: Case, world: int, rank: int, port: int) -> dict[str, int]:
    """Train as one real rank; return the bytes that it held and sent."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in where.items()})
    IMPORTED.extend(storages_alive())
    chosen = make(case, world, {"name": "cpu"})
    for owner in (importlib.import_module("torch.optim.optimizer"), torch.utils._foreach_utils):
        vars(owner)["_get_foreach_kernels_supported_devices"] = lambda: ["cpu"]
    meter = Rests(rank, Host() if chosen.offload_param and chosen.sharding == "fsdp2" else None)
    build.prepare(chosen)
    boundaries = backward_boundaries(lambda: meter.mark("forward"), lambda: meter.mark("backward"))
    with boundaries, tempfile.TemporaryDirectory() as folder:
        runner(chosen).run(chosen, torch.device("cpu"), meter, Path(folder))
    return meter.found


def predicted(case: Case, world: int) -> dict[str, int]:
    """Return the bytes that the trace predicts for rank 0: held, without token ids, and sent."""
    chosen = make(case, world, {"name": "simulated", "gpu": "a100-80gb"})
    with tempfile.TemporaryDirectory() as folder:
        trace, _ = make_trace.trace_trial(chosen, gpu_lookup.gpu_named("a100-80gb"), Path(folder), runner(chosen))
    # a batch: token ids and labels, 8 bytes each; the Trainer's loader makes them outside the trace
    ids = 0 if chosen.runner.name == "trainer" else 2 * 8 * chosen.micro_batch * chosen.seq_len
    sent = sum(count * one.nbytes for one, count in trace.collectives)
    return {name: size - (name != "built") * ids for name, size in sums(trace).items()} | {"sent": sent}


def sums(trace: Trace) -> dict[str, int]:
    """Return a trace's bytes at rest and peaks of the third step, without workspaces and one-element tensors."""
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
    parser.add_argument("words", nargs="*", metavar="WORD", help="only cases whose name contains each word")
    parser.add_argument("--exact", action="store_true", help="each word is the full name of a case")
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks, joined by commas")
    parser.add_argument("--json", action="store_true", help="print bytes as JSON instead of a table")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    named = [one for one in CASES if all(word.lower() in one["name"].lower() for word in chosen.words)]
    if chosen.exact:
        if wrong := set(chosen.words) - {one["name"] for one in CASES}:
            parser.error(f"no case is named {', '.join(sorted(wrong))}")
        named = [one for one in CASES if one["name"] in chosen.words]
    lacking = {one["name"]: reason for one in named if (reason := impossible(one)) is not None}
    for name, reason in lacking.items():
        print(f"left out: {name}: {reason}", file=sys.stderr)
    cases = [one for one in named if one["name"] not in lacking]
    for template in sorted({runner_table.fork_server_name(make(one, 1, {"name": "cpu"})) for one in cases}):
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
    """Return one row of the table: real bytes, and the prediction error."""
    cells = []
    for column in COLUMNS:
        bytes_, off = result["real"][column], result["predicted"][column] - result["real"][column]
        share = f"{off:+,} B" if abs(off) < 1000 else f"{off / max(bytes_, 1):+.1%}"
        cells.append(f"{bytes_:,} ({share if off else 'exact'})")
    return " | ".join([f"| {result['case']}", str(result["ranks"]), *cells]) + " |"


if __name__ == "__main__":
    main()
