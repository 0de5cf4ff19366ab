"""Model folders that nobody made a model with: each is an `invalid` trial with a reason, at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, parametrized, refusal, tiny

from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.harness.spec.trial_parser import parse
from vramsweep.runners.model import build

SAYS = {
    "num_hidden_layers": (10**12, -1, 0, "many", 2.5, True),
    "hidden_size": (1 << 62, -64),
    "vocab_size": (10**18, 0),
}


OWN = TINY["model"]["config"] | {"model_type": "qwen2"}
DEEP = (
    json.dumps(OWN)[:-1] + ', "extra": ' + '{"a":' * 600 + "1" + "}" * 601
)  # json reads it, a copy overruns the stack
HUGE = json.dumps(OWN)[:-1] + ', "attention_dropout": 1e0}'


def folder(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(text)
    return tiny(model={"path": str(tmp_path), "config": {}, "model_type": None})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in SAYS.items() for value in values])
def test_sizes_of_no_model(tmp_path: Path, name: str, value: Any) -> None:
    config = TINY["model"]["config"] | {"model_type": "qwen2", name: value}
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
    for given in (folder(tmp_path, json.dumps(OWN | {name: value})), *[shipped] * (value != "x")):
        with pytest.raises(InvalidTrial, match=rf"model(\.path)? \S*: |^{name} is a whole number of") as found:
            build.model(parse(given), torch.device("cpu"))
        assert "\n" not in str(found.value)


def test_an_ordinary_one_is_a_model(tmp_path: Path) -> None:
    config = TINY["model"]["config"] | {"model_type": "qwen2"}
    assert build.read_config(parse(folder(tmp_path, json.dumps(config)))).num_hidden_layers == 2
