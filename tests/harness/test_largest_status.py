"""The exit status of `predict --largest`."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import tiny

from vramsweep.harness import largest, trial
from vramsweep.harness.plan import Planned

FITS: dict[str, Any] = {"largest": 8, "looked_at": 9, "unanswered": 0}
NONE_FITS = FITS | {"largest": None}
UNKNOWN = NONE_FITS | {"looked_at": 0, "unanswered": 9}


@pytest.mark.parametrize(
    ("found", "status"),
    [([FITS], 0), ([FITS, NONE_FITS], 0), ([NONE_FITS], 0), ([UNKNOWN], 1), ([FITS, UNKNOWN], 1)],
)
def test_it_is_1_where_something_is_not_known(
    found: list[dict[str, Any]], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    parsed = trial.parse(tiny())
    item = Planned("0", parsed.model_dump(mode="json"), parsed, None)
    assert largest.show([(item, one) for one in found], "seq_len", as_json=True) == status
    assert capsys.readouterr().out.count('"looked_at"') == len(found)
