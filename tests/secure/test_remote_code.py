"""Models of others: their code (Python files, pickles) runs only if requested; what describes none is refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY, Run, parametrized, refusal, save_tokenizer, source, tiny

from vramsweep.harness.config.reproduce_command import command
from vramsweep.harness.messages.errors import EnvironmentFault
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.harness.spec.trial_identity import trial_id
from vramsweep.harness.spec.trial_parser import parse
from vramsweep.runners.model import build

CODE = source("code_beside_a_model.txt")
OWN = {  # of each Python file beside a model: its class, that class's base, and what is in it
    "configuration": ("OwnConfig", "Qwen2Config", 'model_type = "own_code"'),
    "modeling": ("OwnForCausalLM", "Qwen2ForCausalLM", "from .configuration_own import OwnConfig as config_class"),
    "tokenization": ("OwnTokenizer", "PreTrainedTokenizerFast", "pass"),
}
SAID = "model.trust_remote_code=true"
SIMULATED = {"name": "simulated", "gpu": "rtx4090-24gb"}


class Touch:
    """A pickle that makes a file when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self._file,)


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder in which code that runs leaves a file; transformers, if imported later, copies code next to it."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def model_folder(folder: Path, marks: Path, model_type: str = "own_code", **auto_map: str) -> Path:
    """A tiny model whose configuration and class are Python files beside it, but for those that `auto_map` names."""
    folder.mkdir()
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = TINY["model"]["config"] | {"model_type": model_type, "auto_map": auto_map or names}
    (folder / "config.json").write_text(json.dumps(config))
    for name, (own, base, body) in OWN.items():
        (folder / f"{name}_own.py").write_text(CODE.format(marker=str(marks / name), own=own, base=base, body=body))
    return folder


def hub(path: Path, trusted: bool, **over: Any) -> dict[str, Any]:
    """A trial of the model in a folder."""
    name = {"name": "own", "model_type": None, "parameters": None, "max_positions": None, "config": {}}
    return tiny(**over) | {"model": {**name, "path": str(path), "trust_remote_code": trusted}}


def ran(marks: Path) -> set[str]:
    """Return the names of the code that has run."""
    return {one.name for one in marks.iterdir()}


@pytest.mark.slow
def test_a_model_s_own_code_runs_only_where_it_is_asked_for(run_sweep: Run, tmp_path: Path, marks: Path) -> None:
    folder, devices = model_folder(tmp_path / "model", marks), ({"name": "cpu"}, SIMULATED)
    for off in run_sweep(*(hub(folder, trusted=False, device=device) for device in devices), isolation="cold"):
        assert off["outcome"] == "invalid" and str(folder) in off["reason"] and SAID in off["reason"]
    assert ran(marks) == set()
    for device in devices:
        (on,) = run_sweep(hub(folder, trusted=True, device=device), isolation="cold")
        assert (on["outcome"], on["reason"]) == ("ok", None)
        assert ran(marks) == {"configuration", "modeling"}
        assert on["trial"]["model"]["trust_remote_code"] is True
        assert on["peak_allocated_bytes"] > 0 and on["parameters"] == TINY["model"]["parameters"]
        for mark in marks.iterdir():
            mark.unlink()


@pytest.mark.slow
def test_code_beside_an_architecture_and_a_tokenizer_of_the_library_s_does_not_run(
    run_sweep: Run, tmp_path: Path, marks: Path
) -> None:
    folder = model_folder(tmp_path / "model", marks, model_type="qwen2")
    save_tokenizer(folder)
    file = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    (tmp_path / "text.txt").write_text("a b c a b c\n" * 20)
    plain, with_text = run_sweep(
        hub(folder, trusted=False), hub(folder, trusted=False, data=str(tmp_path / "text.txt")), isolation="cold"
    )
    assert plain["outcome"] == "ok"  # it is the library's own class that was measured
    assert with_text["outcome"] in ("ok", "invalid"), with_text["reason"]
    assert ran(marks) == set()


