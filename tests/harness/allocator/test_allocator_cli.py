"""The replay verb from outside: table, JSON, figure, and mistakes."""

import json
import pickle
import re
from pathlib import Path

import pytest
from conftest import unpacked

from vramsweep.harness import cli
from vramsweep.harness.allocator import safepickle


def replay(words: list[str]) -> int:
    return cli.main(["replay", *words])


SMALL = Path(__file__).parents[2] / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"


def test_the_table(capsys):
    assert replay([str(SMALL), "--allocator", "expandable_segments:True", "--memory-limit", "3.53GiB"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\(defaults\)\s+│ recorded │\s+3,606\.0 │\s+507\.4 │\s+9 │\s+0 │\s+no", out)
    assert re.search(r"expandable_segments:True\s+│ rebuilt", out)
    assert "is exact: 9 of 9 segment events, 36 of 36 blocks at the recorded address." in out


def test_json_is_for_scripts(capsys):
    assert replay([str(SMALL), "--json", "--allocator", "max_split_size_mb:128"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["settings"] for row in data["rows"]] == ["", "", "max_split_size_mb:128"]
    assert data["rows"][0]["match"]["matched"] == 9


def test_search_adds_a_grid_and_ranks(capsys):
    assert replay([str(SMALL), "--json", "--search", "--memory-limit", "8GiB"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["start"] == "recorded"
    peaks = [row["peak_reserved"] for row in rows[1:]]
    assert peaks == sorted(peaks)
    assert any("garbage_collection_threshold" in row["settings"] for row in rows)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([{"action": "snapshot", "addr": 0, "size": 0, "stream": 0}], "No history: its recording has no event."),
        ([-1], 'No history: its ring held one event (max_entries, or enabled="state"). The final state is '
         "3,606.0 MiB reserved, 30.3 allocated; the peak is unknown."),
        ([-2, -1], "Nothing to compare: its 2 events make no segment and no block."),
        ([*range(-4, 0)], "Peaks are of its 4 events: it begins late, or its ring (max_entries) lost"),
    ],
)  # fmt: skip
def test_a_recording_without_history_is_not_called_exact(events, said, tmp_path, capsys):
    whole = safepickle.load(SMALL)
    whole["device_traces"] = [[whole["device_traces"][0][e] if isinstance(e, int) else e for e in events]]
    (tmp_path / "last.pickle").write_bytes(pickle.dumps(whole))
    assert replay([str(tmp_path / "last.pickle")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert said in out and "is exact" not in out
    assert replay([str(tmp_path / "last.pickle"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    row = data["rows"][0]
    unknown = [row[name] is None for name in ("match", "peak_reserved", "peak_allocated", "device_allocs", "stats")]
    assert (data["history"], unknown) == (("none", [True] * 5) if len(events) < 2 else ("part", [False] * 5))


def test_a_recording_of_another_vendors_library_is_named(tmp_path, capsys):
    whole = safepickle.load(SMALL)
    for event in whole["device_traces"][0]:
        event["frames"] = [{"filename": "/site-packages/torch_npu/npu/memory.py", "line": 1, "name": "f"}]
        if event["action"] == "segment_alloc":
            event["stream"] = 7
    (tmp_path / "npu.pickle").write_bytes(pickle.dumps(whole))
    assert replay([str(tmp_path / "npu.pickle")]) == 0
    out = capsys.readouterr().out
    assert "NOT exact" in out and "Its stacks name torch_npu: no CUDA recording" in out


def test_what_a_setting_saves_is_said_of_the_best_one_tried(capsys):
    assert replay([str(SMALL), "--search"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "unallocated" not in out
    assert "The best of 17 tried, large_segment_size_mb:40, reserves 492.0 MiB less than the recorded." in out
    assert replay([str(SMALL), "--allocator", "expandable_segments:True"]) == 0
    assert "The best of 1 tried, expandable_segments:True, saves nothing over" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.slow
def test_the_figure_is_drawn_by_another_process(tmp_path, capsys):
    out = tmp_path / "timeline.html"
    assert replay([str(SMALL), "--allocator", "expandable_segments:True", "--figure", str(out)]) == 0
    shown = unpacked(out.read_text())
    curves = re.findall(r'"mode":"lines","name":"([^"]*rebuilt)"', shown)
    assert curves == ["defaults, rebuilt", "expandable_segments:True, rebuilt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.pickle"], "cannot read nothing.pickle: No such file or directory"),
        ([str(SMALL), "--allocator", "expandable_segments:yes"], "allowed is True or False"),
        ([str(SMALL), "--memory-limit", "lots"], "'lots' is not a size: write for example 24GiB"),
        ([str(SMALL), "--memory-limit", "0GiB"], "is not a size"),
        (
            [str(SMALL), "--memory-limit", "24"],
            "--memory-limit: '24' has no unit: 24GiB (2^30 bytes each), 24GB (10^9)",
        ),
        ([str(SMALL), "--figure", "x.gif"], "--figure: allowed suffixes are .html, and x.gif has another"),
        ([str(SMALL), "--device", "4"], "has no events of device 4, only of 0"),
        ([str(SMALL), "--max-file-size", "1KiB"], "raise the limit with --max-file-size"),
        ([str(SMALL), "--speed"], "unrecognized arguments: --speed; vramsweep replay --help lists"),
        (
            [str(SMALL), "--figure", "/dev/null/x.html"],
            "the figure could not be drawn: vramsweep: cannot write",
        ),
        ([], "the following arguments are required: file; vramsweep replay --help"),
    ],
)
def test_mistakes_are_one_line_and_status_2(capsys, arguments, message):
    assert replay(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("vramsweep: ")
    assert error.count("\n") <= 2
    assert "Traceback" not in error
