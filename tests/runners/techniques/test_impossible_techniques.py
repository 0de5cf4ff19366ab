"""Settings of techniques, data and shardings that would not do what they say: refused before anything starts."""

import json

import pytest
from conftest import cases, refusal, tiny
from traces import SIMULATED

from vramsweep.harness.spec import trial_parser
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import InvalidTrial


@pytest.mark.parametrize(("settings", "reason"), cases("impossible_techniques"))
def test_what_would_not_do_what_it_says_is_refused(monkeypatch: pytest.MonkeyPatch, settings: str, reason: str) -> None:
    """Whether or not the packages that they need are installed."""
    monkeypatch.setattr(catalog.Package, "missing", lambda package: None)
    assert reason in refusal(InvalidTrial, trial_parser.parse, tiny(**json.loads(settings)))


def test_what_is_like_it_and_possible_is_not() -> None:
    """FSDP1 with adapters, once nothing is in half precision, and under the Trainer, which says what torch needs."""
    values = tiny(adapter="lora", precision="bf16", device=SIMULATED, sharding="fsdp1", world_size=2)
    for runner in ({"name": "torch", "options": {"use_orig_params": True}}, {"name": "trainer"}):
        trial_parser.parse(values | {"runner": runner})
