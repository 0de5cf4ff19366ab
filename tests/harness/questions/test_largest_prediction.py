"""The exit status of `predict --largest`."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS, TARGETS, refusal, tiny
from launchers import Still

from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.attempt import AttemptResult
from vramsweep.harness.process.worker_files import ANSWER
from vramsweep.harness.questions import largest_prediction
from vramsweep.harness.rows.outcome import Evidence
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.sweep.plan import Planned, Settings
from vramsweep.harness.verbs import predict

FITS: dict[str, Any] = {
    "largest": 8, "all_up_to": 8, "looked_at": 9, "unanswered": 0, "of": 20, "margin": 0.0157, "complete": True,
    "trace_basis": "symbolic", "reason": None,
}  # fmt: skip
NONE_FITS = FITS | {"largest": None, "all_up_to": None}
TOO_LARGE = NONE_FITS | {"looked_at": 0}
UNKNOWN = TOO_LARGE | {"unanswered": 9}
REFUSED = largest_prediction.NO_ANSWER | {"reason": "cannot be simulated"}


def planned(**over: Any) -> Planned:
    parsed = trial_parser.parse(tiny(device={"name": "simulated", "gpu": "a100-80gb"}, **over))
    return Planned(str(over), parsed.model_dump(mode="json"), parsed, None)


@pytest.mark.parametrize(
    ("found", "status"),
    [([FITS, NONE_FITS], 0), ([TOO_LARGE], 0), ([UNKNOWN], 1), ([FITS, UNKNOWN], 1), ([FITS, REFUSED], 1)],
)
def test_it_is_1_where_something_is_not_known(
    found: list[dict[str, Any]], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict.show_edges([(planned(), one) for one in found], "seq_len", as_json=True) == status
    assert capsys.readouterr().out.count('"looked_at"') == len(found)


@pytest.mark.parametrize(
    ("found", "told"), [(FITS, "8"), (NONE_FITS, "none"), (TOO_LARGE, "none"), (UNKNOWN, "unknown")]
)
def test_the_table_tells_what_does_not_fit_from_what_is_not_known(
    found: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    predict.show_edges([(planned(), found)], "seq_len", as_json=False)
    printed = capsys.readouterr().out
    assert f"longest sequence that fits: {told}" in printed
    assert "more than 1.6 % to spare" in " ".join(printed.split())


def test_peaks_and_gaps_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = {"peak_reserved_bytes": 40 << 30, "peak_reserved_most_bytes": 44 << 30}
    predict.show_edges([(planned(), FITS | peaks)], "seq_len", as_json=False, last=8)
    line = "longest sequence that fits: 8 tokens, the largest value requested (peak 40.0 to 44.0 of 78.4 GiB)"
    assert line in capsys.readouterr().out
    predict.show_edges([(planned(), FITS | {"all_up_to": None})], "micro_batch", as_json=False)
    printed = capsys.readouterr().out
    assert "largest batch that fits: 8 samples per GPU\n  all fit up to: none" in printed


class Answers(Still):
    """Its attempts answer for some trials, and end without a word for another."""

    def __init__(self, silent: str = "") -> None:
        super().__init__()
        self._silent = silent

    def attempt(self, spec: Any, folder: Path, environ: Any, runner: str, *rest: Any) -> AttemptResult:
        folder.mkdir(parents=True)
        if spec["trials"][0]["trial_id"] != self._silent:
            (folder / ANSWER).write_text(json.dumps({one["trial_id"]: FITS for one in spec["trials"]}))
        return AttemptResult(Evidence(exit_code=-9), 1.0, "warm")


def find(items: list[Planned], folder: Path, silent: str = "") -> list[Any]:
    settings = Settings(**SETTINGS)
    found = largest_prediction.predict_edges(items, settings, folder, Answers(silent), "seq_len", range(1, 2001), False)  # type: ignore[arg-type]
    assert [item for item, _ in found] == items
    return [answer["reason"] for _, answer in found]


def test_what_cannot_be_asked_does_not_keep_others_from_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unlisted = tiny(device={"name": "simulated", "gpu": "t5"})
    refused = Planned("no", unlisted, None, "device.gpu is t5, which is not listed")
    short = planned(model={"max_positions": 100})
    dies = planned(runner={"name": "custom", "target": f"{TARGETS / 'simulated_faults.py'}:fine"})
    assert dies.trial is not None
    reasons = find([planned(), refused, short, dies], tmp_path, silent=dies.trial_id)
    assert reasons[:2] == [None, "device.gpu is t5, which is not listed"]
    assert reasons[2] == "seq_len goes up to 2000, but tiny has only 100 positions; stop there"
    assert "say more" in reasons[3]
    labels = [
        "tiny · torch · default · t5",
        "tiny · torch · batch 2 · fp32 · default · a100-80gb",
        "tiny · custom · batch 2 · fp32 · default · a100-80gb",
    ]
    said = [f"not searched: {label}: {reason}" for label, reason in zip(labels, reasons[1:], strict=True)]
    assert said == capsys.readouterr().err.splitlines()
    assert "--largest seq_len: device.gpu is t5" in refusal(UserError, find, [refused, short], tmp_path)


def test_lengths_that_vary_and_commands_are_refused() -> None:
    simulated = {"name": "simulated", "gpu": "l4-24gb"}
    script = {"name": "script", "command": "true {seq_len} {micro_batch}"}
    way = "predict its trials instead: seq_len=512,1024,..."
    ways = {
        way: {"data": "lengths:lognormal(64,1)"},
        "vramsweep run --largest seq_len ... -- COMMAND": {"runner": script},
    }
    for way, over in ways.items():
        reason, allowed = largest_prediction._within(
            trial_parser.parse(tiny(device=simulated, **over)), "seq_len", range(1, 9)
        )
        assert not allowed and reason is not None and way in reason
