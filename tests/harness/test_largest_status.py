"""The exit status of `predict --largest`."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import tiny

from vramsweep.harness import largest, trial
from vramsweep.harness.plan import Planned

FITS: dict[str, Any] = {
    "largest": 8, "all_up_to": 8, "looked_at": 9, "unanswered": 0, "of": 20, "margin": 0.0157, "complete": True,
    "trace_basis": "symbolic",
}  # fmt: skip
NONE_FITS = FITS | {"largest": None, "all_up_to": None}
TOO_LARGE = NONE_FITS | {"looked_at": 0}
UNKNOWN = TOO_LARGE | {"unanswered": 9}


@pytest.mark.parametrize(
    ("found", "status"),
    [([FITS], 0), ([FITS, NONE_FITS], 0), ([NONE_FITS], 0), ([TOO_LARGE], 0), ([UNKNOWN], 1), ([FITS, UNKNOWN], 1)],
)
def test_it_is_1_where_something_is_not_known(
    found: list[dict[str, Any]], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = trial.parse(tiny())
    item = Planned("0", parsed.model_dump(mode="json"), parsed, None)
    assert largest.show([(item, one) for one in found], "seq_len", as_json=True) == status
    assert capsys.readouterr().out.count('"looked_at"') == len(found)


@pytest.mark.parametrize(
    ("found", "told"), [(FITS, "8"), (NONE_FITS, "none"), (TOO_LARGE, "none"), (UNKNOWN, "unknown")]
)
def test_the_table_tells_what_does_not_fit_from_what_is_not_known(
    found: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = trial.parse(tiny(device={"name": "simulated", "gpu": "a100-80gb"}))
    largest.show([(Planned("0", parsed.model_dump(mode="json"), parsed, None), found)], "seq_len", as_json=False)
    printed = capsys.readouterr().out
    assert printed.count(f" {told} ") == 2
    assert "by at least 1.6%" in " ".join(printed.split())
