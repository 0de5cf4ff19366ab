"""Fits that rest on a prediction: its shape is taken, and what measured runs differ from it by is fitted."""

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
import synthetic
from conftest import ROOT

from vramsweep.analysis.data.groups import groups
from vramsweep.analysis.data.load import Table, from_frame
from vramsweep.analysis.data.metrics import METRICS, MIB, Metric
from vramsweep.analysis.model import fit_wording
from vramsweep.analysis.model.curves import Array
from vramsweep.analysis.model.fit import Fit, fit_points
from vramsweep.analysis.model.observations import observations
from vramsweep.analysis.model.predictors import Knows, Whole, Wholes
from vramsweep.analysis.model.residual_model import RESIDUAL, excesses
from vramsweep.harness.rows.schema import Row

pytestmark = pytest.mark.deterministic


def fit_beside(measured: Table, predicted: Table, metric: Metric) -> Fit:
    (group,) = groups(measured)
    knows = Knows(Wholes(measured).of(group), Whole(predicted.frame))
    fit = fit_points(observations(group.frame, metric), metric, group, knows=knows)
    assert fit is not None and fit.basis == "prediction" and fit.residual is not None
    return fit


def beside(rows: Sequence[Row], dense: Sequence[Row]) -> Fit:
    return fit_beside(synthetic.table(rows), synthetic.table(dense), METRICS["peak_allocated_bytes"])


def test_a_prediction_beside_three_lengths_gives_the_shape() -> None:
    """Measured is predicted and 200 MiB: found from three lengths, at four times the longest."""
    rows = synthetic.curve((256, 512, 768))
    dense = synthetic.curve(range(128, 4097, 128), device="simulated")
    for row in rows:
        row["peak_allocated_bytes"] += 200 * MIB
        row["load_peak_allocated_bytes"] = None  # nothing but points and the prediction
    fit = beside(rows, dense)
    at = fit.predict(np.array([3072.0]))
    assert at.value[0] == pytest.approx(2 * 2**30 + 3072 * 1_500_000 + 200 * MIB, abs=2 * MIB)
    assert at.new_low[0] <= at.value[0] <= at.new_high[0] and np.isfinite(at.new_high[0])
    said = fit_wording.text(fit)
    assert "measured equals predicted plus 0.20 GiB (a constant" in said


@pytest.mark.slow
def test_each_phase_stands_on_its_own_prediction() -> None:
    """Three lengths, one alone of them made by backward; a prediction that is off by another share in each phase."""
    made = synthetic.curve((128, 512, 1024))
    dense = synthetic.curve(range(128, 1793, 128), device="simulated")
    off = {"load": 0.985, "forward": 0.99, "backward": 1.02, "optimizer": 0.98}
    for row in dense:
        for phase, share in off.items():
            row[f"{phase}_peak_allocated_bytes"] = round(row[f"{phase}_peak_allocated_bytes"] * share)
        row["peak_allocated_bytes"] = max(row[f"{phase}_peak_allocated_bytes"] for phase in off)
    fit = beside(made, dense)
    truth = synthetic.curve((768, 1536, 2048))
    exact = np.array([row["peak_allocated_bytes"] for row in truth], float)
    found = fit.predict(np.array([768.0, 1536, 2048]))
    assert found.value == pytest.approx(exact, rel=0.005)
    assert ((found.new_low <= exact) & (exact <= found.new_high)).all()


@pytest.mark.slow
def test_a_prediction_of_other_lengths_tells_of_them() -> None:
    rows, at, wide = synthetic.curve((256, 512, 768, 1024)), np.array([777.0]), []
    for lengths in (range(128, 1665, 128), range(128, 1665, 1)):
        fit = beside(rows, synthetic.curve(lengths, device="simulated"))
        assert fit.only is (True if lengths.step == 128 else None)
        wide.append(float(fit.predict(at).new_high[0] - fit.predict(at).new_low[0]))
    assert wide[1] < 0.7 * wide[0]


