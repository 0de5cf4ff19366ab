"""Test what rows say of a command's end: first from what commands leave behind, then with real ones."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import BIN, PYTHON, command
from conftest import Run, literal_cases, source

from vramsweep.harness.process import worker_environment
from vramsweep.harness.rows import outcome
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.spec import trial
from vramsweep.runners.rank import process_end, result_file
from vramsweep.runners.scripts import exit_diagnosis, launch_command

FULL = "CUDA out of memory. Tried to allocate 2.00 GiB."
JOB = {"protocol": {"name": "job", "warmup_steps": 1, "measured_steps": 1, "job": True}}


def seen(**over: Any) -> dict[str, Any]:
    """Return the record of a process that has imported torch and ended well."""
    said: dict[str, Any] = {"pid": 1, "at": 1.0, "rank": 0, "world_size": 1, "program": "t.py", "problem": None}
    said |= {"ended": True, "variables": {}, "index": None, "forwards": 0, "backwards": 0, "steps": 0}
    return said | over


def row_of(
    folder: Path, code: int, *every: dict[str, Any], log: str = "", problem: str = "", begun: int = 0, job: bool = False
) -> tuple[str, str | None]:
    """Outcome and reason of a command whose own process is the first, and of whose steps so many are recorded."""
    (folder / "stderr.log").write_text(log)
    if problem:
        (folder / "problem-7.txt").write_text(problem)
    (folder / "steps.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(begun)))
    values = trial.Trial.model_validate(command("PYTHON t.py", **(JOB if job else {})))
    one = exit_diagnosis.End(values, folder, ["python", "t.py"], 1, code, sorted(every, key=lambda one: one["at"]))
    with pytest.raises((trial.InvalidTrial, RuntimeError)) as caught:
        exit_diagnosis.explain(one)
    return outcome.classify(Evidence(exit_code=1, result=process_end.error_result(caught.value)))


TRAINED = {"forwards": 2, "backwards": 2, "steps": 2}
ENDS = {name: rest for name, *rest in literal_cases("ends_of_commands")}


@pytest.mark.parametrize("case", ENDS)
def test_each_end_has_its_cause(case: str, tmp_path: Path) -> None:
    code, every, left, (kind, reason) = ENDS[case]
    left["log"] = left.get("log", "").replace("TORCHRUN", source("log_of_torchrun.txt").format(1))
    found, said = row_of(tmp_path, code, *(seen(**one) for one in every), **left)
    assert (found, (said or "")[: len(reason)]) == (kind, reason), said


def hooked(tmp_path: Path, code: str, version: str) -> str:
    """Return what the hook reports for a process that imports a torch of this version."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {version!r}")
    environ = launch_command.environment(tmp_path) | {"PYTHONPATH": f"{launch_command.HOOK}{os.pathsep}{tmp_path}"}
    done = subprocess.run([PYTHON, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return "".join(path.read_text() for path in tmp_path.glob("problem-*.txt"))


def test_a_command_is_started_without_the_package_pynvml(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pynvml'] = None; from pathlib import Path\n"
    code += "from vramsweep.runners.scripts import launch_command as own\nprint(own.environment(Path())[own.hook.LENT])"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (str(Path(psutil.__file__).resolve().parents[1]), "")


def test_a_python_that_is_too_old_is_said(tmp_path: Path) -> None:
    hook = launch_command.HOOK / "sitecustomize.py"
    code = "import sys; sys.version_info = (3, 8, 1); sys.path.insert(0, sys.argv[1]); import sitecustomize"
    environ = os.environ | {"VRAMSWEEP_ATTEMPT": str(tmp_path)}
    words = [PYTHON, "-I", "-S", "-c", code, str(hook.parent)]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    (problem,) = tmp_path.glob("problem-*.txt")
    assert problem.read_text() == "RuntimeError: the script's Python is 3.8.1, but vramsweep watches 3.11 and later"


OLD_FINDER = source("old_finder.txt")


@pytest.mark.parametrize(
    ("code", "version", "said"),
    [
        ("import torch", "2.5.1+cu121", "the script's torch is 2.5.1+cu121, but vramsweep watches 2.6 and later"),
        ("import torch", "2.6.0a0+git", None),
        (OLD_FINDER, "1.0", "the script's torch is 1.0, but vramsweep watches 2.6 and later"),  # is passed over
    ],
)
def test_a_torch_that_is_too_old_is_said(tmp_path: Path, code: str, version: str, said: str | None) -> None:
    found = hooked(tmp_path, code, version)
    assert found == f"RuntimeError: {said}" if said else "vramsweep watches" not in found


def test_the_workers_own_variables_are_handed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "a:1")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    asked = launch_command._observer_request(trial.Trial.model_validate(command("PYTHON t.py")))["variables"]
    assert set(asked) == set(worker_environment.ALLOCATOR)
    assert (asked["PYTORCH_CUDA_ALLOC_CONF"], asked["PYTORCH_ALLOC_CONF"]) == ("a:1", None)


LEAVES = source("script_that_leaves.txt")
BROKE = {"problem": "TypeError: probe failed", "ended": False} | TRAINED
SHORT = {"elapsed_s": 2.0, "step_times_s": [1.0, 1.0], "tokens_per_s": 50.0, "samples_per_s": 1.0, "notes": None}
MEASURED = {"shapes": [[1, 50]], "shapes_known": True, "repeated": False, "batches": [1], "complete": False}
MEASURED |= {"columns": SHORT}


def left(folder: Path, seconds: float, said: dict[str, Any], **over: Any) -> str:
    """Run a command that leaves the record `said` and goes on for `seconds`; return its error's message."""
    (folder / "attempt").mkdir()
    (folder / "t.py").write_text(LEAVES)
    (folder / "said.json").write_text(json.dumps(said))
    (folder / "attempt" / "stderr.log").touch()
    values = trial.Trial.model_validate(command(f"PYTHON t.py {seconds}", **over))
    with pytest.raises((exit_diagnosis.ScriptError, result_file.EndedEarly)) as caught:
        launch_command.run(values, folder / "attempt")
    return str(caught.value)


@pytest.mark.parametrize("over", [{}, JOB], ids=["ordinary", "job"])
def test_a_training_that_cannot_be_watched_any_further_is_ended(here: Path, over: dict[str, Any]) -> None:
    assert left(here, 60, seen(**BROKE), **over) == (
        "the script could not be watched any further: TypeError: probe failed"
    )


def test_what_was_measured_before_that_is_kept(here: Path) -> None:
    assert left(here, 60, seen(**BROKE, **MEASURED)) == (
        "the step that counts FLOPs is missing, because after the measured steps the script could not be watched any "
        "further: TypeError: probe failed"
    )
    values = json.loads((here / "attempt" / "result.json").read_text())["values"]
    assert (values["tokens_per_s"], values["seq_len"]) == (50.0, 50)


def test_a_command_that_is_to_run_to_its_end_does(here: Path) -> None:
    assert "could not be watched" in left(here, 0.4, seen(**BROKE), runner={"stop": False})
    assert (here / "after.txt").exists()


def test_a_training_is_over_once_no_rank_has_more_to_tell() -> None:
    def ranks(*every: dict[str, Any]) -> set[int]:
        return launch_command._finished_processes(
            [seen(pid=n, rank=n, world_size=2, **one) for n, one in enumerate(every)], job=False
        )

    going = TRAINED | {"ended": False}
    whole = going | MEASURED | {"complete": True}
    assert ranks(going | MEASURED, whole) == set()
    assert ranks(BROKE | MEASURED, whole) == {0, 1}
    assert ranks(BROKE | MEASURED, going) == set()  # the other may come so far
    assert ranks(BROKE, whole) == {0}
    assert ranks(BROKE | {"ended": True}, going) == set()  # an earlier training's
    assert ranks(BROKE | dict.fromkeys(TRAINED, 0), going) == set()  # it trains nothing


LOOP = source("loop_of_eight.txt")


@pytest.mark.slow
def test_the_whole_command_ends_once_it_is_measured(run_sweep: Run, here: Path) -> None:
    Path("t.py").write_text(LOOP)
    (row,) = run_sweep(command("bash -c 'PYTHON t.py; sleep 8; echo after > after.txt'"))
    assert row["outcome"] == "ok" and not any("after the measured steps" in note for note in row["notes"])
    assert not Path("after.txt").exists()


@pytest.mark.slow
def test_a_job_that_leaves_and_a_training_that_breaks_what_watches_it(run_sweep: Run, here: Path) -> None:
    Path("left.py").write_text(f"{LOOP}os._exit(0)")
    Path("broke.py").write_text(LOOP.replace("w =", "torch.cuda.device_count = None; w =").replace("(9)", "(10**9)"))
    left, broke = run_sweep(command("PYTHON left.py", **JOB), command("PYTHON broke.py"))
    assert left["outcome"] == broke["outcome"] == "crash"
    assert left["reason"].endswith(
        "left.py ended by os._exit, or by a signal that its parent did not report, after 8 or more optimizer steps, "
        "so nothing was measured; let it return, or end by sys.exit"
    )
    assert "the script could not be watched any further: TypeError: " in broke["reason"]


@pytest.mark.slow
def test_the_folder_for_what_it_writes_is_where_it_goes_elsewhere(run_sweep: Run, here: Path) -> None:
    Path("t.py").write_text(f"import os, sys; os.chdir('/'); open(sys.argv[1] + '/x', 'w').close()\n{LOOP}")
    (row,) = run_sweep(command("PYTHON t.py {output_dir}"))
    assert row["outcome"] == "ok", row["reason"]
    assert len(list(here.glob("t/trials/attempts/*/1/output/x"))) == 1


HYDRA = source("main_of_hydra.txt").format(full=FULL)
HELPER = source("helper_that_fails.txt")
ARGUMENTS = "import argparse, torch; argparse.ArgumentParser().parse_args()"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "kind", "reason"),
    [
        ("PYTHON t.py", HYDRA, "oom", f"torch.OutOfMemoryError: {FULL}"),
        ("PYTHON t.py x=1", HYDRA, "invalid", "t.py does not take these options: hydra.errors.ConfigCompositionExcept"),
        ("PYTHON t.py", HELPER, "crash", "ended with exit status 1; its last words: no data here"),
        (f"{BIN}/torchrun t.py --length 3", ARGUMENTS, "invalid", "t.py does not take these options: t.py: error: unr"),
        (f"{BIN}/accelerate launch --cpu t.py --length 3", ARGUMENTS, "invalid", "t.py does not take these options: "),
    ],
)
def test_a_failing_command_says_its_own_cause(
    run_sweep: Run, here: Path, monkeypatch: pytest.MonkeyPatch, words: str, code: str, kind: str, reason: str
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    Path("t.py").write_text(code)
    (row,) = run_sweep(command(words))
    assert (row["outcome"], row["reason"][: len(reason)]) == (kind, reason), row["reason"]
    if kind == "oom":
        assert json.loads(next(here.glob("t/trials/attempts/*/1/seen-*.json")).read_text())["forwards"] == 1
