"""The smallest scripts of public reports that were once predicted without a word on what is wrong with them."""

import re
from pathlib import Path
from typing import Any

import pytest
from commands import command
from conftest import parametrized, source

from vramsweep.harness.hardware.roofline import total_flops
from vramsweep.harness.rows.quality_flags import flags
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import make_trace, predicted_row
from vramsweep.runners.scripts import traced_script

pytestmark = [pytest.mark.slow, pytest.mark.deterministic, pytest.mark.filterwarnings("ignore")]


@parametrized("fault_cases")
def test_a_faulty_script_says_what_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], words: str, least: int, most: int, row: dict[str, Any], out: str
) -> None:
    """Peaks allocated lie between two hand counts in MiB; `out` is a line that the script prints."""
    name, _, arguments = words.partition(" ")
    (tmp_path / "train.py").write_text(source(f"fault_{name}.txt"))
    device = {"name": "simulated", "gpu": "a100-40gb"}
    trial = trial_parser.parse(command(f"PYTHON {tmp_path / 'train.py'} {arguments}".strip(), device=device))
    found = make_trace.trace_trial(trial, trial.device.card, tmp_path, traced_script)
    columns = predicted_row.predict(trial, *found).columns | {"device": "simulated"}
    about = columns | {"flags": flags(columns), "flops": total_flops(found[0].kernels)}
    assert {key: about[key] for key in row} == row
    peak = columns.get("peak_allocated_bytes") or columns["unlimited_peak_reserved_bytes"]
    assert least <= peak / 2**20 <= most
    assert re.search(out, capfd.readouterr().out)