def test_what_one_phase_wavers_tells_of_another() -> None:
    """Three runs: by chance one phase's lie within 1 MiB of a line. The others say that they will not again."""
    tokens, base = np.array([256.0, 768, 2048]), np.array([8e9, 9e9, 12e9])
    chance = base * 1.01 + np.array([1.0, -1, 0]) * MIB
    shares = ((0.01, 0.028, 0.004), (0.02, 0.003, 0.026), (0.03, 0.012, 0.02))
    loose = [(base * (1 + np.array(share)), base) for share in shares]
    exact = [(base * share, base) for share in (0.98, 0.99, 1.02)]

    def spread(others: list[tuple[Array, Array]]) -> float:
        found = excesses(tokens, [(chance, base), *others], 512, RESIDUAL, small=True)[0]
        return float(np.median(found.draws(tokens, base)[1]))

    assert spread(loose) > 50 * MIB > 10 * MIB > spread(exact)
    assert spread([]) < 10 * MIB


READINGS = ROOT / "results" / "reference" / "validation" / "readings.json"


def beside_public(column: str, quantity: str, predicted: str, lengths: list[int]) -> tuple[Fit, pd.DataFrame]:
    """A public sweep under ZeRO-3 of which only these lengths are measured, beside what was predicted of all 20."""
    readings = pd.DataFrame(json.loads(READINGS.read_text())["readings"])
    mine = readings[readings["run"].str.startswith("Qwen 0.5B, length") & readings["quantity"].eq(quantity)]
    mine = mine.assign(seq_len=mine["run"].str.rsplit(" ", n=1).str[1].astype(int))
    both = {
        "measured": mine[mine["seq_len"].isin(lengths)].rename(columns={"measured": column}),
        "predicted": mine.rename(columns={predicted: column}),
    }
    frames = {}
    for name, frame in both.items():
        rows = frame[["seq_len", column]].assign(outcome="ok", micro_batch=1, device="cuda")
        rows[column] = rows[column].round()
        rows["trial_id"] = [f"{name}{s}" for s in rows["seq_len"]]
        frames[name] = from_frame(rows.reset_index(drop=True), name)
    fit = fit_beside(frames["measured"], frames["predicted"], METRICS[column])
    return fit, mine[~mine["seq_len"].isin(lengths)]


def test_three_lengths_of_a_public_run_and_its_prediction_tell_the_other_seventeen() -> None:
    """Without the differences of its versions, which the fit must find as a constant: about 200 MiB below."""
    fit, others = beside_public("peak_active_bytes", "active", "predicted_plain", [64, 586, 1108])
    found = fit.predict(others["seq_len"].to_numpy(float))
    off = np.abs(found.value / others["measured"] - 1)
    assert off.median() < 0.005 and off.max() < 0.02  # of lengths that 8 divides the prediction has another class
    inside = (found.new_low <= others["measured"]) & (others["measured"] <= found.new_high)
    assert inside[others["seq_len"] % 8 != 0].mean() >= 0.9
    lone, longest = fit_points(fit.points, fit.metric), np.array([2048.0])
    assert lone is not None and abs(lone.value(longest)[0] / 14790164480 - 1) > 0.03  # the points alone
    assert lone.predict(longest).new_low[0] < 14790164480
    assert "measured equals predicted plus " in fit_wording.text(fit)


def test_reserved_of_a_public_run_stands_on_its_prediction() -> None:
    """Four lengths; 20 lengths are predicted up to 3 to 8 % low, with jumps that prediction has too."""
    fit, others = beside_public("peak_reserved_bytes", "reserved", "predicted", [168, 691, 1213, 1526])
    found = fit.predict(others["seq_len"].to_numpy(float))
    assert np.abs(found.value / others["measured"] - 1).median() < 0.015
    assert ((found.new_low <= others["measured"]) & (others["measured"] <= found.new_high)).mean() >= 0.85
