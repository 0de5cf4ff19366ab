"""`vramsweep.watch()` in a script that trains by itself: each in its own process, as users have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TARGETS, Run, tiny

from vramsweep.harness.journal import read
from vramsweep.harness.row import Row

PLAIN = """
import torch, vramsweep
from transformers import Qwen2Config, Qwen2ForCausalLM
torch.manual_seed(0)
config = Qwen2Config(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
def patched():
    hooks = len(torch.nn.modules.module._global_forward_pre_hooks)
    return torch.autograd.backward, torch.compile, torch.amp.GradScaler.update, hooks

before = patched()
with vramsweep.watch("mine", seq_len=48, micro_batch=3, precision="fp32", note="first try") as seen:
    model = Qwen2ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(STEPS):
        ids = torch.randint(0, 512, (3, 48))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        FAULT
assert patched() == before
print(seen.row["outcome"] if seen.row else None)
"""


def trained(folder: Path, text: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(text)
    known = {name: value for name, value in os.environ.items() if name != "VRAMSWEEP_ATTEMPT"}
    command = [*(words or [sys.executable]), "train.py"]
    place = known | {"PYTHONPATH": str(ROOT)} | environ
    return subprocess.run(command, cwd=folder, env=place, capture_output=True, text=True, check=False)


def plain(steps: int, fault: str = "pass") -> str:
    return PLAIN.replace("STEPS", str(steps)).replace("FAULT", fault)


def rows(folder: Path) -> list[Row]:
    found, unreadable = read(folder / "results" / "mine")
    assert not unreadable
    return found


@pytest.mark.slow
def test_a_block_becomes_an_ordinary_row(tmp_path: Path, run_sweep: Run) -> None:
    done = trained(tmp_path, plain(12))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
    (row,) = rows(tmp_path)
    assert (row["outcome"], row["reason"], row["runner"], row["model"], row["sweep"]) == (
        "ok",
        None,
        "watch",
        "train",
        "mine",
    )
    assert (row["seq_len"], row["micro_batch"], row["precision"], row["grad_accum"]) == (48, 3, "fp32", 1)
    assert row["trial"]["runner"]["options"] == {"note": "first try"}
    assert {row[name] for name in ("checkpointing", "optimizer", "data", "sharding")} == {None}
    assert (row["warmup_steps"], row["measured_steps"]) == (3, 6)  # of 12: 3, two that are looked at, 6, and the last
    assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(48 * 3 * 6)
    assert not list(tmp_path.glob("results/mine/attempts"))
    target = {"name": "custom", "target": f"{TARGETS / 'scripted.py'}:plain"}
    (ours,) = run_sweep(tiny(seq_len=48, micro_batch=3, runner=target))
    same = [f"{phase}_peak_allocated_bytes" for phase in ("forward", "backward", "optimizer")]
    same += ["peak_allocated_bytes", "model_flops_per_token", "parameters", "trainable_parameters"]
    assert {name: row[name] for name in same} == {name: ours[name] for name in same}


@pytest.mark.slow
def test_what_leaves_the_block_is_the_rows_outcome(tmp_path: Path) -> None:
    full = "torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.')"
    for fault, outcome in ((full, "oom"), ("ValueError('bad data')", "crash")):
        done = trained(tmp_path, plain(12, f"if step == 7: raise {fault}"))
        assert done.returncode == 1 and "Error: " in done.stderr.splitlines()[-1]
        row = rows(tmp_path)[-1]
        assert row["outcome"] == outcome
        assert row["reason"].endswith(("Tried to allocate 2.00 GiB.", "bad data"))


@pytest.mark.slow
def test_what_cannot_be_watched_is_said(tmp_path: Path) -> None:
    done = trained(tmp_path, plain(4))
    assert done.stdout == "None\n"
    assert "vramsweep.watch wrote no row: 4 optimizer steps were seen, and it takes 7" in done.stderr
    done = trained(tmp_path, "import vramsweep\nvramsweep.watch(precision='fp17')")
    assert "vramsweep.watch: precision=fp17: choose one of" in done.stderr
    assert not (tmp_path / "results").exists()
    nested = "import vramsweep\nwith vramsweep.watch():\n  with vramsweep.watch(): pass"
    assert "this process is watched already" in trained(tmp_path, nested).stderr


@pytest.mark.slow
def test_a_training_that_we_started_is_left_alone(tmp_path: Path) -> None:
    done = trained(tmp_path, plain(12), VRAMSWEEP_ATTEMPT=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert not (tmp_path / "results").exists()


TRAINER = """
import torch, vramsweep
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
config = Qwen2Config(vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True)
ids = torch.randint(0, 512, (64, 40))
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=12, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2)
data = [{"input_ids": row, "labels": row} for row in ids]
Trainer(Qwen2ForCausalLM(config), arguments, train_dataset=data, callbacks=[vramsweep.TrainerCallback("mine")]).train()
"""


@pytest.mark.slow
def test_the_callback(tmp_path: Path) -> None:
    done = trained(tmp_path, TRAINER)
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path)
    assert (row["outcome"], row["micro_batch"], row["grad_accum"], row["seq_len"]) == ("ok", 2, 2, 40)
    assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(2 * 2 * 40 * 6)


@pytest.mark.slow
def test_ranks_write_one_row(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "scripts" / "ddp.py").read_text()
    head, loop = text.split("for step in range(50):")
    body, tail = loop.split("dist.destroy")
    indented = "\n".join(f"    {line}" for line in f"for step in range(12):{body}".splitlines())
    text = f"import vramsweep\n{head}with vramsweep.watch('mine'):\n{indented}\ndist.destroy{tail}"
    torchrun = str(Path(sys.executable).parent / "torchrun")
    done = trained(tmp_path, text, torchrun, "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    (row,) = rows(tmp_path)
    assert (row["world_size"], len(row["rank_peak_allocated_bytes"]), row["grad_accum"]) == (2, 2, 2)


@pytest.mark.slow
def test_reports_read_such_rows(tmp_path: Path) -> None:
    trained(tmp_path, plain(12))
    trained(tmp_path, plain(12).replace("48", "96"))
    words: list[Any] = [sys.executable, "-m", "vramsweep", "report", "results/mine"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "results" / "mine" / "journal.jsonl").read_text().splitlines()[1])["seq_len"] == 96
