"""The command line as a user meets it: Hydra's multirun, plan, status, doctor, and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from vramsweep import __main__ as front_door
from vramsweep.harness import cli, doctor, machine
from vramsweep.harness.errors import UserError


def call(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", *words], capture_output=True, text=True, cwd=cwd, check=False
    )


def planned(*words: str, status: int = 0) -> list[dict[str, object]]:
    done = call("plan", *words, "predict=false", "--json")
    assert done.returncode == status, done.stderr
    trials: list[dict[str, object]] = json.loads(done.stdout)["trials"]
    return trials


def test_a_multirun_with_lists_ranges_and_groups() -> None:
    found = planned("-m", "model=gpt2", "device=cuda", "seq_len=range(1025,994,-10)", "allocator=default,expandable")
    assert len(found) == 8
    invalid = [t for t in found if t["state"] == "invalid"]
    assert [t["reason"] for t in invalid] == ["seq_len 1025 is longer than gpt2's 1024 positions"] * 2
    trials = [t["trial"] for t in found]
    assert {t["allocator"]["conf"] for t in trials} == {"", "expandable_segments:True"}  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "count"), [("allocator", 7), ("precision", 7), ("protocol", 5)])
def test_every_option_of_a_group_composes_and_can_run_on_cuda(group: str, count: int) -> None:
    names = [p.stem for p in sorted((ROOT / "conf" / group).glob("*.yaml")) if p.stem not in ("custom", "job")]
    found = planned("-m", "device=cuda", f"{group}={','.join(names)}")
    assert len(found) == count
    reasons = {str(t["reason"]) for t in found}
    assert not {reason for reason in reasons - {"None"} if "pip install 'torchao" not in reason}  # fp8, without it


@pytest.mark.slow
def test_a_whole_job_is_for_what_has_one() -> None:
    """The protocol that the test above leaves out."""
    ours, trainers = planned("-m", "device=cuda", "protocol=job", "runner=torch,trainer")
    assert "protocol=job is for runner=trainer and scripts" in str(ours["reason"]) and trainers["reason"] is None


@pytest.mark.slow
def test_the_trainer_s_own_batch_is_the_default_and_can_be_overridden() -> None:
    assert planned("runner=trainer", "device=cpu")[0]["trial"]["micro_batch"] == 8  # type: ignore[index]
    assert planned("runner=trainer", "device=cpu", "micro_batch=2")[0]["trial"]["micro_batch"] == 2  # type: ignore[index]
    assert planned("runner=torch", "device=cpu")[0]["trial"]["micro_batch"] == 1  # type: ignore[index]


@pytest.mark.slow
def test_options_of_a_runner_and_a_free_allocator_text() -> None:
    (one,) = planned("runner=deepspeed", "device=cuda", "+runner.options.zero_optimization.overlap_comm=false")
    assert one["trial"]["runner"]["options"] == {"zero_optimization": {"overlap_comm": False}}  # type: ignore[index]
    conf = "max_split_size_mb:64,expandable_segments:True"
    (two,) = planned("device=cuda", "allocator=custom", f"allocator.conf='{conf}'")
    assert two["trial"]["allocator"]["conf"] == "expandable_segments:True,max_split_size_mb:64"  # type: ignore[index]
    (bad,) = planned("device=cuda", "allocator=custom", "allocator.conf='nonsense:1'", status=2)
    assert bad["state"] == "invalid"
    assert "nonsense" in str(bad["reason"])


@pytest.mark.slow
def test_presets() -> None:
    assert len(planned("-m", "sweep=lengths", "model=tiny", "device=cpu")) == 187
    assert len(planned("-m", "sweep=cpu", "model=tiny", "device=cpu")) == 24
    assert len(planned("-m", "sweep=cpu", "model=tiny", "device=cpu", "seq_len=8")) == 4


MODELS = "allowed: " + ", ".join(sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml")))
# What is typed after `sweep`, and what must be in the answer, in this order.
MISTAKES: dict[str, tuple[str, ...]] = {
    "model=llama9": ("model=llama9: there is no such model; " + MODELS, "did you mean llama3-8b?"),
    "model=qwen05b": (MODELS, "did you mean qwen0.5b?"),
    "model=": ("model=", MODELS),
    "-m model=tiny,llama9": ("model=llama9", MODELS),
    "allocator=nothing": ("allowed: cuda_malloc_async, custom, default",),
    "device=tpu": ("allowed: auto, cpu, cuda, simulated",),
    "sweep=gpu": ("allowed: auto, claims, ", "cpu, cuda, ", "simulated"),
    "hydra/launcher=submitit": ("hydra/launcher=submitit", "allowed: basic", "vramsweep"),
    "modle=tiny": ("modle", "did you mean model?"),
    "-m modle=tiny,gpt2": ("modle", "did you mean model?"),
    "seqlen=128": ("seqlen", "did you mean seq_len?"),
    "warmup_steps=3": ("warmup_steps", "did you mean protocol.warmup_steps?"),
    "runner=deepspeed runner.zero_stage=3 sharding=zero2": ("runner.zero_stage=3 is sharding=zero3", "leave one out"),
    "runner=fsdp sharding=ddp": ("runner=fsdp is runner=torch with sharding=fsdp2", "leave one out"),
    "runner.zero_stage=range(1,3)": ("give sharding=zero1,zero2",),
    "-m seq_len=range(5,5)": ("empty",),
    "flavour=red": ("flavour=red", "allowed: ", "seq_len"),
    "-m flavour=red,blue": ("flavour=red", "allowed: ", "seq_len"),
    "protocol.warmup_step=3": (
        "allowed: job, measured_steps, name, warmup_steps",
        "did you mean protocol.warmup_steps?",
    ),
    "-m protocol.warmup_step=3,4": ("allowed: job, measured_steps", "did you mean protocol.warmup_steps?"),
    "protcol.warmup_steps=3": ("did you mean protocol?",),
    "seq_len.x=3": ("seq_len is one value",),
    "model.config.hidden_sze=8": ("did you mean model.config.hidden_size?", "+model.config.hidden_sze=8"),
    "runner.options.bf16=true": ("type +runner.options.bf16=true",),
    "versions.deepspeed=0.14.2": ("type +versions.deepspeed=0.14.2",),
    "+modle=tiny": ("modle", "did you mean model?"),
    "+experiment=night": ("experiment", "--config-dir DIR"),
    "+model=tiny": ("it is there already", "model=tiny"),
    "+seq_len=8": ("it is there already", "seq_len=8"),
    "~colour": ("colour",),
    "~model": ("model was removed",),
    "~repeats": ("repeats was removed",),
    "tiny": ("KEY=VALUE", "model=tiny"),
    "seq_len=1,2": ("add -m",),
    "seq_len=range(1,9)": ("add -m",),
    "allocator=custom allocator.conf=max_split_size_mb:64,expandable_segments:True": (
        """'allocator.conf="max_split_size_mb:64,expandable_segments:True"'""",
    ),
    "-m allocator=custom allocator.conf=max_split_size_mb:64,expandable_segments:True": (
        """'allocator.conf="max_split_size_mb:64,expandable_segments:True"'""",
        """'allocator.conf="max_split_size_mb:64","expandable_segments:True"'""",
    ),
    "allocator=custom allocator.conf=roundup_power2_divisions:[256:1]": (
        """'allocator.conf="roundup_power2_divisions:[256:1]"'""",
    ),
    "seq_len=[1,2": ("not closed",),
    "-m seq_len=[1,2": ("not closed",),
    "-m seq_len='1,2": ("not closed",),
    "=3": ("no key",),
    "model=3": ("model=3: there is no such model", MODELS),
    "-m precision=fp32,16": ("precision=16: there is no such precision; allowed: bf16",),
    "seq_len=abc": ("no trial can run: seq_len = 'abc'", "integer"),
    "seq_len=": ("no trial can run: seq_len", "integer"),
    "optimizer=adam8bit": ("no trial can run: optimizer=adam8bit", "adamw_torch"),
    "-m optimizer=adam8bit,lion": ("no trial can run: optimizer=adam8bit", "and 1 more reason"),
    "seq_len=${nothing}": ("seq_len", "nothing"),
    "model=hub": ("model.path is not set: give model.path=VALUE",),
    "results=": ("results=DIR",),
    "results=/proc/x": ("cannot write /proc/x", "results=DIR"),
    "-m results=/proc/x": ("cannot write /proc/x", "results=DIR"),
    "results=/dev/null/x": ("cannot write /dev/null/x", "results=DIR"),
    "isolation=hot": ("allowed is warm or cold",),
    "-m isolation=cold,warm": ("isolation cannot be swept",),
    "repeats=1.5": ("whole number",),
    "timeout_s=nan": ("timeout_s",),
    "breaker=-1": ("breaker=-1: allowed is a number of at least 0",),
    "any_system=maybe": ("allowed is true or false",),
    "objective=peak_memory": ("peak_reserved_bytes",),
    "objective=outcome": ("objective=outcome", "column of numbers"),
    "predict=h100": ("h100-80gb",),
    "-m sweep=auto device=cpu,cuda": ("sweep=auto", "one device"),
    "--config-dir /nowhere": ("/nowhere", "not found"),
    "--frob": ("unrecognized arguments: --frob",),
    "--cfg everything": ("everything: there is no such choice; allowed: job",),
    "--jsn": ("unrecognized arguments: --jsn; did you mean --json?",),
    "protocol=papr": ("did you mean paper?",),
    "optimizer=adafctor": ("no trial can run: optimizer=adafctor", "did you mean adafactor?"),
    "sharding=zero7": ("no trial can run: sharding = 'zero7'", "did you mean zero"),
    "device=simulated device.gpu=H100": ("no trial can run: device=simulated", "did you mean h100-"),
    "device=simulated device.link=nvlink9": ("no trial can run: device.link is nvlink9", "did you mean nvlink"),
    "isolation=wram": ("allowed is warm or cold; did you mean warm?",),
    "predict=rtx4090": ("did you mean rtx4090-24gb?",),
    "answer=claim": ("did you mean claims?",),
    "device=simulated device.memory_gib=24Gb": ("device.memory_gib=24Gb has a unit that there is not",),
    "device=simulated device.memory_gib=0GiB": ("is not a size above 0",),
    "device=simulated device.headroom_gib=2G": ("may be either: 2GiB", "or 2GB"),
    "timeout_s=10x": ("timeout_s=10x: allowed is a time above 0, such as 90m",),
    "budget=8": ("budget=8 has no unit: 8m, 8h or 8s",),
    "max_cost=40EUR price_per_hour=1": ("max_cost=40EUR: allowed is a number above 0, in any currency",),
    "--cfg job -m": ("do not go together",),
    f"seq_len={'9' * 5000}": ("a number of thousands of digits",),
    f"seq_len={'9' * 400}": (
        "no trial can run: seq_len is a whole number of 400 digits; allowed is less than 9.2e+18",
    ),
    f"seq_len={'[' * 900}1{']' * 900}": ("nested too deep",),
    "-sc install=bash": ("vramsweep completion bash",),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_mistakes_are_named_in_a_line_or_two(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = typed.split()
    base = [
        word for word in ("device=cpu", "model=tiny") if word.partition("=")[0] not in typed.replace("=", " ").split()
    ]
    assert front_door.main(["sweep", *base, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("vramsweep: ")
    assert len(error.splitlines()) <= 2
    assert "Traceback" not in error and "earch path" not in error
    place = 0
    for text in MISTAKES[typed]:
        assert text in error[place:], error
        place = error.index(text, place)
    assert not list(tmp_path.rglob("journal.jsonl"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("sweep", "model=llama9", "device=cpu"), MODELS),
        (
            ("plan", "-m", "optimizer=adam8bit", "seq_len=8,16", "device=cpu"),
            "no trial can run: optimizer=adam8bit",
        ),
        (("status", "nowhere"), "name a folder under results/"),
        (("conquer",), "there is no verb 'conquer'; verbs: sweep, run,"),
        (("replay", "nowhere.pickle"), "nowhere.pickle"),
        (("completion", "tcsh"), "there is no such choice; allowed: bash"),
        (("swep",), "did you mean sweep?"),
        (("help", "reprot"), "did you mean report?"),
        (("predict", "--larget", "seq_len"), "unrecognized arguments: --larget; did you mean --largest?"),
        (("fit", "nowhere", "--metric", "peak_reserved"), "did you mean peak_reserved_bytes?"),
        (("track", "nowhere", "wanbd"), "did you mean wandb?"),
        (("techniques", "optimiser"), "did you mean optimizer?"),
    ],
)
def test_mistakes_end_the_process_with_status_2(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = call(*words, *([f"results={tmp_path}"] if words[0] in ("sweep", "plan") else []))
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.rglob("journal.jsonl"))


def test_a_trial_that_can_run_beside_one_that_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "device=cpu", "model=tiny", "optimizer=adamw_torch,adam8bit", f"results={tmp_path}"]
    assert front_door.main(["plan", *words]) == 0
    said = capsys.readouterr()
    assert "1 invalid, 1 to do" in said.out and said.err == ""


def test_hydra_s_own_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="Could not find 'model/llama9'"):
        front_door.main(["sweep", "model=llama9"])


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
    assert "largest     length  MiB per" in done.stdout and "tiny · torch · fp32" in done.stdout
    assert "1. All that was tried fits: up to 64 tokens." in done.stdout and "2. A token costs" in done.stdout
    assert f"fits      vramsweep fit {folder}" in done.stdout
    for name in ("journal.jsonl", "rows.csv", "report.html"):
        assert (folder / name).is_file()
    assert list((folder / "figures").glob("*.html"))
    again = call("sweep", *words, f"results={tmp_path}", "report=false")
    assert "4 trials, 4 finished before, 0 to do" in again.stdout
    (state,) = json.loads(call("status", str(folder), "--json").stdout)
    assert (state["state"], state["done"], state["total"], state["ok"]) == ("finished", 4, 4, 4)
    some = [*words[:4], "seq_len=16", *words[5:], f"results={tmp_path}", "report=false"]
    assert "1 trial, 1 finished before" in call("sweep", *some).stdout
    assert "finished  4/4: 4 ok; the last command: 1/1" in call("status", str(folder)).stdout
    assert not list(ROOT.glob("multirun*"))


@pytest.mark.slow
def test_a_failed_trial_gives_exit_status_1(tmp_path: Path) -> None:
    target = ROOT / "tests" / "targets" / "faults.py"
    words = ["model=tiny", "device=cpu", "runner=custom", f"runner.target={target}:raises", "report=false"]
    done = call("sweep", *words, f"results={tmp_path}")
    assert done.returncode == 1
    assert "1 trial(s) failed" in done.stdout


def test_columns_and_help() -> None:
    assert {c["name"] for c in json.loads(call("columns", "--json").stdout)} >= {"peak_reserved_bytes", "mfu"}
    assert "doctor" in call("--help").stdout


def test_the_cards_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["cards"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    (t4,) = (line.split() for line in lines if line.startswith("t4-16gb"))
    assert t4 == ["t4-16gb", "16", "13.8", "7.5", "320", "8", "–", "65", "–", "–", "pcie3"]
    assert cli.main(["cards", "--json"]) == 0
    listed = {card["name"]: card for card in json.loads(capsys.readouterr().out)}
    assert listed["t4-16gb"]["memory_limit_bytes"] == (14912 - 768) << 20 and listed["t4-16gb"]["bf16"] is None
    assert listed.keys() <= {line.partition(" ")[0] for line in lines}
    for verb in ("explain", "predict", "sweep"):
        assert front_door.main([verb, "--help"]) == 0
        said = capsys.readouterr().out
        assert "vramsweep cards" in said and "rtx2070-8gb 6.8" in said


@pytest.mark.slow
def test_what_only_prints_imports_nothing_heavy() -> None:
    """Each of these is answered at once; what trains, fits or draws takes seconds to import."""
    code = """
