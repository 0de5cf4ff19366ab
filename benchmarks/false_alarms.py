"""Print how often each flag of step times is a false alarm: the table in docs/how_measurement_works.md.

    python benchmarks/false_alarms.py        # about twenty seconds

Step times are generated with normal noise, independent or correlated from step to step (AR(1)).
"""

from __future__ import annotations

import argparse

import numpy as np

from vramsweep.harness.rows import step_statistics

STEPS, DEVIATIONS, CARRIED = (10, 50), (0.005, 0.02, 0.08), (0.0, 0.3, 0.6)
SETTLING = 100  # steps before the first that counts


def noise(random: np.random.Generator, rows: int, steps: int, deviation: float, carried: float) -> list[list[float]]:
    """Return `rows` lists of step times around 1, with this standard deviation and lag-one correlation."""
    made = random.normal(size=(rows, SETTLING + steps)) * np.sqrt(1 - carried**2)
    for at in range(1, made.shape[1]):
        made[:, at] += carried * made[:, at - 1]
    found: list[list[float]] = (1 + deviation * made[:, SETTLING:]).tolist()
    return found


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=5000, help="rows of each cell")
    parser.add_argument("--seed", type=int, default=20268)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    print("| steps | correlation | standard deviation | `not_settled` | `odd_end` | `wide_spread` |")
    print("|---:|---:|---:|---:|---:|---:|")
    for steps in STEPS:
        for carried in CARRIED:
            for deviation in DEVIATIONS:
                rows = noise(random, arguments.rows, steps, deviation, carried)
                tests = (step_statistics.is_drifting, step_statistics.outlying_end, step_statistics.is_noisy)
                shares = [100 * np.mean([bool(test(row)) for row in rows]) for test in tests]
                cells = " | ".join(f"{share:.1f} %" for share in shares)
                print(f"| {steps} | {carried:g} | {100 * deviation:g} % | {cells} |", flush=True)


if __name__ == "__main__":
    main()
