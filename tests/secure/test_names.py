"""A name never leads out of the folder that it is made in, whoever gives it: a user, a preset, a journal."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from conftest import SETTINGS, Cli, refusal, tiny
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.analysis.answers.answer_table import what_if_tables
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.figures import timeline as figure
from vramsweep.harness.files import file_names, outputs, sweep_folder
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions import trace_query
from vramsweep.harness.rows.schema import complete_row
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_parser import parse
from vramsweep.harness.sweep import plan

OUT = [
    "../x", "/abs", "a/b", "..", ".", ".hidden", "   ", "x" * 300, "é" * 150, "a\nb", "a\x1b[2Jb", "a\u202eb", "a\0b",
]  # fmt: skip
ANY = (
    st.text(st.characters())
    | st.sampled_from(OUT)
    | st.lists(st.sampled_from(["..", "/", ".", "a", "\0"])).map("".join)
)


@given(ANY)
def test_a_file_s_name_of_anything_is_one_name_and_what_a_sweep_may_be_called_is_one_folder(text: str) -> None:
    name = file_names.make_safe(text)
    assert file_names.name_problem(name) is None or name == "_" * len(name)
    assert Path("/top", name).parent == Path("/top")
    assert Path("/top", name).name == name  # no . or ..
    assert len(f"{name}.json.lock.123456".encode()) <= 255
    assert file_names.make_safe(name) == name
    if file_names.name_problem(text) is None:
        assert name == text and Path("/top", text).resolve().parent == Path("/top")


@pytest.mark.parametrize(
    "good", ["night", "tiny-torch-cpu", "a+b", "été 2", "x" * file_names.LONGEST, "..a"[2:], "a..b"]
)
def test_ordinary_names_stay(good: str) -> None:
    assert file_names.name_problem(good) is None
    assert file_names.make_safe(good) == good


@pytest.mark.parametrize("bad", OUT)
def test_settings_take_no_name_that_leads_out(bad: str) -> None:
    with pytest.raises(UserError, match=r"^name=.*results=DIR sets another place$") as said:
        plan.Settings(**(SETTINGS | {"name": bad}))
    assert len(str(said.value).splitlines()) <= 3
    assert plan.Settings(**(SETTINGS | {"name": ""})).name == ""  # as null


LEADING_OUT = (
    "name=../x", "name=/abs", "name=..", "name=.", f"name={'x' * 300}", "name=a/b", "sweep=../x", "sweep='../x'",
    "model=../../x", "sweep=/x", "runner=../x", "protocol=..",
)  # fmt: skip


@pytest.mark.slow
def test_the_command_line_takes_none_and_writes_nothing(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "x.yaml").write_text("# @package _global_\nseq_len: 3\n")
    monkeypatch.chdir(inner)
    for verb, word in [*(("sweep", word) for word in LEADING_OUT), ("plan", LEADING_OUT[0])]:
        said = cli.refuse(verb, "model=tiny", "device=cpu", "results=results", "report=false", word)
        assert said.splitlines()[-1].startswith("vramsweep: ") and "Traceback" not in said, word
        assert {one.name for one in tmp_path.iterdir()} == {"inner", "x.yaml"}
        assert not [one for one in inner.rglob("*") if one.is_file() and one.parent.name != ".hydra"]


def test_a_recording_is_in_the_sweep_s_folder(tmp_path: Path) -> None:
    """The column is read from a journal that may be anyone's."""
    folder = tmp_path / "sweep"
    own = folder / "trials"
    (own / "attempts").mkdir(parents=True)
    (tmp_path / "secret.pickle").write_bytes(b"")
    (own / "link.pickle").symlink_to(tmp_path / "secret.pickle")
    row = {"trial_id": "t", "model": "m", "seq_len": 1, "precision": "fp32"}
    outside = ("../../secret.pickle", "link.pickle", "attempts/../../../secret.pickle")
    for name in (str(tmp_path / "secret.pickle"), *outside):
        assert file_names.is_inside(own, name) is None
        found, notes = what_if_tables(Table(pd.DataFrame([row | {"recording": name}]), str(folder)))
        assert found == []
        assert "is not in" in notes[0]
    assert file_names.is_inside(own, "attempts/t/1/recording.pickle") == own / "attempts/t/1/recording.pickle"


def test_files_that_are_called_after_a_trial_stay_in_the_folder(tmp_path: Path) -> None:
    """An id is a hash, unless somebody wrote the journal by hand."""
    row = complete_row({"trial_id": "../../../x", "started_at": "now"})
    place = trace_query._timeline_path(tmp_path / "sweep", row)
    assert place.parent == tmp_path / "sweep" / "timelines"
    (tmp_path / "sweep").mkdir()
    trace_query._keep(tmp_path / "sweep", row, {"peak": {}})
    assert trace_query._read_kept(tmp_path / "sweep", row) == {"peak": {}}
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [place]
    place.write_text("[1]")
    assert trace_query._read_kept(tmp_path / "sweep", row) is None


