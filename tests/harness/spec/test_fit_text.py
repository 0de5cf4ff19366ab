"""Test the sentence that says whether a trial fits."""

from typing import Any

from conftest import parametrized

from vramsweep.harness.questions import fit_prediction
from vramsweep.harness.questions.fit_prediction import find_need
from vramsweep.harness.rows.schema import complete_row
from vramsweep.harness.spec import fit_text
from vramsweep.harness.verbs import plan as plan_verb

GIB = 1 << 30
ROW: dict[str, Any] = {"outcome": "ok", "peak_reserved_bytes": 20 * GIB, "peak_reserved_most_bytes": 24 * GIB}


@parametrized("fit_texts")
def test_a_peak_that_may_rise_to_the_limit_only_probably_fits(low: float, high: float, said: str) -> None:
    assert fit_text.describe_fit(int(low * GIB), int(high * GIB), int(22.5 * GIB)).startswith(said)


def test_the_upper_bound_is_never_below_the_peak() -> None:
    assert fit_text.bound_reserved(7, None) == fit_text.bound_reserved(7, 5) == 7
    assert fit_text.bound_reserved(7, 9) == 9
    assert find_need(complete_row(ROW)) == 24 * GIB
    assert find_need(complete_row(ROW | {"peak_reserved_most_bytes": 19 * GIB})) == 20 * GIB
    full = {"outcome": "oom", "unlimited_peak_reserved_bytes": 90 * GIB}
    assert find_need(complete_row(full)) == 90 * GIB and find_need(complete_row({"outcome": "crash"})) is None


def test_plan_says_of_bounds_what_predict_says() -> None:
    said = fit_text.describe_fit(20 * GIB, 24 * GIB, 24 * GIB)
    assert said.startswith("probably fits: peak reserved 20.0 to 24.0 of 24.0 GiB")
    one = fit_prediction.Prediction("id", "label", "gpu", 24 * GIB, 24 * GIB, True, least_bytes=20 * GIB)
    assert plan_verb.report([one], 1)[1] == f"  label: {said}"
