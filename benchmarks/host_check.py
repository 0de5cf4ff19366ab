"""Host memory, predicted against real processes on this CPU: what DeepSpeed keeps there, loading, imports, workers.

    python benchmarks/host_check.py [WORD...] [--megabytes 512]

Words choose the lines whose names hold all of them.

- DeepSpeed: real ranks over gloo train with `offload_optimizer`; the storages that its optimizer keeps in host memory
  are counted after the third step and compared with those of the trace, byte for byte.
- Loading: a checkpoint of about `--megabytes` in fp32 is saved and read with `from_pretrained`; anonymous memory of a
  fresh process, looked at every 2 ms, against the prediction.
- Imports and data loader workers: the sizes that harness/machine/host_memory.py takes for a process, measured.
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
    """A case of DeepSpeed with its optimizer's state in host memory."""
    options = {"zero_optimization": sharded.SMALL}
    name = f"ZeRO-{stage}, accumulation {accumulated}"
    return sharded.case(name, "deepspeed", f"zero{stage}", precision, options=options,
                        offload_optimizer=True, grad_accum=accumulated)  # fmt: skip


CASES = [offloaded(stage, precision) for stage in (1, 2, 3) for precision in ("bf16", "fp32")] + [
    offloaded(2, "bf16", 2),
    offloaded(3, "bf16", 2),
]


class Kept(sharded.Rests):
    """Notes what ZeRO's optimizer keeps in host memory after each step, in bytes."""

    def step_end(self, loss: torch.Tensor | None = None) -> None:
        super().step_end(loss)
        self.found["host"] = kept()


def kept() -> int:
    """Bytes of the storages that a DeepSpeed optimizer of this process keeps in host memory."""
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
    """The tensors in nested lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from (t for v in value.values() for t in tensors(v))
    elif isinstance(value, (list, tuple)):
        yield from (t for v in value for t in tensors(v))


def traced(chosen: trial.Trial) -> Trace:
    """The trial's trace."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        return make_trace.trace_trial(chosen, gpu_lookup.gpu_named("a100-80gb"), Path(folder), sharded.runner(chosen))[
            0
        ]


def predicted_kept(case: sharded.Case, world: int) -> dict[str, int]:
    """Host memory between steps in the trace, of tensors of more than one element."""
    host = traced(sharded.make(case, world, CARD)).host
    events = [event for event in host.events if host.sizes[abs(event) - 1] > 8]
    live = sum((1 if event > 0 else -1) * host.sizes[abs(event) - 1] for event in events)
    return {"host": live, "rounding": host_replay(host, AllocatorConfig()).breakdown["rounding"]}


def loaded(path: str, dtype: str) -> dict[str, int]:
    """Anonymous memory that `from_pretrained` takes at its peak and keeps, in bytes."""
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
    """The same of the trace of a trial whose weights are in that dtype."""
    values = {
        "model": {"name": "hub", "path": path}, "seq_len": 8, "micro_batch": 1, "weights": "pretrained",
        "precision": "bf16_pure" if dtype == "bfloat16" else "fp32", "runner": {"name": "torch"}, "device": CARD,
        "allocator": {"name": "default"}, "protocol": {"name": "check", "warmup_steps": 1, "measured_steps": 1},
    }  # fmt: skip
    return {"peak": host_replay(traced(trial_parser.parse(values)).host, AllocatorConfig()).peak}


def imported(runner: str) -> dict[str, int]:
    """Anonymous memory after a runner's imports."""
    worker.preload(runner)
    return {"held": counters.Process().held() or 0}


def workers(count: int) -> dict[str, int]:
    """What `count` data loader workers have for themselves after 200 batches, beside a rank that holds 1 GiB."""
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
    """The function's result in a new interpreter: a forked one has its parent's pages."""
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
    """A checkpoint in each dtype, about this large in fp32."""
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
    parser.add_argument("words", nargs="*", metavar="WORD", help="parts of the lines' names")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the checkpoint that is loaded, in fp32")
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
    """One row of the table."""
    off = "exact" if predicted == real else f"{predicted - real:+,}"
    print(f"| {name} | {real:,} | {predicted:,} ({off}) | {remark} |", flush=True)


if __name__ == "__main__":
    main()