def test_a_figure_that_is_called_after_a_trial_is_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {
        "parts": {name: [1, 1] for name in figure.PARTS}, "allocated": [9, 9], "reserved": [9, 9], "event": [0, 1],
        "events": 2, "limit": None, "failure": None, "phases": [], "step": 2,
        "peak": {"event": 0, "allocated": 9, "phase": "forward"},
    }  # fmt: skip
    monkeypatch.setattr(figure, "_caption", lambda *_: "")
    monkeypatch.setattr(figure, "_frame", lambda _: pd.DataFrame())
    about = trace_query.describe_trial(parse(tiny(device={"name": "simulated", "gpu": "a100-40gb"})))
    name = figure.of_timeline({"trial_id": "../../x", "about": about, "timeline": data}).name
    assert file_names.name_problem(name) is None


def put(folder: Path, beside: bool = True, **files: str) -> list[str]:
    """Write files such as a_csv, sub__a_csv by a verb; its remarks."""
    with outputs.into_folder(folder, "report", beside) as (draft, notes):
        for name, text in files.items():
            place = draft / name.replace("__", "/").replace("_", ".")
            place.parent.mkdir(exist_ok=True)
            place.write_text(text)
    return notes


def held(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != outputs.LIST)
    return {file.relative_to(folder).as_posix(): file.read_text() for file in files}


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    folder, elsewhere, target = tmp_path / "sweep", tmp_path / "elsewhere", tmp_path / "bashrc.csv"
    elsewhere.mkdir()
    target.write_text("mine")
    folder.mkdir()
    for name, to in (("rows.csv", target), ("figures", elsewhere), (outputs.LIST, target)):
        (folder / name).symlink_to(to)
        with pytest.raises(UserError, match=r"is a link to .*--out"):
            put(folder, rows_csv="x", figures__a_csv="x")
        (folder / name).unlink()
        assert held(folder) == {} and list(folder.iterdir()) == []
    (tmp_path / "sweep2").symlink_to(folder)
    put(tmp_path / "sweep2", rows_csv="x")  # the folder itself is what the user has named
    assert held(folder) == {"rows.csv": "x"}
    link = tmp_path / "link.csv"
    link.symlink_to(target)
    outputs.write(link, "new")
    assert (target.read_text(), link.read_text(), link.is_symlink()) == ("mine", "new", False)
    assert "cannot write" in refusal(UserError, outputs.write, elsewhere, "x")


def test_a_folder_is_written_only_if_it_is_empty_or_the_verbs_own(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    put(folder, beside=False, rows_csv="1", figures__a_csv="1", answer_csv="1", figures__b_csv="1")
    with pytest.raises(UserError, match="but not the list"), outputs.into_folder(folder, "paper"):
        pass
    (folder / "figures" / "mine.pdf").write_text("mine")
    (folder / "figures" / "b.csv").write_text("edited")
    (folder / "rows.csv").write_text("edited")
    said = put(folder, beside=False, rows_csv="2", figures__a_csv="2")
    mine = {"figures/mine.pdf": "mine", "figures/b.csv": "edited", "rows.csv.kept": "edited"}
    assert held(folder) == {"rows.csv": "2", "figures/a.csv": "2"} | mine and not (folder / "answer.csv").exists()
    assert len(said) == 1 and "rows.csv.kept, because vramsweep report did not write" in said[0]
    with pytest.raises(OSError), outputs.into_folder(folder, "report") as (draft, _):
        (draft / "rows.csv").write_text("3")
        raise OSError(28, "full", str(draft / "rows.csv"))
    assert held(folder)["rows.csv"] == "2"


def test_traces_are_not_kept_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("trials", "trials/traces"):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(tmp_path / "elsewhere")
        assert "by a link" in refusal(UserError, sweep_folder.kept_traces, folder)
    assert sweep_folder.kept_traces(tmp_path) == tmp_path / "trials" / "traces"


def test_what_was_read_and_what_others_made_stays(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("read")
    for verb in ("report", "index", "report"):
        with outputs.into_folder(tmp_path, verb, beside=True, source="rows.csv") as (draft, notes):
            (draft / ("index.html" if verb == "index" else "report.html")).write_text(verb)
        assert notes == []
    assert held(tmp_path) | {"rows.csv": "read", "index.html": "index", "report.html": "report"} == held(tmp_path)
    put(tmp_path, rows_csv="2")  # of other rows
    assert held(tmp_path)["rows.csv.kept"] == "read" and "report.html" not in held(tmp_path)


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"verb": "report"}', '{"verb": "report", "made": {"a": 1}}'])
def test_a_list_that_is_none_makes_no_folder_the_verbs_own(tmp_path: Path, text: str) -> None:
    (tmp_path / outputs.LIST).write_text(text)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"contains .*README\.md, but not the list"):
        put(tmp_path, beside=False, README_md="x")
    put(tmp_path, README_md="x")
    assert held(tmp_path) == {"README.md": "x", "README.md.kept": "mine"}


