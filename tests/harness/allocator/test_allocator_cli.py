"""The replay verb from outside: table, JSON, figure, and mistakes."""

import pickle
import re

import pytest
from conftest import ROOT, cases, unpacked

from vramsweep.harness.allocator import safe_unpickle

pytestmark = pytest.mark.deterministic

MIB = 1 << 20
SMALL = ROOT / "tests" / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"


def test_the_table(cli):
    out = cli.run("replay", SMALL, "--allocator", "expandable_segments:True", "--memory-limit", "3.53GiB").out
    assert re.search(r"\(defaults\)\s+recorded\s+3\.5\s+0\.50\s+9\s+0\s+no", out)  # 3,606.0 and 507.4 MiB
    assert re.search(r"expandable_segments:True\s+rebuilt", out)
    assert "is exact: 9 of 9 segment events, 36 of 36 blocks at the recorded address." in out


def test_json_is_for_scripts(cli):
    data = cli.json("replay", SMALL, "--allocator", "max_split_size_mb:128")
    assert [row["settings"] for row in data["rows"]] == ["", "", "max_split_size_mb:128"]
    first = data["rows"][0]
    assert first["match"]["matched"] == 9
    assert (first["peak_reserved"], f"{first['reserved_unallocated'] / MIB:.1f}") == (3606 * MIB, "507.4")


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([{"action": "snapshot", "addr": 0, "size": 0, "stream": 0}], "No history: there is no event."),
        ([-1], 'No history: the ring kept one event (max_entries, or enabled="state"). The final state is '
         "3.5 GiB reserved, 30.3 MiB allocated; the peak is unknown."),
        ([-2, -1], "Nothing to compare, because its 2 events concern no segment and allocate no block."),
        ([*range(-4, 0)], "Peaks cover only 4 events: recording began late, or max_entries dropped"),
    ],
)  # fmt: skip
def test_a_recording_without_history_is_not_called_exact(events, said, tmp_path, cli):
    whole = safe_unpickle.load(SMALL)
    whole["device_traces"] = [[whole["device_traces"][0][e] if isinstance(e, int) else e for e in events]]
    (tmp_path / "last.pickle").write_bytes(pickle.dumps(whole))
    out = " ".join(cli.run("replay", tmp_path / "last.pickle").out.split())
    assert said in out and "is exact" not in out
    data = cli.json("replay", tmp_path / "last.pickle")
    row = data["rows"][0]
    unknown = [row[name] is None for name in ("match", "peak_reserved", "peak_allocated", "device_allocs", "stats")]
    assert (data["history"], unknown) == (("none", [True] * 5) if len(events) < 2 else ("part", [False] * 5))


def test_a_recording_of_another_vendors_library_is_named(tmp_path, cli):
    whole = safe_unpickle.load(SMALL)
    for event in whole["device_traces"][0]:
        event["frames"] = [{"filename": "/site-packages/torch_npu/npu/memory.py", "line": 1, "name": "f"}]
        if event["action"] == "segment_alloc":
            event["stream"] = 7
    (tmp_path / "npu.pickle").write_bytes(pickle.dumps(whole))
    out = cli.run("replay", tmp_path / "npu.pickle").out
    assert "NOT exact" in out and "Its stacks name torch_npu, so its allocator is not the CUDA one" in out


def test_what_a_setting_saves_is_said_of_the_best_one_tried(cli):
    out = " ".join(cli.run("replay", SMALL, "--search").out.split())
    assert "unallocated" not in out
    assert "The best of 17 tried, large_segment_size_mb:40, reserves 0.48 GiB less than the recorded one." in out
    recorded, _, best, *_ = cli.json("replay", SMALL, "--search")["rows"]
    assert recorded["peak_reserved"] - best["peak_reserved"] == 492 * MIB
    out = " ".join(cli.run("replay", SMALL, "--allocator", "expandable_segments:True").out.split())
    assert "The best of 1 tried, expandable_segments:True, saves nothing over" in out


@pytest.mark.slow
def test_the_figure_is_drawn_by_another_process(tmp_path, cli):
    out = tmp_path / "timeline.html"
    cli.run("replay", SMALL, "--allocator", "expandable_segments:True", "--figure", out)
    shown = unpacked(out.read_text())
    curves = re.findall(r'"mode":"lines","name":"([^"]*rebuilt)"', shown)
    assert curves == ["defaults, rebuilt", "expandable_segments:True, rebuilt"]


@pytest.mark.parametrize(("typed", "message"), cases("replay_mistakes"))
def test_mistakes_are_one_line_and_status_2(cli, typed, message):
    error = cli.refuse("replay", *typed.replace("{SMALL}", str(SMALL)).split())
    assert message in error
    assert error.startswith("vramsweep: ")
    assert error.count("\n") <= 2
    assert "Traceback" not in error


@pytest.mark.slow
def test_a_figure_that_cannot_be_written_is_said_by_the_process_that_draws(cli):
    said = cli.refuse("replay", SMALL, "--figure", "/dev/null/x.html")
    assert "the figure could not be drawn: vramsweep: cannot write" in said
    assert "the following arguments are required: file; vramsweep replay --help" in cli.refuse("replay")
