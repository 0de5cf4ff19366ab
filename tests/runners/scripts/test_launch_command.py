"""Scripts as users write them, unchanged, under the observer: each in its own process, as a sweep runs it."""

import ast
import json
import re
import signal
import subprocess
import venv
from pathlib import Path

import pytest
import torch
from commands import BIN, PYTHON, SCRIPTS, command
from conftest import TARGETS, Run, cases, source, tiny
from targets import scripted

from vramsweep.analysis.data import parts
from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import load
from vramsweep.harness.rows.schema import Row

pytestmark = pytest.mark.slow
MEMORY = tuple(f"{phase}_peak_allocated_bytes" for phase in ("load", "forward", "backward", "optimizer"))
SAME = ("peak_allocated_bytes", *MEMORY[1:], "model_flops_per_token", "hardware_flops_per_token", "parameters")
SIMULATED = {"name": "simulated", "gpu": "l4-24gb"}
OURS = {"name": "custom", "target": f"{TARGETS / 'scripted.py'}:plain"}


def alike(row: Row, other: Row) -> None:
    assert {name: row[name] for name in SAME} == {name: other[name] for name in SAME}
    assert row["peak_allocated_bytes"] is not None and row["model_flops_per_token"] is not None


def test_a_plain_loop_is_measured_as_our_own_runner_measures_it(run_sweep: Run) -> None:
    words = "PYTHON SCRIPTS/plain.py --max_len {seq_len} --bs {micro_batch}"
    told = {"seq_len": 48, "micro_batch": 3}
    row, again, ours, _ = run_sweep(command(words, **told), tiny(**told, runner=OURS), repeats=2)
    assert (row["outcome"], row["reason"], row["notes"]) == ("ok", None, None)
    alike(row, ours)
    alike(row, again)
    assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(48 * 3 * 2)
    assert row["samples_per_s"] * row["elapsed_s"] == pytest.approx(3 * 2)
    assert (row["optimizer_effective"], row["attention_effective"], row["skipped_steps"]) == ("AdamW", "sdpa", 0)
    unknown = ("precision", "checkpointing", "optimizer", "sharding", "weights", "data", "seed", "offload_param")
    assert {row[name] for name in unknown} == {None}
    assert (row["seq_len"], row["micro_batch"], row["grad_accum"], row["world_size"]) == (48, 3, 1, 1)


def test_the_trainer_is_measured_and_predicted_as_our_own_runner_does_it(run_sweep: Run) -> None:
    words = (
        "PYTHON SCRIPTS/clm.py --block_size {seq_len} --per_device_train_batch_size {micro_batch} "
        "--output_dir {output_dir} --report_to none --save_strategy no --max_steps 100"
    )
    told = {"seq_len": 40, "micro_batch": 2}
    measured, ours, predicted, our_prediction = run_sweep(
        command(f"{words} --use_cpu true", **told),
        tiny(**told, runner={"name": "trainer"}),
        command(words, **told, device=SIMULATED),
        tiny(**told, runner={"name": "trainer"}, device=SIMULATED),
    )
    alike(measured, ours)
    assert (predicted["outcome"], predicted["reason"]) == ("ok", None)
    assert predicted["peak_optimizer_state_bytes"] == our_prediction["peak_optimizer_state_bytes"]
    batch = 2 * 1024 + 512  # ids, labels; the sum of the losses: a trial's own batches are not in its trace
    for name in ("peak_allocated_bytes", *MEMORY[1:]):
        assert predicted[name] == our_prediction[name] + batch


def test_ranks_of_torchrun_are_measured_as_our_own(run_sweep: Run) -> None:
    words = f"{BIN / 'torchrun'} --nproc-per-node {{world_size}} SCRIPTS/ddp.py --max_len {{seq_len}}"
    shape = {"seq_len": 32, "micro_batch": 2, "grad_accum": 2, "world_size": 2, "sharding": "ddp"}
    row, other = run_sweep(command(words, seq_len=32, world_size=2), tiny(**shape, runner=OURS))
    alike(row, other)
    assert (row["reason"], row["notes"]) == (None, None)  # ranks end well once they are measured
    assert row["rank_peak_allocated_bytes"] == other["rank_peak_allocated_bytes"]
    assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(2 * 2 * 2 * 32 * 2)
    assert (row["world_size"], row["grad_accum"], row["micro_batch"]) == (2, 2, 2)