def test_a_list_names_nothing_outside_or_that_the_verb_does_not_make(tmp_path: Path) -> None:
    mine = tmp_path / "bashrc"
    mine.write_text("mine")
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "journal.jsonl").write_text("mine")
    made = {n: [outputs._digest(mine)] for n in ("../bashrc", str(mine), "a/../../bashrc", "journal.jsonl")}
    (folder / outputs.LIST).write_text(json.dumps({"verb": "report", "made": made}))
    put(folder, rows_csv="1")
    assert mine.read_text() == "mine" == (folder / "journal.jsonl").read_text()
    (folder / outputs.LIST).unlink()
    assert len(put(folder, rows_csv="2")) == 1 and held(folder)["rows.csv.kept"] == "1"


def sent(folder: Path, trial: Trial) -> None:
    """A folder that somebody made, with one row."""
    row = {
        "trial_id": "0123456789abcdef", "attempt": 1, "terminal": True, "outcome": "ok", "device": "simulated",
        "model": "m", "runner": trial.runner.name, "seq_len": 32, "micro_batch": 2, "peak_reserved_bytes": 1 << 30,
        "peak_allocated_bytes": 1 << 30, "trial": trial.model_dump(mode="json"), "started_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_text(json.dumps(complete_row(row)) + "\n")


@pytest.mark.parametrize(
    "named",
    [
        {"runner": {"name": "custom", "target": "FILE:build"}},
        {"runner": {"name": "script", "command": f"{sys.executable} FILE"}, "seq_len": 1, "micro_batch": 1},
    ],
    ids=["target", "command"],
)
@pytest.mark.slow
def test_looking_at_a_folder_runs_none_of_its_code(named: dict[str, Any], tmp_path: Path, cli: Cli) -> None:
    """`explain`, `timeline` and `report` of a folder that somebody sent, whose rows name a file in it."""
    folder, mark = tmp_path / "sent", tmp_path / "mark"
    (folder / "traces").mkdir(parents=True)
    evil = folder / "evil.py"
    evil.write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\ndef build(*a, **k): raise SystemExit\n")
    values = tiny(device={"name": "simulated", "gpu": "a100-40gb"}) | json.loads(
        json.dumps(named).replace("FILE", str(evil))
    )
    sent(folder, parse(values))
    for verb, *more in (["explain"], ["timeline", "0123456789abcdef"]):
        said = cli.refuse(verb, folder, *more)
        assert "as its row says" in said and str(evil) in said
    if "target" in named["runner"]:
        cli.run("report", folder, "--images", "none")
    assert not mark.exists()


@pytest.mark.slow
def test_looking_at_a_folder_asks_no_hub_and_reads_nothing_that_a_row_names(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append((self.path, self.headers.get("authorization")))
            self.send_error(404)

        do_GET = do_HEAD

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    for name, text in {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_TOKEN": "hf_ofthisuser",
                       "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}.items():  # fmt: skip
        monkeypatch.setenv(name, text)
    own = tmp_path / "own"
    own.mkdir()
    os.mkfifo(own / "config.json")
    (tmp_path / "data.txt").write_text("1\n" * 9)
    of_hub = {"name": "m", "model_type": None, "config": {}, "path": "somebody/model"}
    named = [{"model": of_hub}, {"model": {**of_hub, "path": str(own)}}, {"data": f"lengths:{tmp_path}/data.txt"}]
    trials = [parse(tiny(device={"name": "simulated", "gpu": "a100-40gb"}, **one)) for one in named]
    monkeypatch.setattr(
        "vramsweep.harness.spec.trial_parser._fingerprint", refuse := Mock(side_effect=AssertionError("read"))
    )
    for verb, trial in zip(("explain", "timeline", "explain"), trials, strict=True):
        sent(folder := tmp_path / f"sent{trials.index(trial)}", trial)
        assert "as its row says" in cli.refuse(verb, folder)
    assert not refuse.called
    with pytest.raises(UserError):  # and if it were traced
        trace_query.ask("timeline", trials[:1], tmp_path, trace=True)
    assert asked == []
    cli.refuse("explain", "model=hub", "model.path=somebody/model", "seq_len=8", "gpu=a100-40gb")
    hub.shutdown()
    assert "Bearer hf_ofthisuser" in {token for _, token in asked}  # whoever names it, asks
