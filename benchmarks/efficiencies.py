"""Make the factors of speed that ship (harness/hardware/efficiencies.json) from readings of benchmarks/validate.py.

python benchmarks/efficiencies.py results/reference/validation/readings.json harness/hardware/efficiencies.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import speed_factors as speed
import validation

from vramsweep.harness.files import outputs
from vramsweep.harness.hardware.roofline import ANY, Efficiency


def other_cards(readings: pd.DataFrame, of: str) -> pd.Series[float]:
    """Return relative errors of this kind's readings by the factors of all other GPUs; NaN without another GPU."""
    same = readings[readings["kind"].eq(of)]
    found = pd.Series(np.nan, index=same.index)
    for gpu in same["gpu"].unique():
        own, rest = same[same["gpu"].eq(gpu)], same[same["gpu"].ne(gpu)]
        if len(rest):
            known = speed.factors(rest, speed.START, speed.LOOSE)
            found[own.index] = speed.predicted(own, known) / own["measured"].to_numpy(float) - 1
    return found


def efficiencies(readings: pd.DataFrame) -> list[Efficiency]:
    """Return the factors to ship: for each GPU and kind with readings, and for all GPUs together.

    Errors of a GPU's factors come from leaving out each source of its readings in turn. Errors of the factors of all
    GPUs come from predicting each GPU with the factors of the others.
    """
    judged = speed.left_out(readings)
    made = []
    for of in sorted(readings["kind"].unique()):
        same = judged[judged["kind"].eq(of)]
        for gpu in (*sorted(same["gpu"].unique()), ANY):
            mine = same if gpu == ANY else same[same["gpu"].eq(gpu)]
            known = speed.factors(same, speed.START, speed.LOOSE) if gpu == ANY else speed.of_card(readings, gpu, of)
            off = (other_cards(readings, of) if gpu == ANY else mine["calibrated"]).dropna().abs()
            assert known is not None
            rounded = tuple(round(float(one), 3) for one in known[:-1])
            sources = tuple(sorted(mine["title"].unique()))
            error, spread = (None if off.empty else round(float(off.quantile(q)), 3) for q in (0.5, 0.9))
            host = round(float(known[-1]), 8)
            made.append(Efficiency(str(gpu), str(of), rounded, host, len(mine), sources, error, spread))
    return made


def write(readings: pd.DataFrame, out: Path) -> None:
    """Write the file that harness/hardware/roofline.py reads."""
    lines = ",\n".join(f" {json.dumps(asdict(one))}" for one in efficiencies(readings))
    outputs.write(out, f"[\n{lines}\n]\n")


def main(readings: Path, out: Path) -> int:
    """Write the factors made from the file `readings` to `out`."""
    found = validation.load(readings).readings
    write(speed.readings(found[~found["again"]]), out)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
