"""The fixture `predicted`, used as somebody's own test would."""

import pytest
from conftest import refusal

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.verbs.pytest_plugin import Predicted, predicted

__all__ = ["predicted"]
WORDS = ("model=tiny", "seq_len=32,64", "device.gpu=rtx4090-24gb")


@pytest.mark.slow
@pytest.mark.deterministic
def test_rows_are_predictions_a_limit_fails_the_test_and_mistakes_are_one_line(predicted: Predicted) -> None:
    rows = predicted(*WORDS, max_reserved="1GiB")
    assert {row["seq_len"]: row["outcome"] for row in rows} == {32: "ok", 64: "ok"}
    assert {row["device"] for row in rows} == {"simulated"}
    most = max(row["peak_reserved_bytes"] for row in rows)
    with pytest.raises(pytest.fail.Exception, match=r"2 of 2 trials reserve more than [\d.]+ MiB; tiny"):
        predicted(*WORDS, max_reserved=f"{(most >> 20) - 2}MiB")
    assert "of 2 trials reserve" in refusal(pytest.fail.Exception, predicted, *WORDS, max_reserved=f"{most - 1}B")
    assert len(predicted(*WORDS, max_reserved=f"{most}B")) == len(rows) == 2
    with pytest.raises(UserError, match=r"'25165824' has no unit; .*25165824B"):
        predicted(*WORDS, max_reserved="25165824")
    assert "batch" in refusal(UserError, predicted, "model=tiny", "micro_batch=0")
    assert "--largest makes none" in refusal(UserError, predicted, "--largest", "seq_len", "model=tiny")
