"""The command line as a user meets it: Hydra's multirun, plan, status, doctor, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from vramsweep.harness import cli, doctor, launch, machine
from vramsweep.harness.errors import UserError


def call(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *words], capture_output=True, text=True, cwd=cwd, check=False
    )


def planned(*words: str) -> list[dict[str, object]]:
    done = call("plan", *words, "--json")
    assert done.returncode == 0, done.stderr
    trials: list[dict[str, object]] = json.loads(done.stdout)["trials"]
    return trials


def test_a_multirun_with_lists_ranges_and_groups() -> None:
    found = planned("-m", "model=gpt2", "device=cuda", "seq_len=range(1025,994,-10)", "allocator=default,expandable")
    assert len(found) == 8
    invalid = [t for t in found if t["state"] == "invalid"]
    assert [t["reason"] for t in invalid] == ["seq_len 1025 is longer than gpt2's 1024 positions"] * 2
    trials = [t["trial"] for t in found]
    assert {t["allocator"]["conf"] for t in trials} == {"", "expandable_segments:True"}  # type: ignore[index]


@pytest.mark.parametrize(("group", "count"), [("allocator", 7), ("precision", 5), ("protocol", 4)])
def test_every_option_of_a_group_composes_and_can_run_on_cuda(group: str, count: int) -> None:
    names = [p.stem for p in sorted((ROOT / "conf" / group).glob("*.yaml")) if p.stem != "custom"]
    found = planned("-m", "device=cuda", f"{group}={','.join(names)}")
    assert len(found) == count
    assert {str(t["reason"]) for t in found} == {"None"}


def test_the_trainer_s_own_batch_is_the_default_and_can_be_overridden() -> None:
    assert planned("runner=trainer", "device=cpu")[0]["trial"]["micro_batch"] == 8  # type: ignore[index]
    assert planned("runner=trainer", "device=cpu", "micro_batch=2")[0]["trial"]["micro_batch"] == 2  # type: ignore[index]
    assert planned("runner=torch", "device=cpu")[0]["trial"]["micro_batch"] == 1  # type: ignore[index]


def test_options_of_a_runner_and_a_free_allocator_text() -> None:
    (one,) = planned("runner=deepspeed", "device=cuda", "+runner.options.zero_optimization.overlap_comm=false")
    assert one["trial"]["runner"]["options"] == {"zero_optimization": {"overlap_comm": False}}  # type: ignore[index]
    conf = "max_split_size_mb:64,expandable_segments:True"
    (two,) = planned("device=cuda", "allocator=custom", f"allocator.conf='{conf}'")
    assert two["trial"]["allocator"]["conf"] == "expandable_segments:True,max_split_size_mb:64"  # type: ignore[index]
    (bad,) = planned("device=cuda", "allocator=custom", "allocator.conf='nonsense:1'")
    assert bad["state"] == "invalid"
    assert "nonsense" in str(bad["reason"])


def test_presets() -> None:
    assert len(planned("-m", "sweep=lengths", "model=tiny", "device=cpu")) == 205
    assert len(planned("-m", "sweep=cpu", "model=tiny", "device=cpu")) == 24
    assert len(planned("-m", "sweep=cpu", "model=tiny", "device=cpu", "seq_len=8")) == 4


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("sweep", "model=llama9"), "llama3-8b"),
        (("sweep", "allocator=nothing"), "cuda_malloc_async"),
        (("sweep", "-m", "model=tiny,llama9"), "llama3-8b"),
        (("sweep", "colour=red"), "colour"),
        (("sweep", "-m", "colour=red,blue"), "colour"),
        (("sweep", "device=tpu"), "cuda"),
        (("sweep", "isolation=hot"), "allowed is warm or cold"),
        (("sweep", "-m", "isolation=cold,warm"), "cannot be swept"),
        (("sweep", "model=hub"), "model.path is not set"),
        (("status", "nowhere"), "name a folder under results/"),
        (("conquer",), "there is no verb 'conquer'"),
        (("replay", "nowhere.pickle"), "nowhere.pickle"),
    ],
)
def test_mistakes_are_named_without_a_traceback(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = call(
        *words, *(["device=cpu", f"results={tmp_path}"] if words[0] == "sweep" and "tpu" not in words[1] else [])
    )
    assert done.returncode != 0
    assert text in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("journal.jsonl"))


def test_a_results_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call("sweep", "model=tiny", "device=cpu", f"results={tmp_path / 'file'}")
    assert done.returncode == 2
    assert "choose a writable folder with results=DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_one_sweep_from_command_to_report(tmp_path: Path) -> None:
    words = ["-m", "model=tiny", "device=cpu", "protocol=brief", "seq_len=16,32,48,64", "precision=fp32", "name=one"]
    done = call("sweep", *words, f"results={tmp_path}")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "one"
    assert "4 trials, 0 finished before, 4 to do" in done.stdout
    assert "bytes per token" in done.stdout
    for name in ("journal.jsonl", "rows.csv", "report.html"):
        assert (folder / name).is_file()
    assert list((folder / "figures").glob("*.html"))
    again = call("sweep", *words, f"results={tmp_path}", "report=false")
    assert "4 trials, 4 finished before, 0 to do" in again.stdout
    (state,) = json.loads(call("status", str(folder), "--json").stdout)
    assert (state["state"], state["done"], state["total"], state["ok"]) == ("finished", 4, 4, 4)
    assert "one" in call("status", str(folder)).stdout
    assert not list(ROOT.glob("multirun*"))


def test_a_failed_trial_gives_exit_status_1(tmp_path: Path) -> None:
    target = ROOT / "tests" / "targets" / "faults.py"
    words = ["model=tiny", "device=cpu", "runner=custom", f"runner.target={target}:raises", "report=false"]
    done = call("sweep", *words, f"results={tmp_path}")
    assert done.returncode == 1
    assert "1 trial(s) failed" in done.stdout


def test_columns_and_help() -> None:
    assert {c["name"] for c in json.loads(call("columns", "--json").stdout)} >= {"peak_reserved_bytes", "mfu"}
    assert "doctor" in call("--help").stdout


def test_the_console_script_is_the_same_command(tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "vramsweep"
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    done = subprocess.run(
        [script, "plan", "model=tiny", "device=cpu"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "1 to do" in done.stdout


def card(name: str = "NVIDIA H100 80GB HBM3", processes: tuple[int, ...] = ()) -> machine.Gpu:
    return machine.Gpu(0, name, "GPU-0", "580.1", 80 << 30, 1 << 20, processes)


def test_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [card(processes=(99,))])
    checks = doctor.doctor(tmp_path)
    problems = [c for c in checks if c.level == "problem"]
    assert any("pid 99" in c.text for c in problems)
    monkeypatch.setattr(machine, "gpus", list)
    checks = doctor.doctor(tmp_path / "results")
    assert any(c.name == "gpu" and c.level == "note" for c in checks)
    assert {c.name for c in checks} >= {"python", "torch", "transformers", "deepspeed", "disk", "memory", "load"}


def test_auto_takes_cuda_when_there_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [card()])
    assert launch.choose_device(["sweep=auto", "device=auto"]) == ["sweep=cuda", "device=cuda"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(machine, "visible_gpus", lambda environ: [])
    assert launch.choose_device(["sweep=auto"]) == ["sweep=simulated", "device=simulated"]
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert launch.choose_device(["device=cuda", "sweep=auto"]) == ["device=cuda", "sweep=cuda"]
    assert capsys.readouterr().err == ""


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [machine.Gpu(n, "x", f"GPU-{n}a", "1", 1, 0, ()) for n in range(3)]
    monkeypatch.setattr(machine, "gpus", lambda: cards)
    seen = lambda value: [g.index for g in machine.visible_gpus({"CUDA_VISIBLE_DEVICES": value})]  # noqa: E731
    assert [g.index for g in machine.visible_gpus({})] == [0, 1, 2]
    assert seen("") == []
    assert seen("2,0") == [2, 0]
    assert seen("GPU-1a") == [1]
    assert seen("1,9,0") == [1]


def test_errors_of_verbs_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(argv: object) -> int:
        raise UserError("no such thing; use another")

    monkeypatch.setitem(cli.VERBS, "doctor", broken)
    assert cli.main(["doctor"]) == 2
    assert capsys.readouterr().err == "vramsweep: no such thing; use another\n"


def test_pins_satisfy_the_ranges() -> None:
    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["dev"]):
        requirement = Requirement(text)
        assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier, text


def test_configuration_files_have_a_comment_for_their_reader() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        text = path.read_text()
        assert yaml.safe_load(text) is not None or path.stem == "none"
        assert path.parent.name == "device" or "# " in text.replace("# @package", ""), path
