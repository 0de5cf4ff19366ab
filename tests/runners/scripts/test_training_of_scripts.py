"""Whether a script trains and grows, predicted: counted by hand for faulty scripts, and nothing for plain ones."""

from pathlib import Path

import commands
import pytest
from conftest import literal_cases, source

from vramsweep.harness.rows.quality_flags import flags
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import make_trace, predicted_row
from vramsweep.runners.scripts import traced_script

SCRIPTS = {name: rest for name, *rest in literal_cases("training_of_scripts")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_whether_a_script_trains_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(traced_script, "CARDLESS", ())  # takes seconds, and no script here uses it
    before, step, untrained, flagged = SCRIPTS[name]
    (tmp_path / "train.py").write_text(source("loop_of_a_head.txt").format(before, step))
    device = {"name": "simulated", "gpu": "a100-40gb"}
    trial = trial_parser.parse(commands.command(f"PYTHON {tmp_path / 'train.py'}", device=device))
    found = make_trace.trace_trial(trial, trial.device.card, tmp_path, traced_script)
    row = predicted_row.predict(trial, *found).columns | {"device": "simulated"}
    assert (row["parameters_without_gradient"], flags(row)) == (untrained, flagged)
    assert row["trainable_parameters"] == (3 * 65 * 64 if name == "experts in turn" else 8 * 65 * 64 + 65 * 10)
    each = ((1 + 8) * (8 << 20) + 10 * (4 << 15)) * (name == "kept")  # each step's input, eight layers' results, output
    assert row["step_growth_bytes"] == each
    full = row["full_after_steps"]
    assert full is None if not each else 0 <= row["memory_limit_bytes"] - full * each < 2 * each
