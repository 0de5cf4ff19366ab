"""Journals and tables made to do harm: each line is a row, or skipped and counted, or refused in one line."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from vramsweep.__main__ import main
from vramsweep.analysis.data.importers import open_rows
from vramsweep.analysis.data.load import load
from vramsweep.harness.files import sweep_folder
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal, journal_lock, migrations, repeats, step_statistics
from vramsweep.harness.rows.schema import BY_NAME, LARGEST, SCHEMA_VERSION, TEXT_LISTS
from vramsweep.harness.sweep import publication_check as check
from vramsweep.harness.sweep import slurm_jobs

FITTING: dict[type, tuple[Any, ...]] = {
    int: (0, -1, 10**39, 2**63, 3.0),
    float: (0.0, -1e39, 5e-324, 7),
    str: ("", "x" * 10_000, "=cmd()", "../../etc/passwd", "/etc/passwd", "\x1b[2J\n", "a\0b", "\u202e"),
    bool: (True,),
    list: ([],),
    dict: ({}, {"a": {"b": [1, "x", None]}}, {"name": "../x"}),
}
WRONG: dict[type, tuple[Any, ...]] = {
    int: ("1", True, [], {}, 10**400, -(10**50), 1e308),
    float: ("1.5", False, [], {}, 1e300, -1e41),
    str: (1, 1.5, True, [], {}),
    bool: (1, 0, "true", []),
    list: ({}, "x", 7, [[]], [{}], [1e300]),
    dict: ([], "x", 7),
}


def row(**values: Any) -> dict[str, Any]:
    known = {"schema_version": SCHEMA_VERSION, "trial_id": "a", "attempt": 1, "terminal": True, "outcome": "ok"}
    measured = {
        "device": "cuda", "gpu_name": "NVIDIA H100 80GB HBM3", "torch_version": "2.12.0", "model": "m", "seq_len": 128,
        "micro_batch": 2, "peak_allocated_bytes": 1 << 30, "peak_reserved_bytes": 1 << 31, "step_times_s": [0.5] * 12,
        "elapsed_s": 6.0, "tokens_per_s": 500.0, "measured_steps": 12,
    }  # fmt: skip
    return {**known, **measured, **values}


def text(values: Any) -> bytes:
    return json.dumps(values).encode()


def test_a_column_keeps_what_it_may_hold_and_something_else_makes_it_no_row() -> None:
    for name, column in BY_NAME.items():
        for value in WRONG[column.type]:
            assert journal.parsed(text(row(**{name: value}))) is None, (name, value)
        for value in FITTING[column.type] if name not in ("trial_id", "schema_version", "outcome") else ():
            found = journal.parsed(text(row(**{name: value})))
            assert found is not None and found[name] == value, (name, value)


def test_what_no_json_has_is_unknown() -> None:
    found = journal.parsed(b'{"trial_id":"a","outcome":"ok","loss_first":NaN,"loss_last":-Infinity}')
    assert found is not None and (found["loss_first"], found["loss_last"]) == (None, None)
    assert journal.parsed(b'{"trial_id":"a","loss_first":1e400}') is None


def test_depth_is_no_row_at_any_level() -> None:
    for levels in (30, 100, 900, 100_000):
        nested = b'{"trial_id":"a","outcome":"ok","trial":{"x":' + b"[" * levels + b"]" * levels + b"}}"
        assert (journal.parsed(nested) is None) == (levels > 30), levels


@pytest.mark.parametrize("value", [
    None, [], {"a": 1}, "x", 7, [["x"]], {"name": ["x"]}, {"name": None, "options": [1]},
])  # fmt: skip
@pytest.mark.parametrize("name", ["runner", "optimizer", "protocol", "device", "attention", "sharding", "model"])
def test_a_trial_of_version_1_with_anything_in_it_stops_nobody(name: str, value: Any) -> None:
    """Its id is made to fit: only then is all of it looked at."""
    trial = {"runner": {"name": "torch", "options": {}}, "device": {"name": "cuda"}, "optimizer": "adamw", name: value}
    for phase in ("step 7", "step ²", "step " + "9" * 5000, None):
        old = {
            "schema_version": 1, "outcome": "oom", "phase": phase, "zero_stage": [1], "peak_flops": 1.0, "mfu": 1.0,
            "gpu_name": "NVIDIA H100 80GB HBM3", "precision": "bf16", "trial": trial,
        }  # fmt: skip
        found = journal.parsed(text(old | {"trial_id": migrations.first_id(trial)}))
        assert found is None or found["schema_version"] == SCHEMA_VERSION


def test_rows_of_a_version_to_come_are_read_by_what_is_known_of_them() -> None:
    found = journal.parsed(text(row(schema_version=99, brand_new={"a": [1e300]})))
    assert found is None  # what cannot be reckoned with is refused wherever it stands
    found = journal.parsed(text(row(schema_version=99, brand_new={"a": [1]})))
    assert found is not None and found["brand_new"] == {"a": [1]}


def evil_rows(seed: int) -> list[dict[str, Any]]:
    """Rows with many columns of the right type and absurd values."""
    draw = random.Random(seed)
    rows = []
    for number in range(24):
        values = {}
        for name in draw.sample(sorted(BY_NAME), draw.choice((1, 5, 60))):
            if name not in ("trial_id", "terminal", "schema_version", "outcome"):
                kind = BY_NAME[name].type
                lists = ([], ["=cmd()", "\x1b[2J"]) if name in TEXT_LISTS else ([], [0] * 12, [1e39, 5e-324] * 6)
                values[name] = draw.choice(lists if kind is list else FITTING[kind])
        length = {"seq_len": 128 * (1 + number % 6), "trial_id": f"t{number}", "repeat": number // 6}
        rows.append(row(**length) | values)
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_questions_about_absurd_rows_are_answered(seed: int, tmp_path: Path) -> None:
    found = [one for one in (journal.parsed(text(values)) for values in evil_rows(seed)) if one is not None]
    assert len(found) > 12
    for finding in check.findings(found, None):
        assert finding.text
    for runs in repeats.configurations(found):
        repeats.find_apart(runs)
        repeats.interval([one["tokens_per_s"] or 0 for one in runs])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_verbs_that_read_absurd_rows_end_as_they_should(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / journal.NAME).write_bytes(b"\n".join(map(text, evil_rows(seed))))
    look(tmp_path, tmp_path / "out", capsys, VERBS[:7])
    assert {path.name for path in tmp_path.iterdir()} <= {journal.NAME, "out.csv"}


def test_a_long_training_is_judged_in_no_time_and_as_a_short_one_is() -> None:
    draw = random.Random(5)
    steady = [1 + draw.gauss(0, 0.02) for _ in range(200_000)]
    began = time.monotonic()
    assert step_statistics.is_drifting(steady) is False
    assert step_statistics.is_drifting([one * (1 + at / 4e6) for at, one in enumerate(steady)]) is True
    assert time.monotonic() - began < 20


def test_an_interval_that_no_number_holds_is_none() -> None:
    assert repeats.interval([5e-324, 1e39]) is None
    assert repeats.interval([1.0, 1.1]) is not None


@pytest.mark.parametrize("plan", [b"[" * 100_000, b"7", b'{"id_version":1,"systems":7}', b"\xff", b'{"answer":["x"]}'])
def test_a_plan_that_is_none_leaves_the_rows(plan: bytes, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / journal.NAME).write_bytes(text(row()))
    (tmp_path / journal.PLAN).write_bytes(plan)
    cli.run("status", tmp_path)
    assert "Traceback" not in cli.run("check", tmp_path, status=1).err


SPECIAL: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a link to a device without end": lambda place: place.symlink_to("/dev/zero"),
    "a link to a pipe": lambda place: (os.mkfifo(f"{place}.pipe"), place.symlink_to(f"{place}.pipe")),
    "a folder": Path.mkdir,
    "a file of a terabyte": lambda place: (place.touch(), os.truncate(place, 1 << 40)),
}
READ = (journal.NAME, "journal-b.jsonl", journal.PLAN, "plan-b.json", "inferred.jsonl")
READ += ("cluster/jobs.json", "timelines/a.json", "traces/a.json")


@contextlib.contextmanager
def ends(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise AssertionError("it waits")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


VERBS = ("status", "check", "fit", "frontier", "export", "calibrate", "compare", "explain", "timeline", "report")


def look(folder: Path, out: Path, capsys: pytest.CaptureFixture[str], verbs: tuple[str, ...] = VERBS) -> dict[str, int]:
    """Every verb that looks at a results folder; its statuses, none of which is a traceback's."""
    found = {}
    for words in verbs:
        more = {"export": [f"{out}.csv"], "calibrate": [str(folder)], "compare": ["--by", "seq_len=128,256"]}
        more |= {"report": ["--out", str(out)], "timeline": ["--kept"]}
        with ends(120):
            found[words] = main([words, str(folder), *more.get(words, [])])
        assert "Traceback" not in capsys.readouterr().err
    assert set(found.values()) <= {0, 1, 2}, found
    return found