@pytest.mark.slow
def test_weights_that_are_a_pickle_run_nothing(run_sweep: Run, tmp_path: Path, marks: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = TINY["model"]["config"] | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    evil = pickle.dumps({"model.embed_tokens.weight": Touch(marks / "pickle")})
    (folder / "pytorch_model.bin").write_bytes(evil)
    trials = (hub(folder, trusted=trusted, weights="pretrained") for trusted in (False, True))
    for row in run_sweep(*trials, isolation="cold"):  # trusting allows Python files that can be read, no pickles
        assert row["outcome"] not in ("ok", "oom") and row["reason"]
    assert ran(marks) == set()
    pickle.loads(evil)
    assert ran(marks) == {"pickle"}  # so it would have


def test_it_belongs_to_a_model_that_can_bring_code(tmp_path: Path) -> None:
    assert "needs a model that brings code" in refusal(InvalidTrial, parse, tiny(model={"trust_remote_code": True}))
    with pytest.raises(InvalidTrial, match="loads its model itself"):
        target = tmp_path / "t.py"
        target.write_text("def build(): pass")
        parse(tiny(model={"trust_remote_code": True}, runner={"name": "custom", "target": f"{target}:build"}))
    with pytest.raises(InvalidTrial, match="trust_remote_code"):  # only true is yes
        parse(hub(tmp_path, trusted="yes"))  # type: ignore[arg-type]


def test_whoever_does_not_ask_has_the_ids_and_commands_of_before() -> None:
    before = parse(tiny()).model_dump(mode="json")
    del before["model"]["trust_remote_code"]
    now = parse(tiny()).model_dump(mode="json")
    assert trial_id(now) == trial_id(before)
    assert "trust_remote_code" not in command(now, trial_id(now))


def test_the_code_that_was_allowed_is_in_the_id(tmp_path: Path, marks: Path) -> None:
    folder = model_folder(tmp_path / "model", marks)
    off, on = parse(hub(folder, trusted=False)), parse(hub(folder, trusted=True))
    told = [trial_id(one.model_dump(mode="json")) for one in (off, on)]
    assert told[0] != told[1]
    assert {Path(name).name for name in off.fingerprints} == {"config.json"}
    assert len(on.fingerprints) == 4
    assert SAID in command(on.model_dump(mode="json"), told[1])
    (folder / "modeling_own.py").write_text("# other code")
    assert trial_id(parse(hub(folder, trusted=True)).model_dump(mode="json")) != told[1]
    assert "modeling_own" in refusal(EnvironmentFault, trial_parser.require_unchanged_files, on)


def test_no_other_place_allows_code() -> None:
    """Each call of transformers that could run it is told, by the trial or by a plain False."""
    for file in (path for package in ("harness", "runners", "analysis") for path in (ROOT / package).rglob("*.py")):
        assert "trust_remote_code=True" not in file.read_text(), file


SAYS = {
    "num_hidden_layers": (10**12, -1, 0, "many", 2.5, True),
    "hidden_size": (1 << 62, -64),
    "vocab_size": (10**18, 0),
}


ORDINARY = TINY["model"]["config"] | {"model_type": "qwen2"}
# json reads it, a copy overruns the stack
DEEP = json.dumps(ORDINARY)[:-1] + ', "extra": ' + '{"a":' * 600 + "1" + "}" * 601
HUGE = json.dumps(ORDINARY)[:-1] + ', "attention_dropout": 1e0}'


def folder(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(text)
    return tiny(model={"path": str(tmp_path), "config": {}, "model_type": None})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SAYS.items() for value in values])
def test_sizes_of_no_model(tmp_path: Path, name: str, value: Any) -> None:
    config = ORDINARY | {name: value}
    said = refusal(InvalidTrial, lambda: build.read_config(parse(folder(tmp_path, json.dumps(config)))))
    assert len(said) < 400 and "\n" not in said


@pytest.mark.parametrize("text", [
    "", "{", "[1]", DEEP, HUGE.replace("1e0", "NaN"), HUGE.replace("1e0", "9" * 5000), HUGE.replace("1e0", "9" * 400),
    "null", "[" * 100_000, '{"a":' * 100_000, "\x00", '{"model_type": "../x"}',
])  # fmt: skip
def test_no_configuration_at_all(tmp_path: Path, text: str) -> None:
    assert "\n" not in refusal(InvalidTrial, lambda: build.read_config(parse(folder(tmp_path, text))))


@parametrized("values_of_no_model")
def test_what_describes_no_model_that_can_be_made(tmp_path: Path, name: str, value: Any) -> None:
    shipped = tiny(model=TINY["model"] | {"config": TINY["model"]["config"] | {name: value}})
    for given in (folder(tmp_path, json.dumps(ORDINARY | {name: value})), *[shipped] * (value != "x")):
        with pytest.raises(InvalidTrial, match=rf"model(\.path)? \S*: |^{name} is a whole number of") as found:
            build.model(parse(given), torch.device("cpu"))
        assert "\n" not in str(found.value)


def test_an_ordinary_one_is_a_model(tmp_path: Path) -> None:
    assert build.read_config(parse(folder(tmp_path, json.dumps(ORDINARY)))).num_hidden_layers == 2
