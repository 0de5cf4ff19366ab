"""Host memory: what a trace says of it, what is measured of a process, a node that is too small."""

import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Run, tiny
from traces import SIMULATED, signed, trace_trial
from transformers import AutoConfig, AutoModelForCausalLM

from vramsweep.harness.allocator.config import AllocatorConfig, parse
from vramsweep.harness.machine import host_memory
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.measure.counters import Process
from vramsweep.runners.predict.replay_trace import host_replay
from vramsweep.runners.rank.aggregate_ranks import over_ranks
from vramsweep.runners.trace.trace_data import HostStorages, Mark
from vramsweep.runners.worker import batch_server

pytestmark = pytest.mark.deterministic

PARAMETERS = 119360
MIB = 1 << 20


def test_page_locked_blocks_are_powers_of_two_and_serve_again() -> None:
    """ATen/core/CachingHostAllocator.h: PowerOf2Ceil, and a free list for each size."""
    events = [1, 2, -2, 3, -3, 4]  # 5 MiB stay; 3 MiB, freed; 4 MiB, freed; 3 MiB pageable
    sizes = [5 * MIB, 3 * MIB, 4 * MIB, 3 * MIB]
    marks = [Mark(1, None, "load"), Mark(6, 0, "forward")]
    storages = HostStorages(sizes, ["other"] * 4, events, marks, [True, True, True, False])
    found = host_replay(storages, AllocatorConfig())
    assert [peak for _, peak in found.phases] == [8 * MIB, (8 + 4 + 3) * MIB]
    assert found.pinned == 12 * MIB
    assert found.breakdown["other"] == 8 * MIB and sum(found.breakdown.values()) == found.peak
    exact = host_replay(storages, parse("pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1"))
    assert (exact.pinned, exact.peak) == (9 * MIB, 9 * MIB)


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "precision", "copied"), [
    (torch.float32, "fp32", 0), (torch.bfloat16, "fp32", 4), (torch.float32, "bf16_pure", 2),
])  # fmt: skip
def test_a_checkpoint_of_another_dtype_is_copied_on_the_host(
    tmp_path: Path, stored: torch.dtype, precision: str, copied: int
) -> None:
    """As benchmarks/host_check.py measures it; on the card nothing differs from random weights."""
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen2", **tiny()["model"]["config"]), dtype=stored
    ).save_pretrained(tmp_path / "model")
    hub = {"path": str(tmp_path / "model"), "model_type": None, "config": {}}
    traces = []
    for weights in ("pretrained", "random"):
        values = tiny(device=SIMULATED, model=hub, precision=precision, weights=weights)
        traces.append(trace_trial(values, tmp_path)[0])
    read, made = traces
    buffers = 2 * 4 * 8 * (copied > 0)  # of rotary embeddings
    host = host_replay(read.host, AllocatorConfig())
    assert host.peak == copied * PARAMETERS + buffers == host.breakdown["loading"]
    assert host_replay(made.host, AllocatorConfig()).peak == 0
    assert sum(signed(read)) == sum(signed(made))


@pytest.mark.slow
def test_a_node_that_is_too_small_is_full_before_the_card_is(run_sweep: Run) -> None:
    offloaded: dict[str, Any] = {
        "runner": {"name": "deepspeed", "options": {"zero_optimization": {"reduce_bucket_size": MIB}}},
        "sharding": "zero2", "world_size": 2, "offload_optimizer": True,
    }  # fmt: skip
    roomy, full, small = run_sweep(
        tiny(device=SIMULATED, **offloaded),
        tiny(device={**SIMULATED, "node_memory_gib": 0.6}, **offloaded),
        tiny(device={**SIMULATED, "node_memory_gib": 0.6, "gpus_per_node": 1}, **offloaded),
    )
    assert (roomy["outcome"], roomy["host_total_bytes"], roomy["host_ranks"]) == ("ok", None, 2)
    parts = [v for k, v in roomy.items() if k.startswith("host_peak_") and k != "host_peak_bytes"]
    assert sum(parts) + roomy["host_processes_bytes"] + roomy["host_workers_bytes"] == roomy["host_peak_bytes"]
    # fp32 master weights and two moments, one half on each rank, both of this node
    assert roomy["host_peak_optimizer_state_bytes"] == 3 * 4 * PARAMETERS
    assert full["outcome"] == "host_oom"
    assert "host memory per node are not enough while loading. 2 ranks need at least 0.65" in full["reason"]
    assert full["host_peak_bytes"] == roomy["host_peak_bytes"] > full["host_total_bytes"]
    assert full["phase"] == "load"
    assert (small["outcome"], small["host_ranks"]) == ("ok", 1)


