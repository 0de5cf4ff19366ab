"""Nothing is imported from the current folder, which may be somebody's; one function starts all processes of ours."""

import ast
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ROOT, TARGETS, cases, source

from vramsweep import __main__ as front_door
from vramsweep import verbs
from vramsweep.harness.process import interpreter

SNAPSHOT = ROOT / "tests" / "data" / "snapshots" / "silmont2000__b61be4_mem_snapshot.pickle"
TRAIN = source("training_beside_a_module.txt")
PREDICTED = ("model=tiny", "seq_len=32,64,96", "device.gpu=t4-16gb", "precision=fp32")


def trap(folder: Path) -> Path:
    """Lay a trap under every name that could be imported; the file that any of them would make."""
    marker = folder.parent / "trapped"
    names = sys.stdlib_module_names | metadata.packages_distributions().keys() | {"sitecustomize", "usercustomize"}
    for name in filter(str.isidentifier, names | {"harness", "runners", "analysis", "vramsweep"}):
        text = f"import sys\nwith open({str(marker)!r}, 'a') as file:\n    print(__name__, sys.argv, file=file)\n"
        (folder / f"{name}.py").write_text(text + "raise SystemExit('trapped')\n")
    return marker


@pytest.mark.slow
@pytest.mark.deterministic
@pytest.mark.timeout(900)
def test_no_verb_imports_anything_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "theirs", tmp_path / "out"
    assert front_door.main(["predict", *PREDICTED, f"results={tmp_path}", "name=theirs", "report=false"]) == 0
    out.mkdir()
    mine = (TARGETS.parent / "torture" / "misbehave.py").read_text() + "\nimport beside\n"  # a neighbour is importable
    (out / "mine.py").write_text(mine)
    for name, text in (("train.py", TRAIN), ("beside.py", "")):
        (out / name).write_text(text)
    marker = trap(folder)
    monkeypatch.chdir(folder)
    every = [
        line.format(out=out, snapshot=SNAPSHOT, python=sys.executable).split()
        for (line,) in cases("lines_of_every_verb")
    ]
    assert {line[0] for line in every} == {*verbs.BY_NAME, *verbs.INTERNAL}
    capsys.readouterr()
    for line in every:
        try:
            status = front_door.main(line)
        except SystemExit as end:
            status = int(end.code or 0)
        said = capsys.readouterr()
        assert not marker.exists(), (line, marker.read_text(), said.err)
        ended = (status, " ".join(line[:2]))  # rows that ran out of nothing are no answer of why
        assert status == 0 or ended in ((1, "check ."), (1, "why ."), (2, "calibrate .")), (line, said)
        if line[-1] == "--json":
            (out / "t.json").write_text(said.out)
    assert (out / "r.html").exists() and list((out / "report").rglob("*.png"))


def test_one_function_starts_every_interpreter_of_ours() -> None:
    found = Counter(
        path.relative_to(ROOT).as_posix()
        for package in ("harness", "runners", "analysis", "hydra_plugins", "vramsweep")
        for path in (ROOT / package).rglob("*.py")
        if "executable" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "executable"
    )
    assert found == {
        "harness/process/interpreter.py": 2,  # it, and whether a user's command runs in this Python
        "harness/process/attempt.py": 1,  # whether an error is of starting it
        "harness/messages/suggestions.py": 1,  # a hint's text
        "runners/scripts/traced_script.py": 1,  # as that: the Python that a command has to name
    }


def test_a_command_s_python_is_asked_without_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = trap(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert interpreter._ask_interpreter.__wrapped__(sys.executable) is not None
    assert not marker.exists()
