"""Ratio of the time of `vramsweep.estimate` to that of tracing and explaining the same step as `explain` does.

Both run in one process after imports, alternately, on a custom target; times are of the CPU.
`python benchmarks/estimate_time.py --rounds 7`
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import vramsweep
from vramsweep.harness.allocator.config import AllocatorConfig
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.spec.trial import Trial
from vramsweep.runners.loops import custom
from vramsweep.runners.predict.explanation import explanation
from vramsweep.runners.predict.make_trace import trace_trial

GPU, SHAPE = "l4-24gb", (4, 512)
TARGET = """
def build(trial):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"))
    optimizer = torch.optim.AdamW(net.parameters())
    def step(batch):
        loss = net(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    def batches(index):
        return {name: torch.zeros((4, 512), dtype=torch.long, device="cuda") for name in ("input_ids", "labels")}
    return net, optimizer, step, batches
"""


def main() -> None:
    """Print both medians in seconds, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"))
    batch = {name: torch.zeros(SHAPE, dtype=torch.long) for name in ("input_ids", "labels")}
    card = gpu_lookup.gpu_named(GPU)
    explained, estimated = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target.py"
        target.write_text(TARGET)
        trial = Trial.model_validate(
            {
                "model": {"name": "gpt2"}, "seq_len": SHAPE[1], "micro_batch": SHAPE[0], "precision": "fp32",
                "allocator": {"name": "default"}, "runner": {"name": "custom", "target": f"{target}:build"},
                "device": {"name": "simulated", "gpu": GPU},
                "protocol": {"name": "brief", "warmup_steps": 1, "measured_steps": 1},
            }
        )  # fmt: skip
        for _ in range(rounds + 1):  # the first imports
            begun = time.process_time()
            found = explanation(
                trace_trial(trial, card, Path(folder), custom)[0], AllocatorConfig(), gpu_lookup.memory_limit(card)
            )
            explained.append(time.process_time() - begun)
            begun = time.process_time()
            ours = vramsweep.estimate(net, batch, gpu=GPU)
            estimated.append(time.process_time() - begun)
            # a target is made on the GPU, where the tied output layer is allocated first and freed; a live model is not
            assert found is not None and abs(found.peak.allocated / ours.peak_allocated - 1) < 0.01
    first, second = (statistics.median(times[1:]) for times in (explained, estimated))
    print(f"explain {first:.2f} s, estimate {second:.2f} s, ratio {second / first:.2f} (medians of {rounds})")


if __name__ == "__main__":
    main()