@pytest.mark.slow
def test_data_loader_workers_are_counted_and_not_started(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 3, "dataloader_persistent_workers": True}
    chosen = trial_parser.parse(tiny(device=SIMULATED, runner={"name": "trainer", "options": options}))
    folder = tmp_path / "attempts" / "trial" / "1"
    folder.mkdir(parents=True)
    row = batch_server.predict_trial(chosen, folder)
    assert row["host_workers_bytes"] == 3 * host_memory.LOADER_WORKER
    assert row["host_peak_bytes"] == row["host_processes_bytes"] + row["host_workers_bytes"]


def test_workers_count_only_once_they_run() -> None:
    storages = HostStorages([9 * MIB, MIB], ["loading", "activations"], [1, -1, 2], pinned=[False, False])
    storages.marks = [Mark(2, None, "load"), Mark(3, 0, "forward")]
    loading = host_replay(storages, AllocatorConfig(), workers=7 * MIB)
    assert (loading.peak, loading.breakdown["loading"], loading.breakdown["workers"]) == (9 * MIB, 9 * MIB, 0)
    training = host_replay(storages, AllocatorConfig(), workers=9 * MIB)
    assert (training.peak, training.breakdown["activations"]) == (10 * MIB, MIB)
    assert [peak for _, peak in training.phases] == [9 * MIB, 10 * MIB]


def test_mapped_files_are_resident_but_can_be_given_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1" * (64 * MIB))
    process = Process()
    begun, resident = process.held(), process.resident_peak()
    assert begun is not None and resident is not None
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        assert (process.resident_peak() or 0) - resident > 48 * MIB
        assert (process.held() or 0) - begun < 8 * MIB
    process.watch()
    with mmap.mmap(-1, 64 * MIB) as block:  # not of the heap, where what earlier tests freed may be used again
        for _ in range(64):
            block.write(bytes(MIB))
        process.rest()
    assert 60 * MIB < (process.look() or 0) - begun < 80 * MIB


def test_a_kernel_that_cannot_start_anew_leaves_the_resident_peak_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, text: str) -> int:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "write_text", write)
    process = Process()
    assert process.resident_peak() is process.resident_baseline is None
    assert process.look() is not None


def test_what_a_started_process_has_for_itself_is_counted() -> None:
    code = "import sys; held = bytearray(b'1') * (32 << 20); print('held', flush=True); sys.stdin.read()"
    before = Process().started()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        found = Process().started()
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has waited for it
        after = Process().started()
    if not Path("/proc/self/smaps_rollup").exists():  # not every kernel tells
        assert before is found is after is None
    else:
        assert before is not None and found is not None and after is not None
        assert 32 * MIB < found - before < 64 * MIB
        assert after - before < 32 * MIB


def test_host_memory_is_of_all_ranks_together_and_unknown_if_one_s_is() -> None:
    ranks = [{"host_peak_bytes": 5, "host_workers_bytes": n, "host_total_bytes": 9, "host_ranks": 1} for n in (3, None)]
    row = over_ranks(ranks)
    assert (row["host_peak_bytes"], row["host_ranks"], row["host_total_bytes"]) == (10, 2, 9)
    assert row["host_workers_bytes"] is None


@pytest.mark.slow
def test_deepspeed_keeps_on_the_host_what_is_predicted() -> None:
    """Real ranks over gloo; the script compares the storages of DeepSpeed's own optimizer."""
    for words in (("ZeRO-2", "accumulation 2", "ranks 2"), ("ZeRO-3", "accumulation 1", "bf16", "ranks 2")):
        command = [sys.executable, str(ROOT / "benchmarks" / "host_check.py"), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        lines = [text for text in done.stdout.splitlines() if text.startswith("| ZeRO")]
        assert len(lines) == 1 and "(exact)" in lines[0], done.stdout
