"""Test the messages about missing rows, and that no heavy import is needed for them."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, cases

from vramsweep.harness.files.sweep_folder import refuse_missing
from vramsweep.harness.messages.errors import UserError

HEAVY = ("hydra", "pydantic", "pandas", "plotly", "rich", "torch")
RUN = "from vramsweep.__main__ import main; main(sys.argv[1:]); print(*sorted(set(sys.modules) & set({})))"


def refusal(*words: str, foreign: bool = True) -> str:
    with pytest.raises(UserError) as found:
        refuse_missing(words, foreign)
    return str(found.value)


def test_what_is_not_there_is_named_with_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "gpt2-torch").mkdir()
    said = refusal(str(tmp_path / "gpt2-torhc"))
    assert said.startswith(f"there is no file or folder {tmp_path / 'gpt2-torhc'}; name a folder under results/")
    assert f"did you mean {tmp_path / 'gpt2-torch'}?" in said
    assert "CSV" in said and "CSV" not in refusal("nothing", foreign=False)


def test_json_is_no_file_of_rows(tmp_path: Path) -> None:
    file = tmp_path / "foo.json"
    file.write_text("{}")
    assert "make this file a CSV" in refusal(str(file))
    refuse_missing([str(file)], foreign=False)


@pytest.mark.parametrize("words", [(), ("--json",), ("model=gpt2",), (str(ROOT / "README.md"),)])
def test_what_may_be_there_is_left_to_the_verb(words: tuple[str, ...]) -> None:
    refuse_missing(words, foreign=True)


def test_a_folder_without_rows_is_refused_before_anything_reads_them(tmp_path: Path) -> None:
    assert "CSV" in (said := refusal(str(tmp_path))) and said.startswith(f"{tmp_path} holds no sweep; name a folder")
    sweep = tmp_path / "a"
    sweep.mkdir()
    (sweep / "journal-node1.jsonl").touch()
    assert "it contains 1 sweep: a; name" in refusal(str(tmp_path))
    refuse_missing([str(sweep)], foreign=True)


@pytest.mark.parametrize("words", [tuple(words.split()) for (words,) in cases("refused_without_imports")])
def test_nothing_heavy_is_imported_to_refuse(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "foo.json").write_text("{}")
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {RUN.format(HEAVY)}"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr.startswith("vramsweep: "), done.stderr
    assert done.stdout.strip() == ""