def test_the_rank_that_fails_first_is_named_and_more_ranks_than_cards_are_noted(run_sweep: Run) -> None:
    reasons = {
        "raise": "builtins.ValueError: rank one has bad data",
        "kill": "rank 1 killed by SIGKILL",
        "exit": "rank 1 ended during the training without an error message",
    }
    words = f"{BIN / 'torchrun'} --nproc-per-node 2 SCRIPTS/ddp.py"
    many, *failed = run_sweep(command(words), *(command(f"{words} --fault {how}", world_size=2) for how in reasons))
    assert many["notes"] == ["the training had 2 ranks, but the trial has world_size=1"] and many["world_size"] == 2
    for row, reason in zip(failed, reasons.values(), strict=True):
        assert row["outcome"] == "crash" and row["reason"].startswith(reason)


def test_accelerate_launch(run_sweep: Run) -> None:
    launch = f"{BIN / 'accelerate'} launch --cpu --num_processes 1 --num_machines 1 --dynamo_backend no"
    (row,) = run_sweep(command(f"{launch} --mixed_precision no SCRIPTS/accelerated.py"))
    assert (row["outcome"], row["notes"]) == ("ok", None)
    assert (row["seq_len"], row["micro_batch"]) == (48, 2)
    assert row["tokens_per_s"] * row["elapsed_s"] == pytest.approx(48 * 2 * 2)


def test_lightning(run_sweep: Run) -> None:
    """Its optimizers run the whole step in a closure, and it looks at validation data before the first."""
    pytest.importorskip("lightning")
    words = "PYTHON SCRIPTS/lit.py --len {seq_len} --out {output_dir}"
    told = {"seq_len": 40, "micro_batch": 2, "device": SIMULATED}
    one, two, predicted, plain = run_sweep(
        command(f"{words} --accumulate 1", seq_len=32),
        command(f"{words} --accumulate {{grad_accum}}", seq_len=32, grad_accum=2),
        command(f"{words} --batch {{micro_batch}}", **told),
        command("PYTHON SCRIPTS/plain.py --max_len {seq_len} --bs {micro_batch}", **told),
    )
    assert [row["outcome"] for row in (one, two, predicted)] == ["ok"] * 3, predicted["reason"]
    assert two["tokens_per_s"] * two["elapsed_s"] == pytest.approx(2 * 2 * 32 * 2)
    assert one["tokens_per_s"] * one["elapsed_s"] == pytest.approx(2 * 32 * 2)
    parameters = one["parameters"]
    assert one["optimizer_peak_allocated_bytes"] > 4 * 4 * parameters  # weights, gradients, two moments in fp32
    assert one["model_flops_per_token"] == pytest.approx(6 * parameters, rel=0.1)  # (Kaplan et al. 2020)
    same = ("parameters", "peak_parameters_bytes", "peak_optimizer_state_bytes")
    assert {name: predicted[name] for name in same} == {name: plain[name] for name in same}
    assert predicted["peak_activations_bytes"] == pytest.approx(plain["peak_activations_bytes"], rel=0.01)


def test_lengths_that_vary_are_counted(run_sweep: Run) -> None:
    """TRL pads each batch to its longest text."""
    pytest.importorskip("trl")
    (row,) = run_sweep(command("PYTHON SCRIPTS/sft.py --batch {micro_batch} --out {output_dir}", micro_batch=2))
    assert (row["outcome"], row["seq_len"], row["micro_batch"]) == ("ok", None, 2)
    tokens = row["tokens_per_s"] * row["elapsed_s"]
    assert tokens == pytest.approx(round(tokens)) and round(tokens) % 2 == 0 and 2 * 2 * 8 < tokens < 2 * 2 * 62


