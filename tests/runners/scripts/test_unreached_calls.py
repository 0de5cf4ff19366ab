"""What a traced script does not show is in its row: unreached evaluation, generation and checkpoints, compiled code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from conftest import literal_cases, parametrized, source

from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import make_trace, predicted_row
from vramsweep.runners.scripts import traced_script

pytestmark = pytest.mark.deterministic

Predict = Callable[..., dict[str, Any]]
LOOP = "loop_with_places.txt"


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """Predict a script of tests/data/children/, LOOP by default, whose places are filled."""

    def run(whole: str = LOOP, **places: str) -> dict[str, Any]:
        script = tmp_path / "loop.py"
        if whole == LOOP:
            monkeypatch.setattr(traced_script, "CARDLESS", ())  # takes seconds, and only libraries need it
        script.write_text(source(whole).format(**dict.fromkeys(("before", "built", "each", "after"), "") | places))
        device = {"name": "simulated", "gpu": "l4-24gb"}
        trial = trial_parser.parse(commands.command(f"PYTHON {script}", device=device))
        trace, details = make_trace.trace_trial(trial, trial.device.card, tmp_path, traced_script)
        return predicted_row.predict(trial, trace, details).columns

    return run


@parametrized("scripts_not_covered")
def test_what_is_left_out_of_a_script(predict: Predict, places: dict[str, str], expected: list[str]) -> None:
    row = predict(**places)
    assert row["not_covered"] == expected
    assert row["prediction_basis"].startswith("traced: parameters" if expected else "exact: parameters")


@pytest.mark.parametrize(
    "built", ["f = torch.compile(net)", "net.compile(fullgraph=True)", "f = torch.compile(lambda x: net(x))"]
)
def test_compiled_code_is_predicted_as_eager(predict: Predict, built: str) -> None:
    eager, compiled = predict(), predict(built=built)
    assert compiled["not_covered"] == ["compiled_code"]
    assert {k for k in eager if eager[k] != compiled[k]} == {"not_covered", "prediction_basis"}


def test_flex_attention_keeps_no_scores(predict: Predict) -> None:
    imported = "from torch.nn.attention.flex_attention import flex_attention"
    row = predict(before=imported, built="f = lambda x: flex_attention(*[net(x)[None, None]] * 3)")
    assert row["not_covered"] == ["compiled_code"]
    assert 0 < row["peak_allocated_bytes"] - predict()["peak_allocated_bytes"] < 512 * 512 * 4


PLAIN = dict(literal_cases("plain_scripts"))


@pytest.mark.slow
@pytest.mark.parametrize("places", PLAIN.values(), ids=PLAIN)
def test_nothing_is_left_out_of_plain_scripts(predict: Predict, places: dict[str, str]) -> None:
    row = predict(**places)
    assert row["not_covered"] == [] and row["prediction_basis"].startswith("exact: parameters")
