"""Who has the memory when a request fails: recordings, counted here once more, and one made by hand."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Cli

from vramsweep.harness.allocator import oom_state
from vramsweep.harness.verbs.why import CHANGES

pytestmark = pytest.mark.deterministic

SHARED = ROOT.parent / "shared" / "data" / "snapshots"
MIB = 1 << 20


def count_until_error(snapshot: Any, device: int) -> tuple[int, int, Any]:
    """Return bytes of live blocks, rounded to 512, and of segments at the first error, from an empty allocator."""
    live: dict[int, int] = {}
    reserved, signs = 0, {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    for one in snapshot["device_traces"][device]:
        reserved += signs.get(one["action"], 0) * one["size"]
        if one["action"] == "alloc":
            live[one["addr"]] = -(-one["size"] // 512) * 512
        elif one["action"] == "free_requested":
            del live[one["addr"]]
        elif one["action"] == "oom":
            return sum(live.values()), reserved, one
    raise AssertionError("no request failed")


def h100(name: str) -> bytes:
    with zipfile.ZipFile(ROOT / "results" / "reference" / "h100-80gb" / "recordings.zip") as archive:
        return archive.read(name)


def test_a_measured_error_under_the_process_s_own_limit(cli: Cli, tmp_path: Path) -> None:
    """The H100's recording ended by a memory fraction, with most of the GPU free."""
    (tmp_path / "x.pickle").write_bytes(content := h100("out_of_memory.pickle"))
    state = oom_state.find_state(pickle.loads(content), "x")
    blocks, reserved, error = count_until_error(pickle.loads(content), 0)
    assert (state.reserved, state.request, state.device_free) == (reserved, error["size"], error["device_free"])
    assert blocks <= state.allocated < blocks + 60 * MIB  # a rest of at most 1 MiB is not split off
    assert sum(state.categories.values()) == state.allocated and state.own_limit
    assert state.largest_free is not None and state.largest_free < error["size"] < 20 * MIB
    assert state.needed == reserved + 20 * MIB  # a request from 1 to 10 MiB takes a segment of 20
    assert state.annotation == "Optimizer.step#AdamW.step" and state.category == oom_state.OPTIMIZER
    assert state.served is not None and not state.served[""] and state.served["expandable_segments:True"]
    printed = cli.run("why", tmp_path / "x.pickle").out
    assert len(printed.splitlines()) <= 20 and "a limit of the process refused" in printed


def test_the_states_of_adamw_have_the_size_of_two_copies_of_gpt_2() -> None:
    """The recording has no stacks, but annotations. GPT-2 has 124,439,808 parameters, as published."""
    state = oom_state.find_state(pickle.loads(h100("default.pickle")), "x")
    assert state.at == "peak" and state.categories["optimizer states"] == pytest.approx(8 * 124_439_808, rel=0.02)


@pytest.mark.skipif(not SHARED.exists(), reason="shared/data/snapshots is not beside this clone")
def test_a_public_error_of_one_of_three_devices(cli: Cli) -> None:
    path = SHARED / "expandable_three_devices.pickle"
    blocks, reserved, error = count_until_error(pickle.loads(path.read_bytes()), 1)
    found = cli.json("why", path)
    assert (found["device"], found["allocated"], found["reserved"]) == (1, blocks, reserved) and blocks == 84063358976
    assert found["others"] == ["0", "2"] and found["request"] == error["size"] and found["device_free"] == 95682560
    assert not any(found["served"].values()) and found["needed"] > reserved + 95682560
    assert found["categories"] == {"activations": blocks}  # a graph network's forward pass
    assert found["where"] == "src/train/models.py:181 update_nodes"
    assert "no request failed in it" in cli.run("why", path, "--device", 0, status=1).out


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.pickle")), ids=lambda path: path.stem[:30])
def test_every_shared_recording(path: Path, cli: Cli) -> None:
    status = 0 if "three_devices" in path.name else 1
    found = cli.json("why", path, status=status)
    assert sum(found["categories"].values()) == found["allocated"] <= found["reserved"]
    assert len(cli.run("why", path, status=status).out.splitlines()) <= 20


def stack(*frames: str) -> list[dict[str, Any]]:
    return [{"filename": one.rpartition(":")[0], "line": 7, "name": one.rpartition(":")[2]} for one in frames]


