"""The short form of the torture: most faults once; the long one is benchmarks/faults.py."""

from pathlib import Path
from random import Random

import pytest
from torture.arena import Arena
from torture.faults import FAULTS, Fault, Missing


@pytest.mark.slow
@pytest.mark.deterministic
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.short], ids=lambda fault: fault.name)
def test_no_row_is_lost_or_doubled_nobody_is_left_and_the_sweep_goes_on(fault: Fault, tmp_path: Path) -> None:
    try:
        count = fault.inject(Arena(tmp_path, Random(20261124)), fault.short)
    except Missing as why:
        pytest.skip(str(why))
    assert count.well and count.injected, (count, *count.said)
