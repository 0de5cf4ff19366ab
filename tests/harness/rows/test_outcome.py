"""Evidence to outcome, as a table."""

from dataclasses import replace
from typing import Any

import pytest
from conftest import literal_cases, parametrized

from vramsweep.harness.rows import outcome as outcomes
from vramsweep.harness.rows.outcome import Evidence, classify, is_answer, is_same_failure, is_verdict, runs_again
from vramsweep.harness.rows.schema import Outcome


def failed(kind: str, message: str) -> Evidence:
    return Evidence(exit_code=1, result={"error": {"type": kind, "message": message}})


CASES = [
    (replace(failed(*error) if error else Evidence(), **evidence), *found)
    for evidence, error, *found in literal_cases("evidence")
] + [
    (failed("vramsweep.harness.spec.trial.InvalidTrial", "word " * 100), "invalid", False, "word word …"),
    (failed("builtins.ValueError", "x" * 500), "crash", False, "x" * 390),
]


@pytest.mark.parametrize(("evidence", "outcome", "again", "reason"), CASES)
def test_evidence(evidence: Evidence, outcome: str, again: bool, reason: str) -> None:
    kind, text = classify(evidence)
    assert kind == outcome
    assert outcomes.is_retryable(kind, evidence) is again
    assert (text is None) == (outcome == "ok")
    assert reason in (text or "")
    assert "\n" not in (text or "")


def test_every_outcome_has_its_line() -> None:
    assert sorted(kind.outcome for kind in outcomes.OUTCOMES) == sorted(Outcome)


def test_what_answers_and_what_runs_again() -> None:
    def names(test: object) -> str:
        return " ".join(o for o in Outcome if test(o))  # type: ignore[operator]

    assert names(is_answer) == "ok oom host_oom invalid skipped"
    assert names(lambda o: runs_again(o, asked=False)) == "contended environment skipped"
    wanted = "timeout crash cuda_error contended invalid bad_result environment skipped"
    assert names(lambda o: runs_again(o, asked=True)) == wanted
    assert names(lambda o: not is_verdict(o)) == "contended environment"


def test_a_failure_is_the_same_whatever_numbers_it_names() -> None:
    assert is_same_failure(("crash", "no room at 0x7f01 for 12 bytes"), ("crash", "no room at 0xbeef for 7 bytes"))
    assert not is_same_failure(("crash", "no room"), ("timeout", "no room"))
    assert not is_same_failure(("crash", "no room"), ("crash", None))


def test_an_outcome_of_a_later_version_is_a_failure_that_may_be_asked_for_again() -> None:
    assert not is_answer("preempted")
    assert is_verdict("preempted")
    assert [runs_again("preempted", asked) for asked in (False, True)] == [False, True]


@parametrized("ends_of_measured_workers")
@pytest.mark.parametrize("complete", [True, False])
def test_a_published_measurement_stands_whatever_becomes_of_its_worker(
    how: dict[str, Any], remarked: str | None, complete: bool
) -> None:
    evidence = Evidence(**how, result={"values": {"peak_allocated_bytes": 1}, "complete": complete})
    assert classify(evidence) == ("ok", None)
    said = outcomes.describe_end(evidence)
    if remarked is None:
        assert said is None
    else:
        assert said and said.startswith("ended after the measured steps") and remarked in said
