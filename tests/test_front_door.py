"""Test the first encounters: nothing typed, help on one screen, rows that are missing, pages that lead on.

Not covered: help, verb by verb (test_verbs.py), what pages show of outputs (test_docs.py), what is typed wrongly.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Cli, cases

from vramsweep.harness.files.sweep_folder import refuse_missing
from vramsweep.harness.messages import console
from vramsweep.harness.messages.errors import UserError


def sweeps(folder: Path, *names: str) -> None:
    """Make folders of sweeps without rows, each newer than the one before."""
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        (folder / name / "journal.jsonl").touch()
        os.utime(folder / name / "journal.jsonl", (number, number))


@pytest.mark.parametrize(("mistake", "typed", "status", "said"), cases("front_door"))
def test_mistakes_of_a_newcomer(mistake: str, typed: str, status: str, said: str, here: Path, cli: Cli) -> None:
    sweeps(here / "results", "gpt2", "night")
    (here / "docs").mkdir()
    printed = cli.run(*typed.split(), status=int(status))
    assert said in printed.out + printed.err, mistake
    assert not printed.err or len(printed.err.splitlines()) <= 2


VERBS_OF_A_FOLDER = ("report", "fit", "frontier", "paper", "check", "status", "explain", "timeline", "compare a")


@pytest.mark.parametrize("verb", VERBS_OF_A_FOLDER)
def test_a_folder_of_sweeps_lists_them(verb: str, here: Path, cli: Cli) -> None:
    sweeps(here / "results", "gpt2-torch-cuda", "reference/h100", "night")
    if verb in ("report", "status"):  # which are of all of them
        said = cli.run(verb, "results").out
        assert all(f"results/{name}  " in said for name in ("gpt2-torch-cuda", "reference/h100", "night"))
        return
    name, *words = verb.split()
    said = cli.refuse(name, *(["results"] if not words else ["results", "results/night"]))
    assert "results is not a sweep; it contains 3 sweeps, the newest first: night, reference/h100, gpt2-torch" in said
    assert "name one, such as results/night" in said and len(said.splitlines()) <= 2


def test_what_cannot_be_read_hides_no_sweep(here: Path, cli: Cli) -> None:
    results = here / "results"
    sweeps(results, "good", "fifo", "link", "submitted")
    for name in ("fifo", "link", "submitted"):
        (results / name / "journal.jsonl").unlink()
    os.mkfifo(results / "fifo" / "journal.jsonl")
    (results / "link" / "journal.jsonl").symlink_to("/nowhere")
    (results / "submitted" / "trials" / "cluster").mkdir(parents=True)
    (results / "submitted" / "trials" / "cluster" / "jobs.json").write_text('{"jobs": {"7_0": "1/2"}}')
    told = cli.run("status")
    assert [line.split()[0] for line in told.out.splitlines()] == ["results/good", "results/submitted"]
    assert "results/fifo: cannot read" in told.err
    told = cli.run("report", "results", "--out", "page")
    assert all(f"results/{name}" in told.out for name in ("good", "submitted", "fifo")) and not told.err
    assert "takes --out and --json, not --from" in cli.refuse("report", "results", "--from", "5")


@pytest.mark.parametrize("verb", VERBS_OF_A_FOLDER[:-1])
def test_a_folder_without_sweeps_says_what_to_name(verb: str, here: Path, cli: Cli) -> None:
    (here / "docs").mkdir()
    said = cli.refuse(verb, "docs")
    assert "docs holds no sweep; name a folder under results/, as `vramsweep status` lists them" in said
    assert len(said.splitlines()) <= 2


@pytest.mark.usefixtures("here")
def test_many_sweeps_are_counted_and_the_newest_named(here: Path, cli: Cli) -> None:
    sweeps(here / "results", *(f"sweep-{number:02}" for number in range(12)))
    said = cli.refuse("check", "results")
    assert "12 sweeps" in said and "sweep-04 and 4 more; name one, such as results/sweep-11" in said


def made(*words: str, active: str = "") -> str:
    """Return what make prints, or would run (-n), if the environment env/ is set up."""
    inherited = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # where make itself runs these tests
    environ = {name: value for name, value in os.environ.items() if name not in inherited} | {"VIRTUAL_ENV": active}
    done = subprocess.run(
        ["make", "-s", "-o", "env/.ready", *words], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_what_sets_up_ends_with_the_line_that_makes_vramsweep_reachable() -> None:
    line = "  source env/bin/activate"
    assert made("setup", "VENV=env").splitlines()[-1] == line
    assert made("setup", "VENV=env", active=str(ROOT / "env")) == ""  # it is reachable
    assert made("setup", "VENV=") == ""  # an environment of the user's own
    for words in (("sweep", "MODEL=tiny"), ("test",)):
        assert f"'{line}'" in made("-n", *words, "VENV=env").splitlines()[-1]
    set_up = made("-n", "-W", "pyproject.toml", "plan", "VENV=other").splitlines()
    assert any("'  source other/bin/activate'" in one for one in set_up)  # as does whatever sets up first


def test_no_page_installs_from_an_index_or_clones_an_address() -> None:
    """No index has it, and no address is known."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "docs" / "notebook.ipynb"]
    pages.remove(ROOT / "CHANGELOG.md")
    for page in pages:
        assert not re.findall(r"pip install (?:-\w+ )*['\"]?vramsweep\b|git clone", page.read_text()), page


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/start.md"])
def test_the_first_pages_make_vramsweep_reachable_and_lead_to_eight_gpus(page: str) -> None:
    text = (ROOT / page).read_text()
    typed = re.search(r"^vramsweep \w+", text, re.MULTILINE)
    reached = text.index("source .venv/bin/activate")
    assert typed is None or reached < typed.start()
    assert "eight_gpus.md" in text
    if page != "docs/start.md":  # the first row of its questions
        row = re.search(r"^(?:\| |- )\[.*", text.partition("## Questions")[2], re.MULTILINE)
        assert row is not None and "[Does it fit on 8 GPUs?]" in row[0]


@pytest.mark.usefixtures("here")
def test_reading_many_settings_is_said(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "FIRST_S", 0)
    monkeypatch.setattr(console, "LOOK_S", 0.001)
    said = cli.run("plan", "model=tiny", "device=simulated", "seq_len=1..200", "predict=false").err
    assert "reading the settings of 200 trials" in said and "checking the settings of 200 trials" in said


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