@pytest.mark.parametrize(("fault", "outcome", "reason"), cases("script_faults"))
def test_each_fault_is_its_outcome(run_sweep: Run, fault: str, outcome: str, reason: str) -> None:
    (row,) = run_sweep(command(f"PYTHON SCRIPTS/faults.py {fault}"), timeout_s=25)
    assert row["outcome"] == outcome, row["reason"]
    assert re.match(reason, row["reason"] or "")
    if fault == "oom":
        assert (row["oom_request_bytes"], row["phase"]) == (2 << 30, "step 2, forward")
    if fault == "kill":
        assert row["exit_code"] == -signal.SIGKILL


def test_what_fails_after_the_measured_steps_is_a_note(run_sweep: Run) -> None:
    (row,) = run_sweep(command("PYTHON SCRIPTS/faults.py late 9", runner={"stop": False}))
    assert row["outcome"] == "ok"
    said = "after the measured steps the script ended with exit status 1; its last words: ValueError: saving failed"
    assert row["notes"][-1] == said


def test_what_cannot_be_measured_says_why(run_sweep: Run) -> None:
    words, reasons = zip(*cases("scripts_that_cannot_be_measured"), strict=True)
    for row, reason in zip(run_sweep(*map(command, words)), reasons, strict=True):
        assert row["outcome"] == "invalid" and row["reason"].startswith(reason.replace("PYTHON", PYTHON)), row["reason"]


PEEK = source("state_of_a_script.txt")