@pytest.mark.parametrize("kind", SPECIAL)
def test_no_verb_waits_for_what_is_no_file(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(READ):
        folder = tmp_path / str(number)
        place = folder / name
        place.parent.mkdir(parents=True)
        if name != journal.NAME:
            (folder / journal.NAME).write_bytes(text(row()))
        SPECIAL[kind](place)
        if name == journal.NAME:
            assert set(look(folder, tmp_path / "out", capsys).values()) == {2}
        with ends(60):
            refused = name.startswith("journal")
            assert (main(["status", str(folder)]), main(["check", str(folder)])) == ((2, 2) if refused else (0, 1))
            assert sweep_folder.read_inferred(folder) == []
            assert slurm_jobs.submitted_jobs(folder) == {} and not journal_lock.is_locked(place)
            with pytest.raises(UserError) if refused else contextlib.nullcontext(), journal.Journal(folder):
                journal.read(folder)


def test_a_row_that_does_not_say_how_it_ended_is_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"trial_id": "a"}, {"outcome": "ok"}, {"trial_id": "a", "outcome": None}]
    lines += [{"trial_id": "b", "outcome": "?"}]
    for number, few in enumerate((lines[:1], lines)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / journal.NAME).write_bytes(b"\n".join(map(text, few)))
        if number == 0:
            look(folder, tmp_path / "out", capsys)
        rows, unreadable = journal.read(folder)
        assert unreadable == min(len(few), 3)
        assert all(one.keys() >= BY_NAME.keys() for one in rows)
        main(["status", str(folder)])
        assert f"{unreadable} unreadable" in capsys.readouterr().out


