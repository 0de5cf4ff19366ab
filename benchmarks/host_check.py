"""Compare predicted host memory with real processes on this CPU: DeepSpeed's storages, loading, imports, workers.

    python benchmarks/host_check.py [WORD...] [--megabytes 512]

WORDs choose the lines of the table: those whose names contain every WORD.

- DeepSpeed: real ranks train over gloo with `offload_optimizer`. The storages that its optimizer keeps in host memory
  after the third step are compared with those of the trace, byte for byte.
- Loading: a fresh process reads a checkpoint with `from_pretrained`; in fp32 it has about `--megabytes`. Its anonymous
  and shared memory, read every 2 ms, is compared with the prediction.
- Imports and data loader workers: measures the sizes that harness/machine/host_memory.py assumes for a process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import sharded_check as sharded  # noqa: E402
import torch  # noqa: E402

from vramsweep.harness.allocator.config import AllocatorConfig  # noqa: E402
from vramsweep.harness.hardware import gpu_lookup  # noqa: E402
from vramsweep.harness.machine import host_memory, machine  # noqa: E402
from vramsweep.harness.spec import (  # noqa: E402
    runner_table,
    trial,
    trial_parser,
)
from vramsweep.runners.measure import counters  # noqa: E402
from vramsweep.runners.predict import make_trace  # noqa: E402
from vramsweep.runners.predict.replay_trace import host_replay  # noqa: E402
from vramsweep.runners.trace.trace_data import Trace  # noqa: E402
from vramsweep.runners.worker import worker  # noqa: E402

DTYPES = ("float32", "bfloat16")
CARD = {"name": "simulated", "gpu": "a100-80gb"}
KEPT = (  # attributes of ZeRO's optimizers (deepspeed 0.19, runtime/zero) that offload_optimizer puts into host memory
    "single_partition_of_fp32_groups", "param_buffer_of_bit16_for_cpu_offload_groups",
    "temp_grad_buffer_for_cpu_offload", "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer",
)  # fmt: skip


def offloaded(stage: int, precision: str, accumulated: int = 1) -> sharded.Case:
    """Return a DeepSpeed case whose optimizer state is in host memory."""
    options = {"zero_optimization": sharded.SMALL}
    name = f"ZeRO-{stage}, accumulation {accumulated}"
    return sharded.case(name, "deepspeed", f"zero{stage}", precision, options=options,
                        offload_optimizer=True, grad_accum=accumulated)  # fmt: skip


CASES = [offloaded(stage, precision) for stage in (1, 2, 3) for precision in ("bf16", "fp32")] + [
    offloaded(2, "bf16", 2),
    offloaded(3, "bf16", 2),
]


class Kept(sharded.Rests):
    """A meter that notes the bytes that ZeRO's optimizer keeps in host memory after each step."""

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        super().step_end(loss)
        self.found["host"] = kept()


def kept() -> int:
    """Return the bytes that this process's DeepSpeed optimizers keep in host memory, without one-element tensors."""
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    storages: dict[int, int] = {}
    for zero in [o for o in gc.get_objects() if issubclass(type(o), ZeROOptimizer)]:
        held = [getattr(zero, name, None) for name in KEPT]
        held += [zero.optimizer.state, getattr(zero, "accumulated_grads_in_cpu", None)]
        for tensor in tensors(held):
            for one in (tensor, tensor.grad if tensor.is_leaf else None):
                if one is not None and one.numel() > 1:
                    storages[one.untyped_storage()._cdata] = one.untyped_storage().nbytes()
    return sum(storages.values())


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for v in value.values() for t in tensors(v))
    elif isinstance(value, (list, tuple)):
        yield from (t for v in value for t in tensors(v))


def traced(chosen: trial.Trial) -> Trace:
    """Trace the trial."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        return make_trace.trace_trial(chosen, gpu_lookup.gpu_named("a100-80gb"), Path(folder), sharded.runner(chosen))[
            0
        ]


def predicted_kept(case: sharded.Case, world: int) -> dict[str, int]:
    """Return the trace's host bytes between steps, without one-element tensors, and those that page-locking adds."""
    host = traced(sharded.make(case, world, CARD)).host
    events = [event for event in host.events if host.sizes[abs(event) - 1] > 8]
    live = sum((1 if event > 0 else -1) * host.sizes[abs(event) - 1] for event in events)
    return {"host": live, "rounding": host_replay(host, AllocatorConfig()).breakdown["rounding"]}


def loaded(path: str, dtype: str) -> dict[str, int]:
    """Return the bytes that `from_pretrained` takes at its peak, and keeps: anonymous and shared memory."""
    from transformers import AutoModelForCausalLM

    worker.preload("torch")
    process = counters.Process()
    counters.LOOK_S = 0.002
    process.watch()
    net = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    process.rest()
    kept, begun, peak = process.held(), process.baseline, process.peak
    assert kept is not None and begun is not None and peak is not None and net is not None
    return {"peak": peak - begun, "kept": kept - begun}


