"""YAML, JSON and texts of settings from elsewhere that somebody made to do harm: one line, soon, and nothing runs."""

import os
import time
from pathlib import Path

import published_readings
import pytest
from conftest import refusal

from vramsweep.__main__ import main
from vramsweep.harness.files import yaml_guard
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec import deepspeed_config, length_distribution

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "m0: &m0 {k: 1}\n" + "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 12))
MODEL = "name: x\nmodel_type: qwen2\nparameters: 1\nmax_positions: 4096\npath: null\nconfig: {vocab_size: 12}\n"
HEAD = "source: someone/project a.csv@0123\ngrade: A\n"
RUNS = "runs:\n- name: a\n  measured:\n  - {quantity: allocated, value: 1, unit: MiB}\n"


def soon(began: float) -> None:
    """Check the CPU time of this process alone, so that a busy machine fails no test."""
    assert time.process_time() - began < 10


@pytest.mark.parametrize("text", [
    BOMB, MERGES, HEAD + BOMB + RUNS, HEAD + "runs: *nosuch", HEAD + "runs: &r [*r]", HEAD + "runs: &r {a: *r}",
    "a: !!python/object/apply:os.system ['touch ran']", "a: !!python/name:os.system", "!!binary x", "[" * 1100,
    "{" * 1100, "\0", "\x1b[2J: 1", "a: 1\na: 2", "? [a]\n: 1", "? {a: 1}\n: 1", "%YAML 9.9\n---\na: 1", "--- a\n--- b",
    "0x" + "f" * 100_000, "source: " + "1" * 10_000, "source: {a: *a}",
])  # fmt: skip
def test_published_runs_that_are_none_are_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "runs.yaml"
    file.write_text(text)
    began = time.process_time()
    said = refusal(UserError, published_readings.read, file)
    soon(began)
    assert len(said) < 800 and said.count("\n") <= 1
    assert [path.name for path in tmp_path.iterdir()] == ["runs.yaml"]


@pytest.mark.parametrize("key", ["quantity", "phase", "value", "unit", "of", "note", "\u202e" * 50])
def test_a_reading_with_a_list_without_end_is_told_shortly(key: str, tmp_path: Path) -> None:
    """An alias costs nothing until somebody writes out what it stands for."""
    file = tmp_path / "runs.yaml"
    reading = {"quantity": "allocated", "value": "1", "unit": "MiB"} | {key: "*a8"}
    listed = ", ".join(f"{name}: {value}" for name, value in reading.items())
    bomb = "note: &a0 [x, x, x]\n" + "versions: {torch: '2'}\noverrides: []\n"
    nested = "".join(f"  - &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    file.write_text(f"source: s\ngrade: A\n{bomb}runs:\n- name: a\n  measured:\n{nested}  - {{{listed}}}\n")
    began = time.process_time()
    _, mistakes = published_readings.read(file)
    soon(began)
    assert mistakes and all(len(one) < 600 for one in mistakes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MODEL + BOMB, "aliases"),
        ("a: \xff\xfe", ""),
        ("a: !!python/object/apply:os.system ['touch ran']", "x.yaml:1"),
        ("a: {b", "x.yaml:1"),
        ("a: *nosuch", "undefined alias"),
        (MODEL + "a: ${nosuch:1}", "nosuch"),
        ("[" * 50_000, ""),
        (MODEL + "a: ${model.a}", "ecursive"),
        ("a: &a [*a]", ""),
    ],
)
def test_a_configuration_of_somebody_else_is_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "x.yaml").write_bytes(text.encode("latin-1"))
    began = time.process_time()
    words = ["plan", "-m", "--config-dir", "conf", "model=x", "device=cpu", "seq_len=8", f"results={tmp_path / 'r'}"]
    assert main(words) == 2
    soon(began)
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told and told.count("\n") <= 3
    assert not (tmp_path / "ran").exists()


def test_what_aliases_stand_for_is_counted(tmp_path: Path) -> None:
    """A file of ours with a few of them is read; links and pipes are not."""
    (tmp_path / "few.yaml").write_text("a: &a [1, 2]\nb: [*a, *a]\n")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(tmp_path / "pipe.yml")
    yaml_guard.check(tmp_path)
    (tmp_path / "many.yml").write_text(BOMB)
    assert "many.yml has more than" in refusal(UserError, yaml_guard.check, tmp_path)


@pytest.mark.parametrize("content", [
    b"[" * 100_000, b"[1e999]", b"[-1]", b"[NaN]", b"[true]", b'["1"]', b"[1.5]", b"\0", b"1,2,3", b"1\x1b[2J",
    b"\xff\xfe1\x00", b"9" * 1_000_000, b"-5", b"0", b"1,99999999999999999999", b"1,-1", b"=cmd()", b"__import__('os')",
    b"", b"[" + b"9" * 5000 + b"]",
])  # fmt: skip
def test_lengths_that_are_none_are_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "lengths"
    file.write_bytes(content)
    assert len(refusal(UserError, length_distribution.source, f"lengths:{file}")) < 400 + len(str(file))


@pytest.mark.parametrize("text", [
    "lognormal(1e400,1)", "lognormal(nan,1)", "lognormal(1,-1)", "lognormal(1,inf)", "lognormal(__import__('os'),1)",
    "lognormal(", "../" * 2000 + "etc/passwd", "a\0b", "/dev/zero", "/proc/self/mem", "",
])  # fmt: skip
def test_what_names_no_lengths_is_one_line(text: str) -> None:
    with pytest.raises(UserError):
        length_distribution.source(f"lengths:{text}")


def test_a_ds_config_is_read_or_refused_soon(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for text in ("[" * 100_000, "[1]", "x", "\0", '{"a": 1, "a": 2}', '{"a": ' + "9" * 5000 + "}"):
        file.write_text(text)
        assert len(refusal(UserError, deepspeed_config.read, str(file))) < 300 + len(str(file))
    file.write_text("{" + ", ".join(f'"k{n}": {n}' for n in range(100_000)) + "}")
    began = time.process_time()
    assert len(deepspeed_config.read(str(file))) == 100_000
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert "not a regular file" in refusal(UserError, deepspeed_config.read, str(path))
        assert "not a regular file" in refusal(UserError, published_readings.read, path)
        assert "not a regular file" in refusal(UserError, length_distribution._listed, path, 1, 1)
    soon(began)