NAMES = b"seq_len,peak_allocated_mib,peak_reserved_mib,iterations_per_s\n"
OURS = "trial_id,outcome,terminal,seq_len,micro_batch,peak_allocated_bytes,tokens_per_s,step_times_s\n"
FILES: dict[str, bytes] = {
    "empty": b"",
    "nothing but NUL": b"\0" * 4096,
    "NUL in a cell": NAMES + b"128,1\0,2,3\n",
    "utf-16": (NAMES + b"128,1,2,3\n").decode().encode("utf-16"),
    "two encodings": NAMES + b"128,1,2,3 \xe9\n256,\xc3\xa9,2,3\n",
    "a gigantic cell": NAMES + b"128," + b"9" * 5_000_000 + b",2,3\n",
    "a gigantic name": b"seq_len," + b"x" * 5_000_000 + b"\n128,1\n",
    "many columns": b",".join(b"c%d" % n for n in range(50_000)) + b"\n" + b",".join([b"1"] * 50_000) + b"\n",
    "an open quote": NAMES + b'128,"1,2,3\n' + b"256,1,2,3\n" * 1000,
    "formulas": NAMES + b"=cmd(),@SUM(1),+1+1,-2+3\n",
    "formulas as names": b"=cmd(),@SUM(1)\n1,2\n",
    "too large": NAMES + b"1e400,1e400,-1e400,1e308\n128,1e308,1e300,1e-320\n",
    "less than nothing": NAMES + b"-128,-1,-2,-3\n0,0,0,0\n",
    "no numbers": NAMES + b"nan,inf,-inf,none\ntrue,[],{},x\n",
    "digits of another script": NAMES + "١٢٨,²,½,３\n".encode(),
    "returns": NAMES.replace(b"\n", b"\r") + b"128,1,2,3\r",
    "ragged": NAMES + b"128\n128,1,2,3,4,5,6\n,,,,,,,\n",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_a_foreign_csv_is_read_or_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(content)
    for columns in (None, "seq_len,peak_active_mib,peak_reserved_mib,iterations_per_s"):
        try:
            table, notes = open_rows(file, columns)
        except UserError as error:
            assert len(str(error)) < 1500 and str(error).count("\n") <= 1
            continue
        assert all(len(note) < 1500 for note in notes)
        numbers = table.frame.select_dtypes("Float64")
        assert not (numbers.abs() > LARGEST).any().any()
        for name in ("seq_len", "peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_s"):
            assert not (table.frame[name] < 0).fillna(False).any(), name


def test_numbers_of_our_own_csv_that_cannot_be_are_unknown_and_said(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(
        OURS
        + "a,ok,true,0,1,5,1,[]\nb,ok,true,-8,2,-5,-1,[1]\nc,ok,true,8,2,9e18,1e300,[1e400]\nd,ok,true,8,1,7,2,[1]\n"
    )
    table = load(file)
    frame = table.frame.set_index("trial_id")
    assert frame["seq_len"].isna().tolist() == [True, True, False, False]
    assert frame["peak_allocated_bytes"].isna().tolist() == [False, True, True, False]
    assert frame["tokens_per_s"].isna().tolist() == [False, True, True, False]
    (said,) = [note for note in table.warnings if "impossible numbers" in note]
    assert all(name in said for name in ("seq_len", "peak_allocated_bytes", "tokens_per_s"))


@pytest.mark.parametrize("cell", ["[" * 100_000, '"[[1],2]"', "{}", '"[""x"", null]"', "7", "\x1b[2J"])
def test_a_list_of_our_own_csv_that_is_none_is_unknown(cell: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(OURS + f"a,ok,true,8,1,5,1,{cell}\n")
    assert load(file).frame["step_times_s"].isna().all()


@pytest.mark.parametrize(
    "found", ["[" * 100_000, "7", "{}", "[7]", '[{"points":"x"}]', '{"rows":[]}', "\0", '{"rows":7}', "[[]]"]
)
def test_what_is_drawn_is_what_was_printed(found: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "data.json").write_text(found)
    for words in (("draw", tmp_path / "data.json", tmp_path / "out.html"), ("errors", tmp_path / "data.json")):
        assert cli.refuse(*words).count("\n") <= 2


def test_parts_of_a_foreign_row_that_are_none_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = {
        "schema_version": 2, "terminal": True, "outcome": "ok", "device": "cuda", "protocol": "job",
        "peak_reserved_bytes": 5, "peak_allocated_bytes": 4, "largest_part": "nowhere", "seq_len": 8,
    }  # fmt: skip
    parts = ({"load": "x", "steps": -1}, {"load": [1], "steps": 7}, {}, {"steps": 1e39, "load": None})
    rows = [json.dumps(whole | {"trial_id": str(n), "part_peak_allocated_bytes": p}) for n, p in enumerate(parts)]
    (tmp_path / "journal.jsonl").write_text("\n".join(rows) + "\n")
    assert main(["frontier", str(tmp_path)]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