def test_the_script_notices_nothing(run_sweep: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints, finds and imports the same as when it runs alone; the user's own sitecustomize is imported, too."""
    (here / "own").mkdir()
    (here / "own" / "sitecustomize.py").write_text("MINE = 1\n")
    (here / "peek.py").write_text(PEEK)
    monkeypatch.setenv("PYTHONPATH", str(here / "own"))
    bare = subprocess.run([PYTHON, "peek.py"], capture_output=True, text=True, check=True)
    before = {path.name for path in here.iterdir()}
    (row,) = run_sweep(command("PYTHON peek.py", runner={"stop": False}))
    assert row["outcome"] == "ok"
    (place,) = here.glob("t/trials/attempts/*/1")
    assert (place / "stderr.log").read_text() == bare.stderr
    told, alone = (text.splitlines() for text in ((place / "stdout.log").read_text(), bare.stdout))
    assert told[1:] == alone[1:]
    watched, free = json.loads(told[0]), json.loads(alone[0])
    assert watched.pop("finders") == [*free.pop("finders"), "Lent"]
    assert watched == free and free["own"] == 1
    assert {path.name for path in here.iterdir()} - before == {"t"}


SHAPES = source("shapes_of_tensors.txt")


@pytest.mark.parametrize("kind", ["plain", "functional", "compiled", "in_place", "scaled", "groups", "fork"])
def test_steps_are_seen_however_they_are_made(run_sweep: Run, tmp_path: Path, kind: str) -> None:
    (tmp_path / "shapes.py").write_text(SHAPES)
    protocol = {"name": "x", "warmup_steps": 2, "measured_steps": 6}
    (row,) = run_sweep(command(f"PYTHON {tmp_path / 'shapes.py'} {kind}", protocol=protocol))
    assert row["outcome"] == "ok", row["reason"]
    assert (len(row["step_times_s"]), row["warmup_steps"]) == (6, 2)
    assert (row["load_peak_reserved_bytes"] is None) == (kind in ("functional", "in_place"))
    if kind != "compiled" and kind != "in_place":
        assert row["backward_peak_allocated_bytes"] >= 2 * 4 * 32 * 32  # weights and their gradients
    (place,) = tmp_path.glob("t/trials/attempts/*/1")
    assert not (place / "stderr.log").read_text()
    seen = [json.loads(path.read_text()) for path in place.glob("seen-*.json")]
    assert {one["problem"] for one in seen} == {None}
    assert row["skipped_steps"] == (6 if kind == "scaled" else 0)  # 2 to the 127 overflows until it is halved often


def test_what_is_called_beside_the_trained_model_counts_for_nothing(run_sweep: Run) -> None:
    """Every row is that of the plain one but in what its name says."""
    protocol = {"name": "x", "warmup_steps": 2, "measured_steps": 8}
    kinds = ("plain", "big", "teacher", "transform", "retry", "modes", "siamese", "closure", "evaluation",
             "with_gradients")  # fmt: skip
    rows = run_sweep(*(command(f"PYTHON SCRIPTS/models.py {kind}", protocol=protocol) for kind in kinds))
    by = dict(zip(kinds, rows, strict=True))
    assert {row["outcome"] for row in rows} == {"ok"}
    assert {row["parameters"] for row in rows} == {50 * 32 + 32 * 32 + 32 + 32 * 50 + 50}
    tokens = {kind: row["tokens_per_s"] and row["tokens_per_s"] * row["elapsed_s"] for kind, row in by.items()}
    told = tokens.pop("closure"), tokens.pop("siamese"), tokens.pop("evaluation")
    assert told == (None, pytest.approx(2 * 8 * 64), pytest.approx(6 * 64))
    assert tokens == {kind: pytest.approx(8 * 64) for kind in tokens}
    assert len(by["evaluation"]["step_times_s"]) == 6 and by["evaluation"]["elapsed_s"] < 0.3
    assert any("2 of 8 measured steps evaluated or saved" in note for note in by["evaluation"]["notes"])
    assert by["big"]["peak_allocated_bytes"] == by["plain"]["peak_allocated_bytes"]
    assert by["modes"]["model_flops_per_token"] == by["plain"]["model_flops_per_token"]
    assert by["modes"]["peak_allocated_bytes"] == pytest.approx(by["plain"]["peak_allocated_bytes"], rel=0.01)
    assert by["teacher"]["model_flops_per_token"] <= by["teacher"]["hardware_flops_per_token"]
    assert [row["grad_accum"] for row in rows] == [1] * 7 + [None, 1, 1]


# What torch itself imports: a script's environment need not have more.
TORCH_ALONE = ["torch", "torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock",
               "fsspec", "typing_extensions.py"]  # fmt: skip


def test_another_environment_needs_nothing_of_ours(run_sweep: Run, tmp_path: Path) -> None:
    """No psutil, no pydantic, no numpy there; its torch is the row's, and the row finishes the trial."""
    venv.create(tmp_path / "other")
    own = Path(torch.__file__).parents[1]
    (site,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    for place in [*(own / name for name in TORCH_ALONE), *own.glob("torch-*.dist-info")]:
        (site / place.name).symlink_to(place)
    python = tmp_path / "other" / "bin" / "python"
    alone = subprocess.run([python, "-c", "import torch, psutil"], capture_output=True, text=True, check=False)
    assert alone.stderr.endswith("No module named 'psutil'\n")
    values = command(f"{python} SCRIPTS/faults.py fine")
    (row,) = run_sweep(values)
    assert (row["outcome"], row["reason"], row["transformers_version"]) == ("ok", None, None)
    assert row["torch_version"] == torch.__version__
    assert row["host_workers_bytes"] is not None  # which psutil knows
    (again,) = run_sweep(values)
    assert again["attempt"] == 1 and again["peak_allocated_bytes"] == row["peak_allocated_bytes"]


MIB = 1 << 20
JOB = {"name": "job", "warmup_steps": 1, "measured_steps": 1, "job": True}


def test_a_whole_job_has_a_peak_for_each_of_its_parts(run_sweep: Run, tmp_path: Path) -> None:
    """Counted by hand: the layer has 1 MiB of weights, as much momentum and gradients."""
    first, second = run_sweep(command(f"PYTHON SCRIPTS/job.py {tmp_path}", protocol=JOB), repeats=2)
    assert (first["outcome"], second["outcome"], first["reason"]) == ("ok", "ok", None)
    peaks, again = first["part_peak_allocated_bytes"], second["part_peak_allocated_bytes"]
    assert set(peaks) == {"load", "first_step", "steps", "evaluation", "save"}
    assert set(again) == {*peaks, "resume"}
    small = MIB // 8  # batches and losses
    expected = {"load": 1, "first_step": 3, "steps": 3, "evaluation": 2 + 8, "save": 2 + 8}
    assert {part: round(peak / MIB) for part, peak in peaks.items()} == expected
    assert 0 <= peaks["evaluation"] - 10 * MIB <= small
    assert again["resume"] == 3 * MIB  # the weights, and what the file holds of them and of the momentum
    assert again["evaluation"] == peaks["evaluation"] and again["steps"] == peaks["steps"]
    assert first["largest_part"] == "evaluation"
    assert first["peak_allocated_bytes"] == peaks["steps"]  # of load and steps alone
    assert first["part_peak_reserved_bytes"] is None
    assert first["notes"][-1] == "evaluation needs the most memory of the job: 10.0 MiB; steps: 3.0 MiB"
    (said,) = parts.sentences(parts.jobs(groups(load(tmp_path / "t"))))
    assert said.startswith(
        "In 2 of 2 jobs evaluation needs most (allocated): at worst 10.0 MiB where the steps need 3.0 MiB"
    )


def test_a_job_of_the_trainer(run_sweep: Run, tmp_path: Path) -> None:
    """It evaluates a batch four times as large, saves, and a second one goes on from there."""
    words = (
        f"PYTHON SCRIPTS/clm.py --block_size 64 --per_device_train_batch_size 1 --per_device_eval_batch_size 16 "
        f"--use_cpu true --output_dir {tmp_path / 'out'} --report_to none --eval_strategy steps --eval_steps 6 "
        "--save_strategy steps --save_steps 6 --max_steps {max_steps} {more}"
    )
    more = f"--resume_from_checkpoint={tmp_path}/out/checkpoint-12"
    told = {"max_steps": 12, "more": ""}, {"max_steps": 24, "more": more}
    values = [command(words, protocol=JOB, runner={"options": options}) for options in told]
    values[0]["runner"]["command"] = values[0]["runner"]["command"].replace(" {more}", "")
    del values[0]["runner"]["options"]["more"]
    first, second = run_sweep(*values)
    assert (first["outcome"], second["outcome"]) == ("ok", "ok"), (first["reason"], second["reason"])
    peaks, again = first["part_peak_allocated_bytes"], second["part_peak_allocated_bytes"]
    assert set(peaks) == {"load", "first_step", "steps", "evaluation", "save"}
    assert set(again) == {*peaks, "resume"}
    weights = 4 * first["parameters"]
    assert peaks["load"] >= weights and again["resume"] >= 3 * weights  # with both of Adam's moments
    logits = 16 * 64 * 512 * 4
    assert peaks["evaluation"] >= 3 * weights + logits > peaks["steps"]
    assert first["largest_part"] == "evaluation"
    assert peaks["steps"] == first["peak_allocated_bytes"]


def test_a_job_of_our_own_trainer(run_sweep: Run) -> None:
    options = {"per_device_eval_batch_size": 16}
    told = {"seq_len": 64, "micro_batch": 1}
    row, ordinary = run_sweep(
        tiny(**told, protocol=JOB | {"measured_steps": 2}, runner={"name": "trainer", "options": options}),
        tiny(**told, runner={"name": "trainer"}),
    )
    assert row["outcome"] == "ok", row["reason"]
    peaks = row["part_peak_allocated_bytes"]
    assert set(peaks) == {"load", "resume", "first_step", "steps", "evaluation", "save"}
    weights = 4 * row["parameters"]
    assert peaks["load"] >= weights and peaks["save"] >= 3 * weights  # with both of Adam's moments
    assert 3 * weights <= peaks["resume"] < peaks["evaluation"]  # nothing is left of the training
    assert peaks["evaluation"] >= 3 * weights + 16 * 64 * 512 * 4 > peaks["steps"]  # logits in fp32
    samples = 64 * 64 * 8  # made where no mode looks on; an ordinary row finds them when it begins to count
    assert peaks["steps"] == ordinary["peak_allocated_bytes"] - samples
    assert (row["tokens_per_s"], row["largest_part"]) == (None, "evaluation")
    assert row["model_flops_per_token"] == ordinary["model_flops_per_token"]


def test_a_plain_loop_is_predicted_as_our_own_runner_predicts_it(run_sweep: Run) -> None:
    words = "PYTHON SCRIPTS/plain.py --max_len {seq_len} --bs {micro_batch} {precision:bf16=--bf16:fp32=}"
    told = {"seq_len": 48, "micro_batch": 3, "device": SIMULATED}
    ours = tiny(**told, runner=OURS)
    row, half, longer, other = run_sweep(
        command(words, **told),
        command(words, **told, precision="bf16"),
        command(words, **(told | {"seq_len": 96})),
        ours,
    )
    assert (row["outcome"], row["reason"]) == ("ok", None)
    same = ["peak_allocated_bytes", "peak_reserved_bytes", "peak_optimizer_state_bytes", "parameters", *MEMORY[1:]]
    assert {name: row[name] for name in same} == {name: other[name] for name in same}
    net = scripted._net()  # made on the host, and copied to the card one by one
    loaded = [tensor.nbytes for tensor in (*net.parameters(), *net.buffers())] + [48 * 3 * 8]  # the first batch
    assert row["load_peak_allocated_bytes"] == sum(-(-size // 512) * 512 for size in loaded)
    assert half["peak_optimizer_state_bytes"] == row["peak_optimizer_state_bytes"]
    assert half["peak_activations_bytes"] < row["peak_activations_bytes"] < longer["peak_activations_bytes"]
    assert any("it got nan" in note for note in row["notes"])  # it prints its loss


def test_trl_is_predicted_with_its_kernel(run_sweep: Run) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("triton")
    words = "PYTHON SCRIPTS/sft.py --batch {micro_batch} --out {output_dir}"
    (row,) = run_sweep(command(words, micro_batch=4, device=SIMULATED))
    assert (row["outcome"], row["reason"]) == ("ok", None)
    assert row["estimated_step_s"] is None and row["step_growth_bytes"] is None
    notes = "; ".join(row["notes"])
    assert "launches of Triton kernels" in notes and "batches of several shapes (4 x " in notes


def test_what_a_script_decides_by_value_is_as_it_is_without_us(run_sweep: Run, tmp_path: Path) -> None:
    alone, watched = tmp_path / "alone", tmp_path / "watched"
    subprocess.run([PYTHON, SCRIPTS / "valued.py", "--said", alone], check=True)
    words = f"PYTHON SCRIPTS/valued.py --said {watched}{{samples}} --samples {{samples}}"
    few, many = run_sweep(
        *(command(words, runner={"options": {"samples": n}}, device=SIMULATED) for n in (4000, 40000))
    )
    assert (few["outcome"], few["reason"]) == ("ok", None)
    said = [ast.literal_eval(path.read_text()) for path in (alone, tmp_path / "watched4000")]
    assert len(said[1]) >= 2 and said[1] == said[0][: len(said[1])]
    parameters = (100 * 256 + 8 * (256 * 256 + 256) + 256 * 100 + 100) * 2  # of bf16: no fp32 copy is on the card
    for row in (few, many):  # and no data set, of 6 and 65 MB; but the first batch, its mask and labels
        assert parameters <= row["load_peak_allocated_bytes"] <= parameters + 100_000


def test_what_cannot_be_predicted_says_why(run_sweep: Run) -> None:
    words, reasons = zip(*cases("scripts_that_cannot_be_predicted"), strict=True)
    rows = run_sweep(*(command(one.replace("BIN", str(BIN)), device=SIMULATED) for one in words))
    for row, reason in zip(rows, reasons, strict=True):
        assert row["outcome"] == "invalid" and reason in row["reason"], row["reason"]
