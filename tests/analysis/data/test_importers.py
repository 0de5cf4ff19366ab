"""Foreign files and export; headers as people's scripts write them, read as our columns, in their units."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import synthetic
from conftest import ROOT, Cli, cases, parametrized, refusal

from vramsweep.analysis.cli import parser
from vramsweep.analysis.data.importers import open_rows, our_name
from vramsweep.analysis.data.load import Table, load
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.model.observations import observations
from vramsweep.harness.messages.errors import UserError

pytestmark = pytest.mark.deterministic

MIB = 2**20


def opened(folder: Path, text: str, columns: str | None = None, **how: Any) -> tuple[Table, list[str]]:
    """Write the text to x.csv; return what is read from it."""
    (folder / "x.csv").write_text(text)
    return open_rows(folder / "x.csv", columns, **how)


def test_a_bare_csv_of_four_numbers_is_read_and_what_was_assumed_is_said(tmp_path: Path) -> None:
    table, notes = opened(tmp_path, "128, 100, 120, 2.0\n256, 110, 130, 1.0\n256, 110, 130, 1.1\n")
    assert "seq_len, peak_active_mib, peak_reserved_mib, iterations_per_s" in notes[0]
    assert table.frame["peak_active_bytes"].tolist() == [100 * MIB, 110 * MIB, 110 * MIB]
    assert table.frame["tokens_per_s"].tolist() == pytest.approx([256.0, 256.0, 281.6])
    assert set(table.frame["foreign"]) == {"x.csv"}
    assert table.frame["peak_allocated_bytes"].isna().all()


def test_text_where_numbers_should_be_is_said(tmp_path: Path) -> None:
    table, notes = opened(tmp_path, "seq_len,peak_allocated_mib\n128,many\n256,100\n")
    assert table.frame["peak_allocated_bytes"].tolist() == [pd.NA, 100 * MIB]
    assert any(note.startswith("peak_allocated_mib: 1 value such as 'many' is not float") for note in notes)


def test_columns_can_be_named(tmp_path: Path) -> None:
    table, _ = opened(tmp_path, "128,4,1.5\n256,4,2.5\n", "seq_len, micro_batch, peak_allocated_gib")
    assert table.frame["peak_allocated_bytes"].tolist() == [1536 * MIB, 2560 * MIB]
    assert table.frame["micro_batch"].tolist() == [4, 4]
    assert "name its 3 columns" in refusal(UserError, open_rows, tmp_path / "x.csv")


def test_a_file_that_is_none_of_these_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert "convert it to a CSV with a line per run" in refusal(UserError, open_rows, tmp_path / "x.json")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_reads_back_as_the_same_table(tmp_path: Path, cli: Cli, suffix: str) -> None:
    folder = synthetic.write(tmp_path / "sweep", synthetic.sweep(lengths=(128, 8192), batches=(1, 4)))
    out = tmp_path / f"table.{suffix}"
    cli.run("export", folder, out)
    assert f"{out} is the input file" in cli.refuse("export", out, out)
    assert "is too long; give" in cli.refuse("export", out, tmp_path / f"{'a' * 240}.csv")
    pd.testing.assert_frame_equal(load(out).frame, load(folder).frame)


QWEN = ROOT.parent / "shared" / "data" / "qwen15-0.5b-zero3"
LLAMA = ROOT.parent / "shared" / "data" / "llama3-8b-zero3-8gpu"
FOUR_OF_BATCH = "micro_batch,peak_active_mib,peak_reserved_mib,iterations_per_s"
EIGHT_RANKS = "8*(peak_active_mib,peak_reserved_mib),iterations_per_s"
qwen = pytest.mark.skipif(not QWEN.exists(), reason="the public data are not there")
llama = pytest.mark.skipif(not LLAMA.exists(), reason="the public data are not there")


@qwen
def test_public_batches_at_one_length_with_the_one_that_ran_out_of_memory() -> None:
    settings = ["seq_len=2048", "world_size=1", "grad_accum=1", "device_total_gib=24"]
    table, notes = open_rows(QWEN / "batches.csv", FOUR_OF_BATCH, settings=settings)
    frame = table.frame
    assert frame["micro_batch"].tolist() == [1, 2, 3] and frame["seq_len"].tolist() == [2048] * 3
    assert frame["outcome"].tolist() == ["ok", "ok", "oom"]
    assert frame["peak_active_bytes"].tolist() == [14048 * MIB, 20228 * MIB, pd.NA]
    assert frame["tokens_per_s"].tolist()[:2] == pytest.approx([2048 * 4.348797427964968, 4096 * 2.368081557058567])
    assert pd.isna(frame["tokens_per_s"].iloc[2]) and pd.isna(frame["reason"].iloc[2])
    assert any("1 line with 'OOM'" in note for note in notes) and not any("as 1" in note for note in notes)
    points = observations(frame, METRICS["peak_reserved_bytes"], axis="micro_batch")
    assert points.x.tolist() == [1, 2] and points.bound_x.tolist() == [3]
    assert 23 * 2**30 < points.bound_y[0] < 24 * 2**30


@llama
def test_public_lines_of_single_ranks_become_a_row_per_run() -> None:
    table, notes = open_rows(LLAMA / "lengths-zero3.csv", f"seq_len,{EIGHT_RANKS}", settings=["micro_batch=1"])
    frame = table.frame.set_index("seq_len")
    assert len(frame) == 25 and frame["world_size"].eq(8).all() and frame["repeat"].eq(0).all()
    run = frame.loc[11]  # ranks 1 and 5 reserve less; of the six others the first is named
    active = [34848, 33104, 34848, 34667, 34603, 33362, 34829, 34592]
    reserved = [46970, 44966, 46970, 46970, 46970, 44966, 46970, 46970]
    assert [size / MIB for size in run["rank_peak_active_bytes"]] == active
    assert [size / MIB for size in run["rank_peak_reserved_bytes"]] == reserved
    assert (run["worst_rank"], run["peak_active_bytes"], run["peak_reserved_bytes"]) == (0, 34848 * MIB, 46970 * MIB)
    assert run["step_median_s"] == pytest.approx(1 / 1.2523149973727445)
    assert run["tokens_per_s"] == pytest.approx(11 * 8 * 1.2523149973727445)
    # all of a row's memory is of one rank: another one has more active than the one with the largest reserved
    assert (frame.loc[1]["worst_rank"], frame.loc[1]["peak_active_bytes"]) == (1, 34481 * MIB)
    assert max(frame.loc[1]["rank_peak_active_bytes"]) == 34705 * MIB
    assert "peak_active_mib: 1,400 zeros read as unknown" in notes
    assert any(note.startswith("200 lines of 8 ranks make 25 runs") for note in notes)
    assert any("1 for grad_accum" in note for note in notes) and not any("without some" in note for note in notes)


@llama
@pytest.mark.parametrize("out_of_memory", [1, 8])
def test_public_batches_of_eight_ranks_are_one_run_however_many_report_out_of_memory(out_of_memory: int) -> None:
    name, most = {1: ("batches-zero3-checkpointing.csv", 13), 8: ("batches-zero3.csv", 3)}[out_of_memory]
    frame = open_rows(LLAMA / name, f"micro_batch,{EIGHT_RANKS}", settings=["seq_len=2048", "grad_accum=1"])[0].frame
    assert (LLAMA / name).read_text().count("OOM") == out_of_memory
    assert frame["micro_batch"].tolist() == list(range(1, most + 1))
    assert frame["outcome"].tolist() == ["ok"] * (most - 1) + ["oom"]
    last = frame.iloc[-1]
    assert all(pd.isna(last[name]) for name in ("worst_rank", "peak_reserved_bytes", "tokens_per_s"))
    assert frame["rank_peak_reserved_bytes"].isna().tolist() == [False] * (most - 1) + [True]
    if most == 13:
        ten = frame.iloc[9]
        assert ten["worst_rank"] == 7
        assert (ten["peak_reserved_bytes"], ten["peak_active_bytes"]) == (78260 * MIB, 57886 * MIB)
        assert ten["tokens_per_s"] == pytest.approx(10 * 2048 * 8 * 0.1295251800126126)


@pytest.mark.slow
def test_a_rank_that_reports_again_begins_another_run_and_one_that_does_not_report_stays_unknown(
    tmp_path: Path, cli: Cli
) -> None:
    file = tmp_path / "ranks.csv"
    file.write_text(
        "64,10,0,0,0,2\n64,0,0,12,30,1\n"  # active alone known of rank 0
        "128,20,40,0,0,4\n128,22,44,0,0,4\n128,0,0,24,42,3\n"  # rank 0 twice: the first of these runs lacks rank 1
    )
    table, notes = open_rows(file, "seq_len,2*(peak_active_mib,peak_reserved_mib),iterations_per_s")
    frame = table.frame
    assert frame["seq_len"].tolist() == [64, 128, 128] and frame["repeat"].tolist() == [0, 0, 1]
    assert [list(v) for v in frame["rank_peak_active_bytes"]] == [
        [10 * MIB, 12 * MIB], [20 * MIB, None], [22 * MIB, 24 * MIB]
    ]  # fmt: skip
    assert list(frame["rank_peak_reserved_bytes"].iloc[0]) == [None, 30 * MIB]
    assert frame["worst_rank"].tolist() == [1, 0, 0] and frame["step_median_s"].tolist() == [1, 0.25, 1 / 3]
    assert frame["peak_active_bytes"].tolist() == [12 * MIB, 20 * MIB, 22 * MIB]
    assert any("1 run with the settings of an earlier run" in note for note in notes)
    assert any("1 run without some rank's memory (such as rank 1 of the run from line 3 on)" in note for note in notes)
    for out in (tmp_path / "out.csv", tmp_path / "out.parquet"):
        cli.run("export", file, out, "--columns", "seq_len,2*(peak_active_mib,peak_reserved_mib),-")
        assert list(load(out).frame["rank_peak_active_bytes"].iloc[1]) == [20 * MIB, None]


def test_a_run_with_one_rank_out_of_memory_ran_out_of_it(tmp_path: Path) -> None:
    text = "64,10,0,2\n64,OOM\n64,11,0,2\n64,0,12,2\n"
    table, _ = opened(tmp_path, text, "seq_len,2*peak_reserved_mib,iterations_per_s")
    assert table.frame["outcome"].tolist() == ["oom", "ok"] and table.frame["repeat"].tolist() == [0, 1]
    assert table.frame["peak_reserved_bytes"].tolist()[1] == 12 * MIB


def test_lines_of_single_ranks_are_one_run(tmp_path: Path) -> None:
    text = "Length,A0,R0,A1,R1,it/s\n64,1,3,0,0,2\n64,0,0,2,4,2\n"
    columns = "seq_len,2*(peak_active_mib,peak_reserved_mib),iterations_per_s"
    frame = opened(tmp_path, text, columns, settings=["device_total_gib=0.5", "micro_batch=3"])[0].frame
    assert len(frame) == 1 and frame["device_total_bytes"].tolist() == [2**29]
    assert list(frame["rank_peak_active_bytes"].iloc[0]) == [MIB, 2 * MIB]  # its zeros were not measured
    assert list(frame["rank_peak_reserved_bytes"].iloc[0]) == [3 * MIB, 4 * MIB]
    assert frame["tokens_per_s"].tolist() == [64 * 3 * 2 * 2.0]


def test_the_removed_mapping_file_names_what_replaces_it() -> None:
    said = refusal(UserError, parser("fit").parse_args, ["rows.csv", "--mapping", "mapping.json"])
    assert said.startswith("--mapping: was removed; name a CSV's columns in order with --columns")


def test_tokens_per_s_count_batch_accumulation_and_ranks_and_say_what_they_assume(tmp_path: Path) -> None:
    text = "seq_len,step_median_ms,grad_accum\n100,500,4\n100,,4\n"
    table, notes = opened(tmp_path, text, settings=["micro_batch=3", "world_size=2"])
    assert table.frame["tokens_per_s"].tolist() == [100 * 3 * 4 * 2 / 0.5, pd.NA]
    assert table.frame["outcome"].tolist() == ["ok", "bad_result"] and notes == []
    table, notes = opened(tmp_path, text)
    assert table.frame["tokens_per_s"].tolist()[0] == 800
    assert notes == [
        "tokens/s assume 1 for micro_batch, world_size, which the file lacks; if that is wrong, add "
        "--set micro_batch=... --set world_size=..."
    ]


def test_outcomes_in_other_words(tmp_path: Path) -> None:
    words = ["Success", "fine", "CUDA out of memory. Tried to allocate 2.00 GiB", "OOM", "host OOM", "", "", "timeout"]
    peaks = ["1", "2", "3", "", "", "6", "", ""]
    lines = (f"{100 + n},{word},{peak}" for n, (word, peak) in enumerate(zip(words, peaks, strict=True)))
    table, notes = opened(tmp_path, "\n".join(["seq_len,outcome,peak_reserved_mib", *lines]))
    frame = table.frame
    expected = ["ok", "bad_result", "oom", "oom", "host_oom", "ok", "bad_result", "timeout"]
    assert frame["outcome"].tolist() == expected
    assert frame["peak_reserved_bytes"].isna().tolist() == [False, False, True, True, True, False, True, True]
    assert frame["reason"].tolist()[1:3] == ["fine", words[2]] and pd.isna(frame["reason"].iloc[3])
    assert len(notes) == 1 and notes[0].startswith("outcome: 1 value such as 'fine' read as bad_result")


def test_words_for_memory_that_ran_out(tmp_path: Path) -> None:
    texts = ["oom", "Out of memory", "out_of_memory", "CUDA out of memory. Tried 2 GiB, free 1, x, y, z"]
    lines = "".join(f"128,5,{text}\n" for text in texts)
    frame = opened(tmp_path, "64,1,2,3\n256,bloom,2,3\n" + lines)[0].frame
    assert frame["outcome"].tolist() == ["ok", "ok"] + ["oom"] * 4
    assert frame["peak_active_bytes"].isna().tolist() == [False] + [True] * 5
    assert frame["reason"].tolist() == [pd.NA] * 3 + texts[1:]


def test_out_of_memory_in_any_value_leaves_the_device_and_the_settings_known(tmp_path: Path) -> None:
    names = "seq_len,elapsed_s,measured_steps,device_total_gib,peak_active_mib"
    frame = opened(tmp_path, f"{names}\n64,OOM,3,24,7\n128,2,4,24,8\n")[0].frame
    assert frame["outcome"].tolist() == ["oom", "ok"] and frame["tokens_per_s"].isna().tolist() == [True, False]
    assert frame["tokens_per_s"].iloc[1] == 128 * 4 / 2
    assert frame["device_total_bytes"].tolist() == [24 * 2**30] * 2 and frame["peak_active_bytes"].isna().iloc[0]


def test_constants_are_what_a_file_does_not_know(tmp_path: Path) -> None:
    text = "peak_allocated_mib,samples_per_s,micro_batch\n80,24,4\n"
    row = opened(tmp_path, text, settings=["seq_len=512", "device_total_gb=24"])[0].frame.iloc[0]
    assert (row["tokens_per_s"], row["device_total_bytes"]) == (24.0 * 512, 24_000_000_000)
    with pytest.raises(UserError, match="micro_batch is both a constant and the column micro_batch"):
        opened(tmp_path, text, settings=["micro_batch=2"])


def test_options_for_foreign_files_change_nothing_in_our_own_and_that_is_said(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path / "sweep", synthetic.sweep(lengths=(128,), batches=(1,)))
    table, notes = open_rows(folder, settings=["seq_len=2048"])
    assert set(table.frame["seq_len"]) == {128} and "do not apply" in notes[0]


FOUR = "128,100,120,2.0\n256,110,130,1.0\n"


@pytest.mark.parametrize(("columns", "settings", "message"), cases("import_mistakes"))
def test_mistakes_on_the_command_line_are_named(tmp_path: Path, columns: str, settings: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path, FOUR, columns or None, settings=settings.split())
    assert "\n" not in str(caught.value)


@parametrized("import_contents")
def test_files_that_hold_no_rows_are_named(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(UserError, match=text):
        open_rows(tmp_path / "x.csv")


def test_a_byte_order_mark_short_lines_and_missing_values_are_taken_for_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(
        b"\xef\xbb\xbfseq_len,peak_active_mib,sharding,peak_reserved_mib\n1, 0, none,inf\n2,n/a,zero3\n\n3,4,,5,\n"
    )
    table, notes = open_rows(file)
    assert table.frame["peak_active_bytes"].tolist() == [pd.NA, pd.NA, 4 * MIB]
    assert table.frame["peak_reserved_bytes"].tolist() == [pd.NA, pd.NA, 5 * MIB]
    assert table.frame["sharding"].tolist() == ["none", "zero3", pd.NA]
    assert notes == [
        "1 line with fewer than 4 cells; missing values are unknown",
        "peak_active_mib: 1 zero read as unknown",
        "peak_reserved_mib: 1 infinite value read as unknown",
    ]


@pytest.mark.parametrize(("separator", "named"), [(";", "semicolons"), ("\t", "tabs")])
@pytest.mark.parametrize("header", ["seq_len,peak_active_mib,peak_reserved_mib,iterations_per_s\n", ""])
def test_other_separators_than_commas(tmp_path: Path, separator: str, named: str, header: str) -> None:
    table, notes = opened(tmp_path, f"{header}{FOUR}".replace(",", separator))
    assert table.frame["peak_reserved_bytes"].tolist() == [120 * MIB, 130 * MIB]
    assert f"x.csv: cells were read as separated by {named}" in notes


def test_what_is_less_than_nothing_was_not_measured(tmp_path: Path) -> None:
    names = "seq_len,micro_batch,peak_active_mib,step_median_ms,lora_alpha"
    table, notes = opened(tmp_path, f"{names}\n-64,1,5,-2,-1\n0,1,5,3,1\n8,-1,-5,4,1\n")
    assert table.frame["seq_len"].tolist() == [pd.NA, pd.NA, 8]
    assert table.frame["micro_batch"].tolist() == [1, 1, pd.NA]
    assert table.frame["peak_active_bytes"].tolist() == [5 * MIB, 5 * MIB, pd.NA]
    assert table.frame["step_median_s"].tolist() == [pd.NA, 0.003, 0.004]
    assert table.frame["lora_alpha"].tolist() == [-1, 1, 1]  # of what is not measured nothing is known here
    negative = [f"{name}: 1 negative value read as unknown" for name in names.split(",")[:4]]
    assert notes[:5] == ["seq_len: 1 zero read as unknown", *negative]
    _, notes = opened(tmp_path, "seq_len,peak_active_mib\n8,1e300\n9,1\n")
    assert notes == ["peak_active_mib: 1 oversized value read as unknown"]
    slow, _ = opened(tmp_path, "seq_len,iterations_per_s,peak_active_mib\n8,-3,1\n")
    assert slow.frame["step_median_s"].isna().all()


def test_set_on_the_command_line(tmp_path: Path, cli: Cli) -> None:
    file, out = tmp_path / "x.csv", tmp_path / "out.csv"
    file.write_text("1,14048\n2,OOM\n")
    words = ["--columns", "micro_batch,peak_active_mib", "--set", "seq_len=2048", "--set", "device=cuda"]
    cli.run("export", file, out, *words)
    frame = load(out).frame
    assert frame["seq_len"].tolist() == [2048, 2048] and set(frame["device"]) == {"cuda"}
    wrong = cli.refuse("export", file, out, *words, "--set", "device=cpu")
    assert wrong.endswith("vramsweep: --set gives device twice; give it once\n")


@pytest.mark.parametrize(("name", "ours"), cases("headers"))
def test_names_of_others_are_ours(name: str, ours: str) -> None:
    assert our_name(name, ["1"])[0] == ours


@pytest.mark.parametrize(("largest", "unit"), [("17179869184", "bytes"), ("16384", "mib"), ("16.0", "gib")])
def test_a_size_without_a_unit_is_told_by_its_values(largest: str, unit: str) -> None:
    name, assumed = our_name("reserved", ["1", largest, "OOM", ""])
    assert name == f"peak_reserved_{unit}" and "has no unit" in assumed


def test_a_file_of_such_names_is_read_and_what_was_assumed_is_said(tmp_path: Path) -> None:
    lines = "seq, active, reserved, it/s, loss\n128, 10000, 12000, 4, 3.1\n256, 11000, 13000, 2, 3.0\n"
    table, notes = opened(tmp_path, lines)
    assert list(table.frame["peak_active_bytes"]) == [10000 << 20, 11000 << 20]
    assert list(table.frame["tokens_per_s"]) == [512, 512]
    told = " ".join(notes)
    assert "active as peak_active_mib" in told and "up to 13,000, were read as MiB" in told
    assert "columns left out because their names are not known: loss" in told


def test_a_file_of_nothing_but_failures_is_one(tmp_path: Path) -> None:
    table, _ = opened(tmp_path, "4096, OOM\n8192, CUDA out of memory\n")
    assert list(table.frame["outcome"]) == ["oom", "oom"] and list(table.frame["seq_len"]) == [4096, 8192]