import contextlib, sys
from vramsweep.__main__ import main
for words in (["--help"], ["cards"], ["columns"], ["techniques"], ["status"], ["doctor", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
light = set(sys.modules)
for words in (["explain", "--help"], ["advise", "--help"], ["predict", "--help"], ["plan", "--help"]):
    with contextlib.suppress(SystemExit):
        main(words)
heavy = {"torch", "transformers", "deepspeed", "pandas", "scipy", "plotly", "numpy", "sklearn", "matplotlib"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
assert not {"hydra", "omegaconf"} & light
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
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
    texts, extras, seen = (
        [*project["dependencies"], "vramsweep[dev,techniques,scripts]"],
        project["optional-dependencies"],
        set(),
    )
    while texts:
        requirement = Requirement(text := texts.pop())
        if requirement.name == "vramsweep":  # what its extras name
            texts += [one for extra in requirement.extras - seen for one in extras[extra]]
            seen |= requirement.extras
            continue
        assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier, text


def test_configuration_files_have_a_comment_for_their_reader() -> None:
    for path in (ROOT / "conf").rglob("*.yaml"):
        text = path.read_text()
        assert yaml.safe_load(text) is not None or path.stem == "none"
        assert path.parent.name == "device" or "# " in text.replace("# @package", ""), path


@pytest.mark.slow
def test_names_of_version_0_1_are_understood_on_the_command_line() -> None:
    same = ("-m", "runner=deepspeed", "device=cuda", "predict=false")
    old = planned(*same, "runner.zero_stage=1,3", "runner.world_size=2")
    new = planned(*same, "sharding=zero1,zero3", "world_size=2")
    assert [t["trial_id"] for t in old] == [t["trial_id"] for t in new]
    assert [t["trial"]["sharding"] for t in new] == ["zero1", "zero3"]  # type: ignore[index]
    (fsdp,) = planned("runner=fsdp", "device=cuda", "world_size=8", "predict=false")
    assert fsdp["trial_id"] == planned("sharding=fsdp2", "device=cuda", "world_size=8", "predict=false")[0]["trial_id"]


@pytest.mark.slow
def test_values_of_version_0_1_are_understood_on_the_command_line() -> None:
    same = ("-m", "model=tiny", "device=simulated")
    old = planned(*same, "optimizer=adamw,adamw_fused", "gradient_checkpointing=true")
    new = planned(*same, "optimizer=adamw_torch,adamw_torch_fused", "checkpointing=full")
    assert [t["trial_id"] for t in old] == [t["trial_id"] for t in new] and len(new) == 2


@pytest.mark.slow
def test_a_sweep_of_which_nothing_could_run_does_not_end_well(tmp_path: Path) -> None:
    """What is seen to be impossible only where it is to run, also by a sweeper that comes in batches."""
    words = ["model=tiny", "device=cuda", "world_size=2", "sharding=ddp", "report=false", f"results={tmp_path}"]
    code = (
        "import sys\nfrom vramsweep.harness import machine\nfrom vramsweep import __main__ as front_door\n"
        "card = machine.Gpu(0, 'NVIDIA H100 80GB HBM3', 'GPU-0', '580', 80 << 30, 0, ())\n"
        "machine.visible_gpus = lambda environ: [card]\nsys.exit(front_door.main(sys.argv[1:]))"
    )
    for more in (["-m", "seq_len=8,16"], ["-m", "seq_len=8,16", "hydra.sweeper.max_batch_size=1"],
                 ["-m", "sweep=frontier", "seq_len=range(8,33,8)", "predict=false"]):  # fmt: skip
        command = [sys.executable, "-c", code, "sweep", *more, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2, (more, done.stdout, done.stderr)
        assert "world_size=2 needs 2 GPUs and 1 is visible" in done.stderr and "Traceback" not in done.stderr