TORCH = "/lib/site-packages/torch"
MADE = {  # by category: the stack of a request, innermost first
    "parameters": (f"{TORCH}/nn/modules/module.py:convert", f"{TORCH}/nn/modules/module.py:_apply"),
    "activations": ("/me/model.py:forward", f"{TORCH}/nn/modules/module.py:_call_impl", "/me/train.py:main"),
    "gradients and backward": (
        "x.cpp:torch::autograd::generated::MmBackward0::apply", "y.cpp:torch::autograd::Engine::evaluate_function"),
    "optimizer states": (f"{TORCH}/optim/adamw.py:_init_group", f"{TORCH}/optim/optimizer.py:wrapper"),
    "unknown": ("/me/data.py:load", "/me/train.py:main"),
}  # fmt: skip


def by_hand(fails: bool = True) -> dict[str, Any]:
    """Return a snapshot of five blocks of 2, 4, 6, 8 and 10 MiB in segments of their own, and a request of 12 MiB."""
    events, segments = [], []
    for number, frames in enumerate(MADE.values(), 1):
        addr, size = number << 30, 2 * number * MIB
        common = {"addr": addr, "stream": 0, "time_us": number, "frames": stack(*frames)}
        events += [{"action": "segment_alloc", "size": 20 * MIB, **common}, {"action": "alloc", "size": size, **common}]
        blocks = [{"size": size, "requested_size": size, "state": "active_allocated", "frames": stack(*frames)}]
        blocks += [{"size": 20 * MIB - size, "requested_size": 0, "state": "inactive"}]
        segments += [{"device": 0, "address": addr, "total_size": 20 * MIB, "stream": 0, "segment_type": "large",
                      "blocks": blocks}]  # fmt: skip
    where = {"stream": 0, "time_us": 9, "frames": stack(*MADE["activations"])}
    events += [{"action": "oom", "size": 19 * MIB, "device_free": 3 * MIB, **where}] * fails
    return {"segments": segments, "device_traces": [events]}


def test_blocks_made_by_hand_have_their_categories() -> None:
    state = oom_state.find_state(by_hand(), "x")
    assert state.categories == {kind: 2 * number * MIB for number, kind in reversed([*enumerate(MADE, 1)])}
    assert (state.allocated, state.reserved) == (30 * MIB, 100 * MIB)
    assert (state.largest_free, state.needed, state.own_limit) == (18 * MIB, 120 * MIB, False)
    assert state.modules["model.py"] == 4 * MIB and state.category == "activations"
    for name in ("unpack_hook", "backward"):  # of checkpointing that is not reentrant, and that is
        again = stack(*MADE["activations"], f"{TORCH}/utils/checkpoint.py:{name}")
        assert oom_state.categorize(again) == "recomputed activations" in CHANGES


def test_without_an_error_it_is_the_peak_and_without_a_history_the_end(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "x.pickle"
    for name, snapshot in (("peak", by_hand(fails=False)), ("final state", by_hand() | {"device_traces": [[]]})):
        path.write_bytes(pickle.dumps(snapshot))
        found = cli.json("why", path, status=1)
        assert (found["at"], found["allocated"], found["request"]) == (name, 30 * MIB, None)
    assert "has no device 2 among its devices: 0" in cli.refuse("why", path, "--device", 2)
    for content in (b"\x80", pickle.dumps({"segments": 1, "device_traces": [[{"action": "oom"}]]}), pickle.dumps([1])):
        path.write_bytes(content)
        assert cli.refuse("why", path).startswith("vramsweep: x.pickle")


def test_text_of_a_snapshot_can_neither_act_on_the_terminal_nor_add_lines(tmp_path: Path, cli: Cli) -> None:
    snapshot = by_hand()
    for one in snapshot["device_traces"][0]:
        one["frames"] = [{"filename": "/me/\x1b[2J[red]\n\n\nx.py", "line": 1, "name": "forward\n" * 40}]
    (tmp_path / "x.pickle").write_bytes(pickle.dumps(snapshot))
    printed = cli.run("why", tmp_path / "x.pickle").out
    assert "\x1b" not in printed and "[red]" in printed and len(printed.splitlines()) <= 20
