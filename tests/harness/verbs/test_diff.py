"""`diff`: which line requests the memory that is new, and how much, against counts by hand and published numbers."""

import inspect
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Cli, refusal, source
from transformers.cache_utils import DynamicLayer

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions.trace_diff import compare_storages
from vramsweep.harness.verbs.diff import export_commit

pytestmark = pytest.mark.deterministic

STEP = source("step_of_a_net.txt")

# Selective checkpointing that also saved abs kept |W| of each layer, of which float8's scales by row are the largest:
# github.com/pytorch/torchtitan/pull/820.
SCALED = source("scaled_net.txt")

# Rotary tables of ten times as many positions as are used; 5,242,880 bytes instead of 524,288 by
# github.com/karpathy/autoresearch/pull/557.
ROTARY = source("rotary_net.txt")


def commit(folder: Path, text: str) -> None:
    (folder / "train.py").write_text(text + STEP)
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "train.py"), (*who, "commit", "-qm", "a change")):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "before", "after", "expected"),
    [
        (SCALED, "mm.default]", "mm.default, torch.ops.aten.abs.default]",
         {"scale = self": ("activations", "layers.*", 4 * 512 * 512 * 4)}),
        (ROTARY, "arange(2048)", "arange(20480)",
         {"\"cos\", a": ("buffers", "", 4_718_592 // 2), "\"sin\", a": ("buffers", "", 4_718_592 // 2)}),
    ],
)  # fmt: skip
def test_a_commit_that_needs_more(
    cli: Cli, here: Path, text: str, before: str, after: str, expected: dict[str, tuple[str, str, int]]
) -> None:
    commit(here, text)
    later = text.replace(before, after).replace("import torch\n", "import torch\nimport math  # moves every line\n", 1)
    commit(here, later)
    (here / "train.py").write_text("raise SystemExit  # of no commit")
    found = cli.json("diff", "HEAD~1:train.py:build", "HEAD:train.py:build", "gpu=l4-24gb", status=1)
    lines = (later + STEP).splitlines()
    numbers = {code: 1 + next(at for at, line in enumerate(lines) if code in line) for code in expected}
    changes = {one["line"][1]: (one["category"], one["module"], one["difference"]) for one in found["peak"]["changes"]}
    assert changes == {f"train.py:{numbers[code]}": change for code, change in expected.items()}
    a, b = found["peak"]["allocated"]
    assert b - a == sum(size for _, _, size in expected.values()) and found["needs_more"]


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_cache_that_the_trainer_left_on(cli: Cli) -> None:
    """Before transformers 5, the Trainer kept each layer's keys and values: 12 of (8, 12, 1024, 64) in fp32, twice."""
    versions = ("+versions.transformers=5.0.0", "+versions.transformers=4.57.3")
    settings = ("model=gpt2", "runner=trainer", "seq_len=1024", "micro_batch=8", "precision=fp32", "gpu=l4-24gb")
    printed = cli.run("diff", *versions, *settings, status=1).out.splitlines()
    code, first = inspect.getsourcelines(DynamicLayer.update)
    for name in ("keys", "values"):
        number = first + next(at for at, line in enumerate(code) if f"self.{name} = torch.cat" in line)
        assert any(f"x 12, made in cache_utils.py:{number} (new)" in line and "+0.28 GiB" in line for line in printed)
    assert 8 * 12 * 1024 * 64 * 4 * 12 == 301_989_888  # 0.28 GiB
    assert "+0.56 GiB" in printed[2] and printed[4] == "by part: activations +0.56 GiB" and len(printed) == 7


def storage(line: str, size: int, count: int = 1, **over: str) -> dict[str, Any]:
    maker = {"category": "activations", "module": "layers.*", "operator": "aten.mul", "line": f"a.py:{line}"}
    return {**maker, "bytes": size, "count": count, **over}


def test_a_moved_line_is_no_change_and_the_rest_is_paired_by_line() -> None:
    one = {"storages": [storage("10", 4), storage("20", 8), storage("30", 16), storage("40", 32, operator="aten.add")]}
    two = {"storages": [storage("11", 4), storage("20", 6), storage("9", 20), storage("9", 64, category="gradients")]}
    found = compare_storages(one, two) or []
    assert [(c["kind"], c["line"], c["difference"]) for c in found] == [
        ("new", ("", "a.py:9"), 64),
        ("gone", ("a.py:40", ""), -32),
        ("larger", ("a.py:30", "a.py:9"), 4),
        ("smaller", ("a.py:20", "a.py:20"), -2),
    ]
    assert compare_storages(one, one) == [] and compare_storages(one, {"storages": None}) is None


def test_measured_rows_show_sums_only(cli: Cli, here: Path) -> None:
    for trial_id, peak in (("a", 5 << 30), ("b", 4 << 30)):
        row = {"trial_id": trial_id, "terminal": True, "device": "cuda", "outcome": "ok", "peak_allocated_bytes": peak,
               "peak_reserved_bytes": 6 << 30, "forward_peak_allocated_bytes": peak // 2}  # fmt: skip
        with (here / "journal.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    printed = cli.run("diff", f"{here}:a", f"{here}/b").out
    assert "peak allocated 5.0 -> 4.0 GiB: -1.0 GiB" in printed and "no tensors" in printed
    assert "forward   2.5 -> 2.0 GiB: -0.50 GiB" in printed and "load      unknown -> unknown" in printed
    assert cli.json("diff", f"{here}/b", f"{here}:a", status=1)["peak"] == {
        "allocated": [4 << 30, 5 << 30], "parts": None, "changes": None
    }  # fmt: skip
    assert "has its own settings" in cli.refuse("diff", f"{here}:a", f"{here}:b", "gpu=l4-24gb")


def test_a_recording_against_another(cli: Cli, here: Path) -> None:
    """Its largest blocks are 4 of 512 MiB of one autograd node, which gets another name."""
    (before,) = (ROOT / "tests/data/snapshots").glob("silmont2000*.pickle")
    (here / "after.pickle").write_bytes(before.read_bytes().replace(b"DivBackward0", b"NewBackward0"))
    found = cli.json("diff", before, "after.pickle")
    changes = {one["operator"]: (one["kind"], one["difference"], one["count"]) for one in found["peak"]["changes"]}
    assert changes["NewBackward0 (backward)"] == ("new", 2 << 30, [0, 4])
    assert changes["DivBackward0 (backward)"] == ("gone", -2 << 30, [4, 0]) and len(changes) == 2
    assert cli.json("diff", before, before)["peak"]["changes"] == []
    assert "No closing quotation" in cli.refuse("diff", "model='gpt2", "model=gpt2")
    assert "only with a recording" in cli.refuse("diff", before, "model=gpt2")


def test_a_commit_that_git_does_not_know(here: Path) -> None:
    assert "not a git repository" in refusal(UserError, export_commit, "HEAD", here / "out")
    commit(here, "")
    assert "name an existing commit" in refusal(UserError, export_commit, "--output=x", here / "out")
    export_commit("HEAD", here / "out")
    assert (here / "out" / "train.py").read_text() == STEP
