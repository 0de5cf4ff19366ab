"""Record every event of PyTorch's CUDA allocator over a small training run, from its first allocation on.

    PYTORCH_CUDA_ALLOC_CONF=... python benchmarks/recorded_steps.py OUT.pickle [--limit BYTES] [--streams | --ddp]
    python benchmarks/recorded_steps.py OUT.pickle --row ROWS.jsonl TRIAL_ID

Records GPT-2 (length 256, batch 4, bf16): loading and three steps. With --row it runs a row's trial by the code that
measured it. It then keeps each block's Python frames, to show why the prediction was wrong. A sweep's
`record=true` keeps one step after warm-up, when the cache is full enough that no segment comes or goes. Growth, garbage
collection and retries come before that. --limit sets `torch.cuda.set_per_process_memory_fraction`, which every torch
has. Prints one line of JSON: the limit as the allocator rounds it, peaks, retries, and whether the run ran out of
memory; such a run is recorded too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramsweep.harness.spec import trial as trials  # noqa: E402
from vramsweep.harness.spec import trial_parser  # noqa: E402
from vramsweep.runners.model import build  # noqa: E402
from vramsweep.runners.rank import result_file  # noqa: E402
from vramsweep.runners.worker import run_rank  # noqa: E402

STEPS = 3
TRIAL: dict[str, Any] = {
    "model": {
        "name": "gpt2",
        "model_type": "gpt2",
        "config": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    },
    "seq_len": 256,
    "micro_batch": 4,
    "precision": "bf16",
    "allocator": {"name": "default"},  # the environment variable decides
    "runner": {"name": "torch"},
    "device": {"name": "cuda"},
    "protocol": {"name": "recorded", "warmup_steps": 1, "measured_steps": 1},
}


def main() -> None:
    """Record the run, write the recording and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=int)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--streams", action="store_true", help="copy the next batch on a second stream")
    kinds.add_argument("--ddp", action="store_true", help="train with DistributedDataParallel of one rank over NCCL")
    kinds.add_argument("--row", nargs=2, metavar=("ROWS", "TRIAL_ID"), help="train the trial of this row of a journal")
    arguments = parser.parse_args()
    limit = None
    if arguments.limit is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        fraction = arguments.limit / total
        torch.cuda.set_per_process_memory_fraction(fraction)
        limit = int(fraction * total)  # as the allocator computes it
    frames: dict[str, Any] = {"context": "alloc", "stacks": "python"} if arguments.row else {"context": None}
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, **frames)
    out_of_memory = False
    try:
        if arguments.row:
            as_measured(*arguments.row)
        else:
            train(trial_parser.parse(TRIAL), torch.device("cuda", 0), arguments.streams, arguments.ddp)
    except torch.OutOfMemoryError:
        out_of_memory = True
    torch.cuda.memory._dump_snapshot(str(arguments.out))
    stats = torch.cuda.memory_stats()
    found = {
        "limit_bytes": limit,
        "out_of_memory": out_of_memory,
        "retries": stats["num_alloc_retries"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
    }
    print(json.dumps(found))


def as_measured(rows: str, trial_id: str) -> None:
    """Run the trial of a row as its worker did, but with two measured steps."""
    found = next(row for row in map(json.loads, Path(rows).read_text().splitlines()) if row["trial_id"] == trial_id)
    trial = trials.Trial.model_validate(found["trial"])
    few = trial.protocol.model_copy(update={"measured_steps": 2})
    # EndedEarly: something after the measured steps failed
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(result_file.EndedEarly):
        run_rank.run(trial.model_copy(update={"protocol": few}), Path(folder))


def train(trial: trials.Trial, device: torch.device, streams: bool = False, ddp: bool = False) -> None:
    """Run a few steps of the plain loop; `streams` and `ddp` are main's options."""
    build.prepare(trial)
    net: torch.nn.Module = build.model(trial, device)
    if ddp:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
        net = torch.nn.parallel.DistributedDataParallel(net, device_ids=[device])
    optimizer = build.optimizer(trial, net.parameters(), device)
    data = build.data(trial)
    side = torch.cuda.Stream(device) if streams else None

    def fetch(index: int) -> dict[str, torch.Tensor]:
        """Return the batch on the device, copied on the side stream if there is one, as a prefetching loader does."""
        batch = data.batch(index, trial.micro_batch)
        if side is None:
            return {k: v.to(device) for k, v in batch.items()}
        with torch.cuda.stream(side):
            return {k: v.pin_memory().to(device, non_blocking=True) for k, v in batch.items()}

    following = fetch(0)
    for index in range(STEPS):
        batch = following
        if side is not None:
            torch.cuda.current_stream(device).wait_stream(side)
            for tensor in batch.values():
                tensor.record_stream(torch.cuda.current_stream(device))
        with build.autocast(trial, device):
            loss = net(**batch).loss
        if index + 1 < STEPS:
            following = fetch(index + 1)
        loss.backward()
        if side is not None:  # a norm as loggers take it, on another stream: two streams use blocks of the step
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for one in net.parameters():
                    if one.grad is not None:
                        one.grad.float().norm()
                        one.grad.record_stream(side)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
