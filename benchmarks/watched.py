"""Measure the cost of watching a script: its steps alone and observed, in turns in one process, by its own clock.

    python benchmarks/watched.py [--rounds 10] [--steps 60]

The steps are those of the tiny model, a few milliseconds each. Watching costs the same for every model, so its share
of a step is largest here. The first steps of each block are left out, because in them the observer counts FLOPs and
separates phases. Prints the ratio of each round's medians, and their median.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from vramsweep.runners.scripts.observation_files import WATCH
from vramsweep.runners.scripts.observer import Observer

LEFT_OUT = 10
CONFIG = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def trained(steps: int) -> list[float]:
    """Run a script's loop; return the seconds of each step by its own clock, without the first LEFT_OUT."""
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        MODEL(input_ids=IDS[0], labels=IDS[0], use_cache=False).loss.backward()
        OPTIMIZER.step()
        OPTIMIZER.zero_grad()
        times.append(time.perf_counter() - began)
    return times[LEFT_OUT:]


def watched(steps: int) -> list[float]:
    """Run `trained` under the observer, which must measure all steps but four; return the seconds of each step."""
    with tempfile.TemporaryDirectory() as name:
        asked: dict[str, object] = {
            "warmup_steps": 1,
            "measured_steps": None,
            "record": False,
            "stop": False,
            "variables": {},
        }
        (Path(name) / WATCH).write_text(json.dumps(asked | {"job": False, "precision": None, "worker": os.getpid()}))
        observer = Observer(Path(name))
        observer.install()
        times = trained(steps)
        observer.block_ended()
        observer.uninstall()
        seen = json.loads(observer.file.read_text())
        assert seen["problem"] is None and len(seen["columns"]["step_times_s"]) == steps - 4, seen
    return times


def main() -> None:
    """Run rounds of both, each first in turn, and print their ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=128, help="tokens of each of the four samples")
    options = parser.parse_args()
    IDS.append(torch.randint(0, 512, (4, options.length)))
    trained(2 * LEFT_OUT)
    ratios = []
    for turn in range(options.rounds):
        found = {}
        for kind in (watched, trained) if turn % 2 else (trained, watched):
            found[kind] = statistics.median(kind(options.steps))
        ratios.append(found[watched] / found[trained])
        alone, under = (found[kind] * 1e3 for kind in (trained, watched))
        print(f"alone {alone:.3f} ms, watched {under:.3f} ms, ratio {ratios[-1]:.4f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    MODEL = Qwen2ForCausalLM(CONFIG)
    IDS: list[torch.Tensor] = []
    OPTIMIZER = torch.optim.AdamW(MODEL.parameters(), lr=1e-4)
    main()
