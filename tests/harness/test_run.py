"""The words of `vramsweep run`: what placeholders become, and what is wrong with a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import merged, tiny

from vramsweep.harness import launch, run, script, trial
from vramsweep.harness.errors import UserError

SIMULATED = {"name": "simulated", "gpu": "h100-80gb"}
BARE = {"seq_len": 1, "micro_batch": 1, "model": {"model_type": None, "config": {}}}


def parsed(command: str, **over: Any) -> trial.Trial:
    return trial.parse(merged(tiny(**BARE), merged({"runner": {"name": "script", "command": command}}, over)))


@pytest.mark.parametrize(
    ("command", "over", "words"),
    [
        ("true --len {seq_len} --bs {micro_batch}", {"seq_len": 8, "micro_batch": 3}, ["--len", "8", "--bs", "3"]),
        ("true --len={seq_len}", {"seq_len": 8}, ["--len=8"]),
        ("true {precision:bf16=--bf16:fp32=}", {"precision": "bf16"}, ["--bf16"]),
        ("true {precision:bf16=--bf16:fp32=}", {}, []),
        ("true '{precision:bf16=--bf16 True:fp32=}'", {"precision": "bf16"}, ["--bf16", "True"]),
        ("true --dtype {precision:bf16=bfloat16:fp32=float32}", {"precision": "bf16"}, ["--dtype", "bfloat16"]),
        ("true {lr} {note}", {"runner": {"options": {"lr": 0.0001, "note": "a b"}}}, ["0.0001", "a b"]),
        ("true {{seq_len}} '{\"a\": 1}' {}", {}, ["{seq_len}", '{"a": 1}', "{}"]),
        ("true --out {output_dir} --steps {steps}", {}, ["--out", "OUT", "--steps", "6"]),
        ("true {checkpointing:full=--gc:none=}", {"checkpointing": "full"}, ["--gc"]),
        ("true --nproc {world_size}", {"world_size": 4}, ["--nproc", "4"]),
        ("true --off {offload_param}", {"offload_param": True}, ["--off", "true"]),
    ],
)
def test_a_command_is_told_its_settings(command: str, over: dict[str, Any], words: list[str]) -> None:
    found = parsed(command, **over)
    assert script.words(found, "OUT") == ["true", *words]


@pytest.mark.parametrize(
    ("command", "over", "text"),
    [
        (
            "true {max_len}",
            {},
            "the command has {max_len}, which is not given: give max_len=VALUE, or write {{max_len}}",
        ),
        ("true {seqlen}", {}, "did you mean {seq_len}?"),
        ("true", {"seq_len": 512}, "seq_len=512 does not reach the command: write {seq_len} where it takes it"),
        ("true", {"optimizer": "sgd"}, "optimizer=sgd does not reach the command"),
        ("true {precision:fp32=}", {"precision": "bf16"}, "does not say what precision=bf16 is: add bf16=TEXT"),
        ("true", {"runner": {"options": {"lr": 1}}}, "lr is given, but the command has no {lr}"),
        ("true 'a", {}, "cannot be read: no closing quotation"),
        ("", {}, "runner=script needs a command"),
        ("no-such-program {seq_len}", {}, "there is no program no-such-program to start"),
        ("train.py", {}, "a script starts with its interpreter: python train.py"),
        ("true {precision}", {"precision": "fp17"}, "there is no such precision"),
        ("true {world_size}", {"device": SIMULATED, "world_size": 2}, "a command is simulated as one process"),
    ],
)
def test_what_is_wrong_with_a_command_is_said(command: str, over: dict[str, Any], text: str) -> None:
    with pytest.raises(trial.InvalidTrial) as caught:
        parsed(command, **over)
    assert text in str(caught.value)


def test_a_command_and_its_end_belong_to_scripts() -> None:
    for over, text in (({"command": "true"}, "runner.command belongs to"), ({"stop": False}, "runner.stop belongs to")):
        with pytest.raises(trial.InvalidTrial, match=text):
            trial.parse(tiny(runner={"name": "torch", **over}))


def test_fp16_on_a_cpu_is_the_scripts_business() -> None:
    assert parsed("true {precision}", precision="fp16").precision == "fp16"


def test_another_script_is_another_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the command names counts by what is in it; so does one behind an equals sign."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "a.yaml").write_text("1")

    def identity() -> str:
        return trial.trial_id(parsed("python train.py --config=a.yaml").model_dump(mode="json"))

    first = identity()
    assert identity() == first
    (tmp_path / "train.py").write_text("2")
    second = identity()
    (tmp_path / "a.yaml").write_text("2")
    assert len({first, second, identity()}) == 3


def test_a_script_is_called_by_its_file() -> None:
    names = [
        "python a/train.py -x",
        "torchrun --nproc-per-node 2 b/pre.py",
        "python -m pkg.train",
        "accelerate launch x",
    ]
    assert [script.program(name) for name in names] == ["train", "pre", "pkg.train", "accelerate"]


def test_the_label_says_what_the_command_is_told() -> None:
    found = parsed("true {seq_len} {lr} {precision}", seq_len=8, runner={"options": {"lr": 1}}, world_size=2)
    assert found.label() == "tiny · seq 8 · precision=fp32 · lr=1 · x 2"


def test_own_names_before_the_dashes_are_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "detect", lambda: "cuda")
    found = run.words(["lr=1,2", "seq_len=8", "allocator=default"], ["python", "t.py", "{lr}", "{seq_len}"])
    assert found[:2] == ["-m", "runner=script"]
    assert found[3:] == ["+runner.options.lr=1,2", "seq_len=8", "allocator=default", "device=cuda"]


def test_a_dry_run_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "device=cuda",
        "seq_len=8,16",
        "allocator=default,expandable",
        "--dry-run",
        "--",
        "true",
        "--l",
        "{seq_len}",
    ]
    assert run.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(
        f"{variable}true --l {length}"
        for variable in ("", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ")
        for length in (8, 16)
    )


# Of every setting that a command can be told: a value that is not the default.
VALUES = {
    "seq_len": "512",
    "micro_batch": "4",
    "grad_accum": "2",
    "sharding": "zero3",
    "offload_optimizer": "true",
    "offload_param": "true",
    "zero_init": "false",
    "ds_config": "zero3.json",
    "precision": "bf16",
    "quantization": "nf4",
    "adapter": "lora",
    "lora_r": "8",
    "lora_alpha": "32",
    "lora_dropout": "0.1",
    "lora_target_modules": "q_proj",
    "attention": "eager",
    "kernels": "liger",
    "loss": "chunked",
    "checkpointing": "full",
    "checkpointing_every": "2",
    "checkpointing_reentrant": "true",
    "checkpointing_ops": "matmuls",
    "activation_offload": "true",
    "compile": "default",
    "optimizer": "sgd",
    "no_sync": "false",
    "padding": "0.5",
    "padding_side": "left",
    "padding_to": "64",
    "packing": "documents",
    "use_cache": "off",
    "weights": "pretrained",
    "data": "wikitext",
    "seed": "7",
    "world_size": "2",
}


def dry(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What a dry run prints on a card of these words, through Hydra, without the option."""
    assert run.main(["--dry-run", "device=cuda", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_setting_reaches_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is given on the command line, whatever conf/ and a file that it names have of it."""
    monkeypatch.chdir(tmp_path)
    Path("zero3.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    assert set(VALUES) == {*script.UNSAID, "world_size"}
    given = [f"{name}={value}" for name, value in VALUES.items()]
    told = [f"--{name}={{{name}}}" for name in VALUES]
    assert dry([*given, "--", "true", *told], capsys) == [" ".join(["true", *(f"--{one}" for one in given)])]


def test_what_a_ds_config_says_is_the_scripts_business(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}, '
        '"optimizer": {"type": "AdamW"}, "gradient_accumulation_steps": 4}'
    )
    assert dry(["ds_config=a.json", "--", "true", "{ds_config}"], capsys) == ["true a.json"]


def test_settings_are_axes_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["precision=bf16,fp32", "seed=1,2", "--", "true", "{precision:bf16=--bf16:fp32=}", "{seed}"]
    assert sorted(dry(words, capsys)) == ["true --bf16 1", "true --bf16 2", "true 1", "true 2"]


@pytest.mark.parametrize("word", ["precision=bf16_pure", "precision=fp32,bf16", "seq_len=1", "seed=0", "sharding=none"])
def test_a_setting_that_the_command_is_not_told_is_refused(word: str) -> None:
    with pytest.raises(UserError, match=f"{word} does not reach the command: write {{{word.partition('=')[0]}}}"):
        run.main(["--dry-run", "device=cuda", word, "--", "true"])


@pytest.mark.parametrize("words", [["seq_len=8"], ["seq_len=8", "--"]])
def test_a_command_must_stand_behind_the_dashes(words: list[str]) -> None:
    with pytest.raises(UserError, match="seq_len=512,1024 -- python train"):
        run.main(words)
