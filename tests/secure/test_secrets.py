"""A secret is passed on and never written down: planted ones are looked for, as bytes, in every file of the results.

Logs hold what a worker or a script itself wrote, and are not ours: those of a script that prints its token have it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, Cli, cases, parametrized, refusal, source, unpacked
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness.files import redaction
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process import worker_environment
from vramsweep.harness.process.attempt import AttemptResult
from vramsweep.harness.rows import journal, outcome
from vramsweep.harness.sweep import plan, row_builder
from vramsweep.runners.rank import result_file

RANDOM = "q7Zk2Vx9Lm4Tn8Rp1Wc6Yb3Hd5Jf0Gs"
PLANTED = {name: value.format(random=RANDOM) for name, value in cases("planted_secrets")}
REMOTE, HOME = f"{RANDOM}remote", f"home-{RANDOM}"
FAILING = source("script_that_tells_secrets.txt")


def written(folder: Path) -> list[str]:
    """The files that hold something planted, but for logs: a script's, DeepSpeed's, a traceback."""
    looked_for = [text.encode() for text in (*PLANTED.values(), RANDOM, REMOTE, HOME, "hunter-")]
    return [
        f"{file.relative_to(folder)}: {text.decode()}"
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not ({"failing", "ds", "model2"} & {*file.parts} and file.suffix == ".log")
        for text in looked_for
        if text in _bytes(file) or text.decode() in str(file)
    ]


def _bytes(file: Path) -> bytes:
    """Return the file's content; a page's includes what is packed in it."""
    return unpacked(file.read_text()).encode() if file.suffix == ".html" else file.read_bytes()


@pytest.mark.slow
@pytest.mark.deterministic
def test_nothing_that_was_planted_is_in_the_results(tmp_path: Path) -> None:
    home, work = tmp_path / HOME, tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    git = ["git", "-C", str(work)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "remote", "add", "origin", f"https://me:{REMOTE}@git.example/x"], check=True)
    for name, own in (("train", "plain"), ("small_qwen", "small_qwen")):
        (work / f"{name}.py").write_text((ROOT / f"tests/scripts/{own}.py").read_text())
    (work / "fails.py").write_text(FAILING)
    (work / "model").mkdir()
    config = TINY["model"]["config"] | {"model_type": "qwen2", "api_key": "hunter-of-model", "pad_token_id": 0}
    (work / "model" / "config.json").write_text(json.dumps(config))
    (work / "model2").mkdir()
    (work / "model2" / "config.json").write_text(json.dumps(config | {"n_layer": "password=hunter-absurd"}))
    zero = {"stage": 1, "note": "--token hunter-ds"}
    ds = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "comet": {"api_key": "hunter-ds"}}
    (work / "ds.json").write_text(json.dumps(ds))
    (work / "ds2.json").write_text(json.dumps(ds | {"zero_optimization": zero, "optimizer": "password=hunter-ds"}))
    environ = {**os.environ, **PLANTED, "HOME": str(home), "XDG_CACHE_HOME": str(home), "HF_HOME": str(home)}

    def call(*words: str, status: int = 0) -> None:
        line = [sys.executable, "-m", "vramsweep", *words]
        done = subprocess.run(line, cwd=work, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        assert not [text for text in PLANTED.values() if text in done.stdout + done.stderr]

    tiny = ["model=tiny", "protocol=brief", "seq_len=16", "backoff_s=0", "retries=0"]
    call("sweep", *tiny, "device=cpu", "precision=fp32", "name=measured")
    call("sweep", "-m", *tiny, "device=simulated", "device.gpu=a100-40gb", "micro_batch=1,2", "name=predicted")
    call("run", "device=cpu", "protocol=brief", "seq_len=16", "name=script", "--", sys.executable, "train.py",
         "--max_len", "{seq_len}")  # fmt: skip
    call("run", "device=cpu", "protocol=brief", "retries=0", "name=failing", "--", sys.executable, "fails.py", status=1)
    for name in ("model", "model2"):  # the second is no model, and the reason quotes it
        words = [f"model.path={work / name}", "model.name=own", "precision=fp32", f"name={name}"]
        call("sweep", *tiny, "model=hub", "device=cpu", *words, status=2 * (name == "model2"))
    for name in ("ds", "ds2"):
        words = [f"ds_config={name}.json", "runner=deepspeed", "device.gpu=a100-40gb", f"name={name}"]
        call("sweep", *tiny, "device=simulated", "micro_batch=2", *words, status=2 * (name == "ds2"))
    for name in ("measured", "failing", "ds"):
        call("paper", f"results/{name}")
    call("export", "results/measured", "results/measured/x.csv")
    (row,) = journal.read(work / "results" / "failing")[0]
    assert row["outcome"] == "crash" and "401 for" in row["reason"] and "***" in row["reason"]
    recorded = journal.read(work / "results" / "measured")[0][0]["environment"]
    assert not set(recorded) & set(PLANTED)
    files = {file.name for file in (work / "results").rglob("*")}
    assert {"journal.jsonl", "plan.json", "spec.json", "result.json", "report.html", "rows.csv"} <= files
    assert {"methods.txt", "environment.json"} <= files
    assert written(work / "results") == []


@pytest.mark.slow
def test_one_that_is_typed_is_refused_before_anything_is_written(here: Path, cli: Cli) -> None:
    for words in cases("typed_secrets"):
        given = [word.replace("VALUE", RANDOM) for word in words]
        for verb in ("sweep", "plan"):
            said = cli.run(verb, "device=cpu", "model=tiny", *given, status=2)
            assert "would be written into the results" in said.err and RANDOM not in said.out + said.err, words
    assert list(here.iterdir()) == []


@pytest.mark.slow
def test_one_in_a_file_of_the_user_s_is_refused_too(here: Path, cli: Cli) -> None:
    folder = here / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "night.yaml").write_text(f"# @package _global_\nrunner: {{options: {{hub_token: {RANDOM}}}}}\n")
    words = ("--config-dir", "own", "+experiment=night", "model=tiny", "device=cpu", "-m", "seq_len=8,16")
    said = cli.refuse("sweep", *words)
    assert "hub_token would be written into the results" in said and RANDOM not in said
    assert [file for file in here.rglob("*") if file.is_file()] == [folder / "night.yaml"]


@pytest.mark.parametrize("values", [{"runner": {"options": {"hub_token": RANDOM}}}, {"a": [f"x?sig={RANDOM}"]}])
def test_no_impossible_trial_writes_one_down(values: dict[str, object]) -> None:
    assert "would be written" in refusal(UserError, plan.expand_trials, [values], 1)


def test_planted_ones_are_passed_on_and_not_recorded() -> None:
    environ = PLANTED | {"NCCL_DEBUG": "INFO"}
    assert worker_environment.select_variables(environ) == environ
    assert worker_environment.recorded_variables(environ) == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(("name", "text"), cases("recorded_variables"))
def test_what_is_no_secret_is_recorded(name: str, text: str) -> None:
    assert worker_environment.recorded_variables({name: text}) == {name: text}


@given(st.sampled_from(sorted(PLANTED)), st.text(), st.text())
def test_what_an_error_quotes_is_masked(name: str, before: str, after: str) -> None:
    """Those that the environment has are known by themselves, wherever they stand."""
    known = worker_environment.secrets(PLANTED)
    if PLANTED[name] in known:
        assert PLANTED[name] not in redaction.mask_text(f"{before}{PLANTED[name]}{after}", known)


TABLE = [line.split("\t", 1) for line in Path(__file__).with_name("secrets.tsv").read_text().splitlines()[1:]]
VALUES = {
    "SHORT": "hunter-x", "RANDOM": RANDOM, "HEX": "0f1e2d3c4b5a69788796a5b4c3d2e1f001122334",
    "AWS": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzz2VaLUEk1",
}  # fmt: skip


def test_secrets_are_seen_and_masked_and_nothing_else_is() -> None:
    """In a text, which `sweep` and `run` refuse where it is typed, and as a value of plain data."""
    for secret, text in TABLE:
        for name, value in VALUES.items():
            text = text.replace(name, value) if secret == "yes" else text
        said, masked = redaction.secret_problem(text), redaction.mask_text(text)
        assert redaction.secrets_problem({"a": [text]}) == said, text
        if secret == "no":
            assert (said, masked) == (None, text)
            continue
        assert said is not None and not [value for value in VALUES.values() if value in said + masked], text
        assert redaction.mask_text(masked) == masked and redaction.secret_problem(masked) is None, text


def test_plain_data_is_known_by_its_names() -> None:
    held = {"auth": {"password": 123456, "secrets": {"db": "x1"}}, "words": ["--pwd", "x2"], "max_tokens": 5}
    clean = {"auth": {"password": "***", "secrets": {"db": "***"}}, "words": ["--pwd", "***"], "max_tokens": 5}
    assert redaction.redact(held) == clean
    assert "password would be" in str(redaction.secrets_problem(held)) and redaction.secrets_problem(clean) is None


@parametrized("units_of_long_secrets")
def test_the_time_goes_with_the_length(unit: str) -> None:
    def spent(length: int) -> float:
        begun = time.process_time()
        text = unit * (length // len(unit)) + "=x"
        assert redaction.mask_text(text) and redaction.secret_kind(text) != ""
        assert redaction.suspicious(text) is not None
        return time.process_time() - begun

    assert spent(80_000) < 8 * max(spent(20_000), 0.05)  # four times as much; sixteen were the square


def test_a_row_s_notes_configuration_and_reason_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", PLANTED["MY_PASSWORD"])
    secret, given = PLANTED["MY_PASSWORD"], {"comet": {"api_key": RANDOM, "on": True}, "steps": [1, 2]}
    told = {"values": {"notes": [f"not {secret}"], "runner_config": given, "parameters": 3}, "complete": True}
    found = row_builder.process_columns(
        AttemptResult(outcome.Evidence(exit_code=0, result=told), 1.0, "cold"), dict(os.environ), None
    )
    assert found["notes"] == ["not ***"]
    assert found["runner_config"] == {"comet": {"api_key": "***", "on": True}, "steps": [1, 2]}
    assert found["parameters"] == 3
    result_file.write(tmp_path, told)
    result_file.write(tmp_path / ".", {"error": {"type": "E", "message": f"with {secret}"}})
    assert secret.encode() not in (tmp_path / "result.json").read_bytes()
    assert json.loads((tmp_path / "result.json").read_text())["error"] == {"type": "E", "message": "with ***"}
