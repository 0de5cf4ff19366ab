"""CSV, JSON and mappings from elsewhere that somebody made to do harm: rows, or one line; no cell becomes code."""

import json
from pathlib import Path

import pytest
from conftest import Cli, refusal

from vramsweep.__main__ import main
from vramsweep.analysis.data.importers import open_rows
from vramsweep.analysis.data.load import load
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows.schema import LARGEST

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


@pytest.mark.parametrize("mapping", [
    "[" * 100_000, "7", '{"seq_len": {"from": 1e400}}', '{"seq_len": -1}', '{"seq_len": 0}',
    '{"seq_len": ' + "9" * 4000 + "}", '{"seq_len": {"ranks": []}}', '{"seq_len": "__class__"}',
    '{"seq_len": 1, "peak_allocated_mib": {"from": 2, "scale": 1e999}}', '{"seq_len": 1, "model": {"value": {"a": 1}}}',
])  # fmt: skip
def test_a_mapping_that_is_none_is_one_line(mapping: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(NAMES + b"128,1,2,3\n")
    (tmp_path / "mapping.json").write_text(mapping)
    said = refusal(UserError, open_rows, tmp_path / "rows.csv", mapping=tmp_path / "mapping.json")
    assert len(said) < 5000 and "Traceback" not in said


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
