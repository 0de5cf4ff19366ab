"""A secret is passed on and never written down: planted ones are looked for, as bytes, in every file of the results.

Logs hold what a worker or a script itself wrote, and are not ours: those of a script that prints its token have it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, unpacked
from hypothesis import given
from hypothesis import strategies as st

from vramsweep import __main__ as front_door
from vramsweep.harness import account, credentials, journal, outcome, plan, variables
from vramsweep.harness.attempt import Attempted
from vramsweep.harness.errors import UserError
from vramsweep.runners import result

RANDOM = "q7Zk2Vx9Lm4Tn8Rp1Wc6Yb3Hd5Jf0Gs"
PLANTED = {
    "HF_TOKEN": f"hf_{RANDOM}a",
    "HUGGING_FACE_HUB_TOKEN": f"hf_{RANDOM}b",
    "AWS_SECRET_ACCESS_KEY": f"{RANDOM}/c+",
    "AWS_ACCESS_KEY_ID": "AKIAQ7ZK2VX9LM4TN8RP",
    "WANDB_API_KEY": f"{RANDOM}d",
    "GITHUB_TOKEN": f"ghp_{RANDOM}e",
    "OPENAI_API_KEY": f"sk-proj-{RANDOM}f",
    "DATABASE_URL": f"postgres://me:{RANDOM}g@db.example/x",
    "NCCL_SOCKET_URI": f"https://me:{RANDOM}h@proxy.example/",
    "CUDA_MIRROR": f"https://mirror.example/?sig={RANDOM}i",
    "TORCH_REMOTE": f"{RANDOM}j",
    "TORCHINDUCTOR_REDIS": f"redis://{RANDOM}k@cache.example",
    "NVIDIA_LICENSE": f"Bearer {RANDOM}l",
    "TRANSFORMERS_EXTRA": f"--token {RANDOM}m",
    "DS_LOGIN": f"password={RANDOM}n",
    "PIP_INDEX_URL": f"https://me:{RANDOM}o@index.example/simple",
    "http_proxy": f"http://me:{RANDOM}p@proxy.example:3128",
    "SLACK_WEBHOOK": f"https://hooks.slack.com/services/T0/B0/{RANDOM}q",
    "MY_PASSWORD": f"pass-{RANDOM}r",
    "DS_PWD": "hunter-pwd",
    "NCCL_PAT": "hunter-pat",
    "OPENBLAS_PASSPHRASE": "hunter phrase",
    "SSH_AUTH_SOCK": f"/tmp/ssh-{RANDOM}s/agent",
}
REMOTE, HOME = f"{RANDOM}remote", f"home-{RANDOM}"
FAILING = """
import os, sys
print("my token is", os.environ["HF_TOKEN"])
print('{"password": "hunter-said"}', file=sys.stderr)
text = '401 for {"passphrase": "hunter-said"} '
raise RuntimeError(text + os.environ["DATABASE_URL"] + " with " + os.environ["MY_PASSWORD"])
"""


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
    """What the file holds, of a page also what is packed in it."""
    return unpacked(file.read_text()).encode() if file.suffix == ".html" else file.read_bytes()


@pytest.mark.slow
def test_nothing_that_was_planted_is_in_the_results(tmp_path: Path) -> None:
    home, work = tmp_path / HOME, tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    git = ["git", "-C", str(work)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "remote", "add", "origin", f"https://me:{REMOTE}@git.example/x"], check=True)
    (work / "train.py").write_text((ROOT / "tests/scripts/plain.py").read_text())
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
    assert row["outcome"] == "crash"
    assert "401 for" in row["reason"]
    assert "***" in row["reason"]
    recorded = journal.read(work / "results" / "measured")[0][0]["environment"]
    assert not set(recorded) & set(PLANTED)
    files = {file.name for file in (work / "results").rglob("*")}
    assert {"journal.jsonl", "plan.json", "spec.json", "result.json", "report.html", "rows.csv"} <= files
    assert {"methods.txt", "environment.json"} <= files
    assert written(work / "results") == []


TYPED = [
    ["+runner.options.hub_token=VALUE", "runner=trainer"],
    ["+runner.options.token=VALUE"],
    ["runner=script", "runner.command='python t.py --token VALUE'"],
    ["runner=script", "runner.command='python t.py --api-key=VALUE'"],
    ["runner=script", "runner.command='HF_TOKEN=VALUE python t.py'"],
    ["runner=script", "runner.command='python t.py password=VALUE'"],
    ["data='https://me:VALUE@host/x.txt'"],
    ["model=hub", "model.path='https://host/x?token=VALUE'"],
    ["+model.config.secret=VALUE"],
    ["runner=script", "runner.command='python t.py --extra \\'{\"password\": \"VALUE\"}\\''"],
    ["runner=script", "runner.command='python t.py --pwd VALUE'"],
    ["+runner.options.extra={password:VALUE}"],
    ["cluster=slurm", "cluster.setup='export HF_TOKEN=VALUE'"],
]


@pytest.mark.slow
def test_one_that_is_typed_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in TYPED:
        given = [word.replace("VALUE", RANDOM) for word in words]
        for verb in ("sweep", "plan"):
            assert front_door.main([verb, "device=cpu", "model=tiny", *given]) == 2, words
            said = capsys.readouterr()
            assert "would be written into the results" in said.err
            assert RANDOM not in said.out + said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_in_a_file_of_the_user_s_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "own" / "experiment"
    folder.mkdir(parents=True)
    (folder / "night.yaml").write_text(f"# @package _global_\nrunner: {{options: {{hub_token: {RANDOM}}}}}\n")
    words = ["--config-dir", "own", "+experiment=night", "model=tiny", "device=cpu", "-m", "seq_len=8,16"]
    assert front_door.main(["sweep", *words]) == 2
    said = capsys.readouterr().err
    assert "hub_token would be written into the results" in said
    assert RANDOM not in said
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [folder / "night.yaml"]


@pytest.mark.parametrize("values", [{"runner": {"options": {"hub_token": RANDOM}}}, {"a": [f"x?sig={RANDOM}"]}])
def test_no_impossible_trial_writes_one_down(values: dict[str, object]) -> None:
    with pytest.raises(UserError, match="would be written"):
        plan.expand([values], 1)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_ones_are_passed_on_and_not_recorded(name: str) -> None:
    environ = {name: PLANTED[name], "NCCL_DEBUG": "INFO"}
    assert variables.passed_on(environ) == environ
    assert variables.recorded(environ) == {"NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("CUDA_VISIBLE_DEVICES", "GPU-8f2c1a90-1111-2222-3333-444455556666,GPU-8f2c1a90-1111-2222-3333-444455556667"),
        ("CUDA_VISIBLE_DEVICES", "MIG-8f2c1a90-1111-2222-3333-444455556666"),
        ("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"),
        ("NCCL_IB_HCA", "mlx5_0,mlx5_1,mlx5_2,mlx5_3,mlx5_4,mlx5_5,mlx5_6,mlx5_7"),
        ("TORCH_CUDA_ARCH_LIST", "5.0;6.0;7.0;7.5;8.0;8.6;9.0;10.0;12.0+PTX"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("OMP_NUM_THREADS", "1"),
        ("TORCH_LOGS", "+dynamo,aot,inductor,graph_breaks,recompiles"),
        ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility,graphics,video,display,compat32"),
    ],
)
def test_what_is_no_secret_is_recorded(name: str, text: str) -> None:
    assert variables.recorded({name: text}) == {name: text}


@given(st.sampled_from(sorted(PLANTED)), st.text(), st.text())
def test_what_an_error_quotes_is_masked(name: str, before: str, after: str) -> None:
    """Those that the environment has are known by themselves, wherever they stand."""
    known = variables.secrets(PLANTED)
    if PLANTED[name] in known:
        assert PLANTED[name] not in credentials.masked(f"{before}{PLANTED[name]}{after}", known)


TABLE = [line.split("\t", 1) for line in Path(__file__).with_name("secrets.tsv").read_text().splitlines()[1:]]
VALUES = {
    "SHORT": "hunter-x",
    "RANDOM": RANDOM,
    "HEX": "0f1e2d3c4b5a69788796a5b4c3d2e1f001122334",
    "AWS": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzz2VaLUEk1",
}


@pytest.mark.parametrize(("secret", "text"), TABLE)
def test_secrets_are_seen_and_masked_and_nothing_else_is(secret: str, text: str) -> None:
    """In a text, which `sweep` and `run` refuse where it is typed, and as a value of plain data."""
    for name, value in VALUES.items():
        text = text.replace(name, value) if secret == "yes" else text
    said, masked = credentials.said(text), credentials.masked(text)
    if secret == "no":
        assert (said, masked, credentials.found({"a": [text]})) == (None, text, None)
        return
    assert said is not None and credentials.found({"a": [text]}) == said
    assert not [value for value in VALUES.values() if value in said + masked]
    assert credentials.masked(masked) == masked and credentials.said(masked) is None


def test_plain_data_is_known_by_its_names() -> None:
    held = {"auth": {"password": 123456, "secrets": {"db": "x1"}}, "words": ["--pwd", "x2"], "max_tokens": 5}
    clean = {"auth": {"password": "***", "secrets": {"db": "***"}}, "words": ["--pwd", "***"], "max_tokens": 5}
    assert credentials.cleaned(held) == clean
    assert "password would be" in str(credentials.found(held)) and credentials.found(clean) is None


@pytest.mark.parametrize(
    "unit",
    ["a_", "aA", "token=<", "password='x", "--token ", "key='", "key=aaaa", "bearer:", "eyJ-", "SG.", "://a:", "aws a",
     "-----BEGIN PRIVATE KEY-----", "\\", "[", "Cookie: a", "password=,,", "?key=", "1"],
)  # fmt: skip
def test_the_time_goes_with_the_length(unit: str) -> None:
    def spent(length: int) -> float:
        begun = time.process_time()
        text = unit * (length // len(unit)) + "=x"
        assert credentials.masked(text) and credentials.kind(text) != "" and credentials.suspicious(text) is not None
        return time.process_time() - begun

    assert spent(200_000) < 8 * max(spent(50_000), 0.05)  # four times as much; sixteen were the square


def test_a_row_s_notes_configuration_and_reason_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", PLANTED["MY_PASSWORD"])
    secret, given = PLANTED["MY_PASSWORD"], {"comet": {"api_key": RANDOM, "on": True}, "steps": [1, 2]}
    told = {"values": {"notes": [f"not {secret}"], "runner_config": given, "parameters": 3}, "complete": True}
    found = account.ended(Attempted(outcome.Evidence(exit_code=0, result=told), 1.0, "cold"), dict(os.environ), None)
    assert found["notes"] == ["not ***"]
    assert found["runner_config"] == {"comet": {"api_key": "***", "on": True}, "steps": [1, 2]}
    assert found["parameters"] == 3
    result.write(tmp_path, told)
    result.write(tmp_path / ".", {"error": {"type": "E", "message": f"with {secret}"}})
    assert secret.encode() not in (tmp_path / "result.json").read_bytes()
    assert json.loads((tmp_path / "result.json").read_text())["error"] == {"type": "E", "message": "with ***"}