def predicted_load(path: str, dtype: str) -> dict[str, int]:
    """Predict the peak host bytes of a trial that loads this checkpoint with its weights in `dtype`."""
    values = {
        "model": {"name": "hub", "path": path}, "seq_len": 8, "micro_batch": 1, "weights": "pretrained",
        "precision": "bf16_pure" if dtype == "bfloat16" else "fp32", "runner": {"name": "torch"}, "device": CARD,
        "allocator": {"name": "default"}, "protocol": {"name": "check", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    return {"peak": host_replay(traced(trial_parser.parse(values)).host, AllocatorConfig()).peak}


def imported(runner: str) -> dict[str, int]:
    """Return the bytes of anonymous and shared memory after a runner's imports."""
    worker.preload(runner)
    return {"held": counters.Process().held() or 0}


def workers(count: int) -> dict[str, int]:
    """Return the private bytes of `count` data loader workers after 200 batches, next to a rank that holds 1 GiB."""
    from torch.utils.data import DataLoader
    from transformers import default_data_collator

    big = torch.ones(1 << 28)
    sample = {"input_ids": torch.randint(0, 1000, (512,)), "labels": torch.randint(0, 1000, (512,))}
    samples: Any = [sample] * 4000  # a list is a data set for DataLoader
    batches = iter(DataLoader(samples, 8, num_workers=count, collate_fn=default_data_collator))
    for _ in range(200):
        next(batches)
    found = counters.Process().started()
    assert found is not None and big is not None
    return {"own": found}


def fresh(function: Callable[..., dict[str, int]], *arguments: Any) -> dict[str, int]:
    """Call the function in a new interpreter, because a forked one has its parent's pages; return its result."""
    import json
    import subprocess

    code = f"import json, host_check; print(json.dumps(host_check.{function.__name__}(*{arguments!r})))"
    here = Path(__file__).resolve()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, here.parents[:2])), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def save(folder: Path, megabytes: int) -> dict[str, str]:
    """Save a checkpoint in each dtype, of about `megabytes` in fp32; return the paths by dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**sharded.MODEL, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8,
             "num_key_value_heads": 8, "num_hidden_layers": max(1, round(megabytes / 51))}  # fmt: skip
    paths = {}
    for dtype in DTYPES:
        paths[dtype] = str(folder / dtype)
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **sizes), dtype=getattr(torch, dtype))
        net.save_pretrained(paths[dtype], max_shard_size="100MB")
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only lines whose name contains each word")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the checkpoint in fp32")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")

    def chosen(name: str) -> bool:
        return all(word.lower() in name.lower() for word in given.words)

    packages = ("torch", "transformers", "accelerate", "deepspeed", "safetensors")
    versions = ", ".join(f"{name} {machine.version(name)}" for name in packages)
    print(f"{versions}; Python {platform.python_version()}; {machine.cpu_name()}\n")
    print("| | real, B | predicted, B | |\n|---|---|---|---|")
    worker.preload("deepspeed")
    sharded.Rests = Kept  # type: ignore[misc]
    for case in CASES:
        for world in (1, 2):
            if chosen(name := f"{case['name']}, ranks {world}"):
                real, predicted = sharded.real(case, world), sharded.forked(predicted_kept, case, world).recv()
                line(name, real["host"], predicted["host"], f"rounding if page-locked {predicted['rounding']:,}")
    with tempfile.TemporaryDirectory() as folder:
        loads = [(a, b) for a in DTYPES for b in DTYPES if chosen(f"load {a} as {b}")]
        paths = sharded.forked(save, Path(folder), given.megabytes).recv() if loads else {}
        for stored, dtype in loads:
            real, predicted = fresh(loaded, paths[stored], dtype), fresh(predicted_load, paths[stored], dtype)
            line(f"load {stored} as {dtype}", real["peak"], predicted["peak"], f"kept {real['kept']:,}")
    for entry in runner_table.RUNNERS:
        if chosen(f"imports of {entry.name}"):
            line(f"imports of {entry.name}", fresh(imported, entry.name)["held"], entry.host_bytes)
    for count in (1, 4):
        if chosen(name := f"each of {count} data loader workers"):
            line(name, fresh(workers, count)["own"] // count, host_memory.LOADER_WORKER)


def line(name: str, real: int, predicted: int, remark: str = "") -> None:
    """Print one row of the table, with predicted minus real bytes."""
    off = "exact" if predicted == real else f"{predicted - real:+,}"
    print(f"| {name} | {real:,} | {predicted:,} ({off}) | {remark} |", flush=True)


if __name__ == "__main__":
    main()
