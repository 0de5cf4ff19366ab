"""Seven new things, each by one entry and one module in a copy of the product, and each used in real processes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, source

COPIED = ("harness", "runners", "analysis", "vramsweep", "hydra_plugins", "conf", "docs", "pyproject.toml")
BALLAST = 3 << 20  # bytes in new_technique.txt, far above what the tiny model's layers differ by
MASK = 4096 * 4096  # bytes: all positions of the tiny model, squared

# What is added: the file with the table, the text that its table begins with, the entry; the module and its code.
THINGS: list[list[str]] = json.loads((ROOT / "tests" / "data" / "extensions.json").read_text())
SIMULATED = "device=simulated device.gpu=test-7gb"
CASES = {
    "measured": "runner=mine device=cpu",
    "ranks": "sharding=averaged world_size=2 device=cpu",
    "predicted": f"runner=mine {SIMULATED}",
    "several": f"sharding=averaged world_size=2 {SIMULATED}",
    "loop": SIMULATED,
    "technique": f"kernels=ballast runner=mine {SIMULATED}",
    "version": f"+versions.accelerate=0.4.0 {SIMULATED}",
}


def add(root: Path, table: str, begin: str, entry: str, module: str = "", code: str = "") -> None:
    """Insert the entry at the end of the table that begins so, or is the value of that key, and write the module."""
    text = (root / table).read_text()
    if table.endswith(".json"):
        read = json.loads(text)
        (read[begin] if begin else read).append(json.loads(entry))
        text = json.dumps(read)
    elif table.endswith(".tsv"):
        text = f"{text}{entry}\n"
    else:
        start = text.index(begin)
        indent = begin[1 : len(begin) - len(begin.lstrip())]  # of the table itself
        end = text.index(f"\n{indent[4:]})", start)
        text = f"{text[:end]}\n{indent}    {entry}{text[end:]}"
    (root / table).write_text(text)
    if module:
        with (root / f"{module}.py").open("x") as file:
            file.write(f'"""New."""\n{source(code)}')


def copy(root: Path) -> None:
    """The product with all seven."""
    for name in COPIED:
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, root / name)
        else:
            ignored = shutil.ignore_patterns("__pycache__", "images")
            shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignored)
    for thing in THINGS:
        add(root, *thing)


def call(root: Path, *words: str) -> str:
    """Return what a process prints that finds the copy before any installed package."""
    environ = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, *words], cwd=root, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.slow
def test_each_new_thing_is_one_entry_and_one_module(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    root.mkdir()
    copy(root)
    preset = root / "own" / "sweep" / "new.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text(f"# @package _global_\ncases: {json.dumps(list(CASES.values()))}\n")
    words = ["-m", "--config-dir", "own", "sweep=new", "model=tiny", "seq_len=16", "protocol=brief", "name=new"]

    planned = json.loads(call(root, "-m", "vramsweep", "plan", "--json", *words))["trials"]
    assert [one["reason"] for one in planned] == [None] * len(CASES)
    assert {one["trial"]["runner"]["name"] for one in planned} == {"torch", "mine"}
    said = call(root, "-m", "vramsweep", "sweep", *words)
    lines = (root / "results" / "new" / "trials" / "journal.jsonl").read_text().splitlines()
    every = [json.loads(line) for line in lines]
    assert len(every) == len(CASES) and all(row["outcome"] == "ok" for row in every), said

    def row(device: str, runner: str = "torch", sharding: str = "none", **more: Any) -> dict[str, Any]:
        """The one row that has these columns."""
        wanted = {"device": device, "runner": runner, "sharding": sharding, "kernels": "none", "versions": None} | more
        [found] = [row for row in every if wanted.items() <= row.items()]
        return found

    # the runner and the column that it fills: measured and predicted, as the loop of our own is
    measured, predicted, loop = row("cpu", "mine"), row("simulated", "mine"), row("simulated")
    assert measured["batches_mine"] == len(measured["step_times_s"]) + 3 and measured["loss_last"] > 0
    assert predicted["batches_mine"] == 3 and loop["batches_mine"] is None
    assert predicted["peak_allocated_bytes"] == loop["peak_allocated_bytes"]
    # the sharding: real ranks, and the buckets that are predicted for them
    assert len(row("cpu", sharding="averaged", world_size=2)["rank_peak_allocated_bytes"]) == 2
    several = row("simulated", sharding="averaged", world_size=2)
    assert several["peak_communication_bytes"] > loop["peak_communication_bytes"] == 0
    # the GPU
    assert loop["simulated_gpu"] == loop["gpu_name"] == "test-7gb" and 0 < loop["memory_limit_bytes"] < 7 << 30
    # the technique
    with_it = row("simulated", "mine", kernels="ballast")
    assert with_it["peak_buffers_bytes"] == predicted["peak_buffers_bytes"] + BALLAST
    assert with_it["unproven"] == ["kernels=ballast"]
    # the known difference
    earlier = row("simulated", versions="accelerate 0.4.0")
    assert earlier["differences"] == ["qwen2_mask"]
    assert earlier["peak_buffers_bytes"] == loop["peak_buffers_bytes"] + MASK
    # the figure, of measured and of predicted rows
    assert "Turns of the loop" in (root / "results" / "new" / "report.html").read_text()
    assert measured["trial_id"] in (root / "results" / "new" / "figures" / "dots_measured_on_cpu.csv").read_text()

    assert "test-7gb" in call(root, "-m", "vramsweep", "gpus")
    assert "how often the loop turned" in call(root, "-m", "vramsweep", "columns")
    call(root, "docs/reference.py")
    pages = {name: (root / "docs" / f"{name}.md").read_text() for name in ("columns", "settings", "techniques", "gpus")}
    assert "| `mine` | a loop of its own | `none` |" in pages["columns"] and "`batches_mine`" in pages["columns"]
    assert "optimizer step | `none`, `ddp`, `fsdp1`, `fsdp2`, `averaged` |" in pages["columns"]
    assert "| `averaged` | ddp by another name |" in pages["columns"]
    assert "`mine`" in pages["settings"] and "averaged" in pages["settings"]
    assert "| `ballast` | a buffer that nobody needs |" in pages["techniques"] and "`test-7gb`" in pages["gpus"]
