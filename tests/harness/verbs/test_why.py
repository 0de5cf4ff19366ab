"""`why`: rows, what it predicts of settings of the user's or ours, and public logs, whose numbers were read by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, Cli, cases, tiny

from vramsweep.harness.rows import oom_text
from vramsweep.harness.rows.schema import BY_NAME
from vramsweep.harness.search.advice_search import REMEDIES, Advice, Option
from vramsweep.harness.sweep import plan
from vramsweep.harness.verbs import advise, why

GIB = 1 << 30
FULL = next(one for one in REMEDIES if one.words == "checkpointing=full")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the words that predictions were asked for."""
    words: list[list[str]] = []
    base, full = Option((), 20 * GIB, 2e-5), Option((FULL,), 9 * GIB, 3e-5)
    [[item]] = plan.expand_trials([tiny(device={"name": "simulated", "gpu": "t4-16gb"})], 1)

    def ask(given: Any, **_: Any) -> Any:
        words.append(list(given))
        asked = SimpleNamespace(base=item, trial=item.trial, axis=None, padding="")
        return asked, Advice(base, (full,), (base, full), 2, 14 * GIB), []

    monkeypatch.setattr(advise, "ask", ask)
    return words


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return a folder with one predicted row out of memory."""
    [[item]] = plan.expand_trials([tiny(device={"name": "simulated", "gpu": "t4-16gb"})], 1)
    item.resolved["model"]["name"] = "theirs/gpt"
    row = {
        "schema_version": 2, "trial_id": item.trial_id, "terminal": True, "outcome": "oom", "device": "simulated",
        "reason": "too [red]small\x1b", "phase": "step 0, forward", "trial": item.resolved,
        "oom_request_bytes": 2 * GIB, "oom_allocated_bytes": 12 * GIB, "oom_reserved_bytes": 13 * GIB,
        "memory_limit_bytes": 14 * GIB, "unlimited_peak_reserved_bytes": 30 * GIB,
        "oom_parts_bytes": {"parameters": 1 * GIB, "activations": 13 * GIB},
    }  # fmt: skip
    (tmp_path / "journal.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_a_row_is_explained_and_a_model_of_the_folder_s_own_is_not_predicted(
    sweep: Path, cli: Cli, asked: list[list[str]]
) -> None:
    printed = cli.run("why", sweep).out
    assert "predicted; 1 of 1 trials did" in printed and "\x1b" not in printed and "[red]" in printed
    assert "12.0 GiB  allocated: activations 13.0 GiB, parameters 1.0 GiB (with the failed request)" in printed
    assert " 1.0 GiB  reserved but unused" in printed and "30.0 GiB reserved; on: rtx5090-32gb" in printed
    assert "to change: smaller micro_batch" in printed and len(printed.splitlines()) <= 20
    assert asked == [], "the model is not built in"
    assert "no finished trial" in cli.refuse("why", sweep, "abc")


def test_words_after_the_file_are_predicted_and_named_so(tmp_path: Path, cli: Cli, asked: list[list[str]]) -> None:
    (tmp_path / "x.log").write_text("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB")
    printed = cli.run("why", tmp_path / "x.log", "model=gpt2", "seq_len=1024", "gpu=t4-16gb").out.splitlines()
    assert asked == [["model=gpt2", "seq_len=1024", "device.gpu=t4-16gb"]] and len(printed) <= 20
    assert next(line for line in printed if line.startswith("predicted for"))
    assert "  20.0 GiB  reserved: unchanged (too much)" in printed
    assert "   9.0 GiB  reserved: checkpointing=full (fits, recommended)" in printed
    found = cli.json("why", tmp_path / "x.log", "model=gpt2")["predicted"]
    assert found["as_it_is"]["reserved_bytes"] == 20 * GIB


@pytest.mark.slow
def test_a_row_of_a_built_in_model_gives_the_words_of_its_settings() -> None:
    from vramsweep.harness.config import compose

    words = ["model=gpt2", "seq_len=512", "micro_batch=4", "checkpointing=full", "device.gpu=t4-16gb"]
    [item] = compose.resolve(["device=simulated", *words], "explain").trials
    row = dict.fromkeys(BY_NAME) | {"device": "simulated", "trial": item.resolved, "trial_id": item.trial_id}
    typed, ours = why.settings_of_row(row)
    assert ours and set(words) <= set(typed)
    [again] = compose.resolve(["device=simulated", *typed], "explain").trials
    assert again.resolved | {"protocol": None} == item.resolved | {"protocol": None}
    theirs = item.resolved | {"model": item.resolved["model"] | {"path": "theirs/gpt"}}
    assert not why.settings_of_row(row | {"trial": theirs})[1]
    bare = why.settings_of_row(row | {"trial": None, "model": "gpt2", "seq_len": 8})
    assert bare == (["model=gpt2", "seq_len=8"], False)


LOGS = ROOT / "tests" / "data" / "oom_logs"
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {0}.00 GiB. GPU {1} has a total capacity of "
    "79.15 GiB of which 1.12 GiB is free. Including non-PyTorch memory, this process has 78.03 GiB memory in use. Of "
    "the allocated memory 70.00 GiB is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)


def test_every_log_has_its_line_in_the_table() -> None:
    assert {path.name for path in LOGS.glob("*.log")} == {row[0] for row in cases("oom_logs")}
    assert all(f"| {row[0]} | https://" in (LOGS / "README.md").read_text() for row in cases("oom_logs"))


@pytest.mark.parametrize("row", cases("oom_logs"), ids=lambda row: row[0])
def test_a_public_log_says_what_a_reader_finds(row: tuple[str, ...], cli: Cli) -> None:
    name, kind, rank, device, *numbers, own, category, cause = row
    found = cli.json("why", LOGS / name)["first"]
    assert (found["kind"], found["category"], found["own"] or "-") == (kind, category, own)
    assert [str(found[key]) for key in ("rank", "device")] == [value.replace("-", "None") for value in (rank, device)]
    for size, number in zip(("request", "allocated", "reserved", "free", "total", "outside"), numbers, strict=True):
        right = None if number == "-" else pytest.approx(float(number) * GIB, abs=0.00006 * GIB)
        assert found["sizes"].get(size) == right
    printed = cli.run("why", LOGS / name).out
    assert len(printed.splitlines()) <= 20
    assert ("fragmentation" in printed) == (cause != "-") and (cause == "-" or cause in printed)


def test_other_processes_are_told_apart_from_this_one_in_a_container(cli: Cli) -> None:
    assert "1.6 GiB  of other processes: 3721648, 1374765" in cli.run("why", LOGS / "keys_values_92.log").out
    alone = cli.run("why", LOGS / "llama_cookbook_320.log").out  # its process 40666 has all of it, so it is this one
    assert "40666" not in alone and "1.2 GiB  outside PyTorch's allocator" in alone
    assert "find who has 24.9 GiB outside" in cli.run("why", LOGS / "ms_swift_5943.log").out


@pytest.mark.parametrize("form", ["[rank{}]: ", "rank{}: ", "[default{}]:", "rank:  {} | ", "{}: "])
def test_eight_ranks_in_one_log(form: str, tmp_path: Path, cli: Cli) -> None:
    stack = ["Traceback (most recent call last):", '  File "/me/train.py", line {0}, in step', "    y = model(x)"]
    lines = [f"{form.format(rank)}{line.format(rank)}" for line in stack for rank in range(8)]
    lines += [f"{form.format(rank)}{NEW.format(rank + 1, rank)}" for rank in (5, 0, 1, 2, 3, 4, 6, 7)]
    (tmp_path / "all.log").write_text("\n".join(lines))
    found = cli.json("why", tmp_path / "all.log")
    wanted = {(rank, rank, f"/me/train.py:{rank} step") for rank in range(8)}
    assert {(one["rank"], one["device"], one["own"]) for one in found["reports"]} == wanted
    assert (found["first"]["rank"], found["first_is_known"]) == (5, "by the order in the log")
    assert found["first"]["code"] == "y = model(x)"
    printed = cli.run("why", tmp_path / "all.log").out.splitlines()
    assert len(printed) <= 20 and "rank 5 (GPU 5)" in printed[0] and any("and 2 more errors" in one for one in printed)
    assert cli.json("why", tmp_path / "all.log", "--device", 3)["first"]["rank"] == 3


def test_a_log_for_each_rank_is_ordered_by_time_stamps_if_all_have_one(tmp_path: Path, cli: Cli) -> None:
    for rank, second in ((0, 9), (1, 7), (2, 8)):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"2026-01-02 03:04:0{second} {NEW.format(2, rank)}\n")
    found = cli.json("why", tmp_path)
    assert (found["first"]["rank"], found["first_is_known"]) == (1, "by its time stamp")
    (tmp_path / "attempt_0" / "2" / "stderr.log").write_text(NEW.format(2, 2))
    assert cli.json("why", tmp_path)["first_is_known"] == "by the order of the files; no time stamps"


def test_torchrun_s_error_file(tmp_path: Path, cli: Cli) -> None:
    stack = f'Traceback (most recent call last):\n  File "/me/train.py", line 3, in main\n    f()\n{NEW.format(2, 6)}'
    error = {"message": "OutOfMemoryError", "extraInfo": {"py_callstack": stack, "timestamp": "1700000000"}}
    (tmp_path / "6").mkdir()
    (tmp_path / "6" / "error.json").write_text(json.dumps({"message": error}))
    first = cli.json("why", tmp_path / "6" / "error.json")["first"]
    assert [first[key] for key in ("rank", "device", "own", "moment")] == [6, 6, "/me/train.py:3 main", "1700000000"]


def test_a_text_without_an_error_is_described(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "ok.log").write_text("step 1\nRuntimeError: CUDA error: device-side assert triggered\n\x1b[2Jdone\n")
    said = cli.run("why", tmp_path / "ok.log", status=1).out
    assert "no out-of-memory error; it is text with 3 lines" in said and "\x1b" not in said
    (tmp_path / "program.log").write_bytes(b"\x7fELF\0\0")
    assert cli.run("why", tmp_path / "program.log", status=1).out.endswith("it is binary data with 1 lines\n")
    assert "cannot be read" in cli.refuse("why", tmp_path / "none.log")
    (tmp_path / "empty").mkdir()
    assert "neither a journal nor a log" in cli.refuse("why", tmp_path / "empty")
    assert "why needs a file" in cli.refuse("why")


def test_an_error_counts_once_and_no_more_of_a_log_is_kept_than_is_needed() -> None:
    again = f"50%|###| 4/8\r\x1b[31m[rank0]: {NEW.format(2, 0)}\x1b[0m\r\n"  # in colour, after a bar of progress
    log = oom_text.find_reports([NEW.format(2, 0), again, "caught: CUDA out of memory"], "x")  # the last has no sizes
    assert [(one.rank, one.line) for one in log.reports] == [(0, 1)]
    lines = (f"step {number}" if number % 7 else NEW.format(number + 1, 0) for number in range(7000))
    log = oom_text.find_reports(lines, "x")
    assert (len(log.reports), log.more, log.lines) == (oom_text.MOST, 1000 - oom_text.MOST, 7000)


def test_a_verdict_is_no_more_certain_than_the_message(tmp_path: Path, cli: Cli) -> None:
    path, old = tmp_path / "x.log", "CUDA out of memory. Tried to allocate {} (GPU 0; 10.76 GiB total capacity; 9.71"
    old += " GiB already allocated; {} free; {}9.75 GiB reserved in total by PyTorch)"  # 41 MiB unused, +- 10
    for request, free, allowed, cause, fraction in (
        ("50.00 MiB", "12.56 MiB", "", "may be the cause", False),
        ("2.00 MiB", "12.56 MiB", "", "a limit of the process refused, or the driver", False),
        ("20.00 MiB", "12.56 MiB", "9.76 GiB allowed; ", "a limit of the process refused", True),
        ("20.00 MiB", "12.56 MiB", "10.00 GiB allowed; ", "alone is the cause", False),
    ):
        path.write_text(old.format(request, free, allowed))
        answer = cli.json("why", path)["answer"]
        assert any(cause in line for line in answer) and any(line.startswith("least memory") for line in answer)
        assert answer[-1].startswith("to change") and ("memory fraction" in answer[-1]) == fraction
    path.write_text("epoch 1\nKilled\n")
    given = "predictions are of GPU memory, so there are none of this error\n"
    assert cli.run("why", path, "model=gpt2").out.endswith(given)
