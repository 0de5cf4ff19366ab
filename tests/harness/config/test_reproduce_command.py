"""A trial, its command, and the same trial again."""

import shlex
from typing import Any

import pytest
from conftest import TARGETS, cases, custom, refusal, tiny
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from vramsweep.harness.config.conf_files import CONF
from vramsweep.harness.config.reproduce_command import command
from vramsweep.harness.config.typed_words import value
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.sweep import plan


def planned(overrides: list[str]) -> plan.Planned:
    """The last repeat's trial, as `vramsweep sweep` plans it."""
    config = OmegaConf.to_container(compose("config", overrides), resolve=True)
    assert isinstance(config, dict)
    values = {str(key): v for key, v in config.items()}
    return plan.expand_trials([values], plan.settings([values]).repeats)[0][-1]


@pytest.mark.slow
def test_the_command_of_a_trial_gives_the_same_trial() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for words in cases("reproduced_commands"):  # the last is impossible, and a row all the same
            overrides = [word.replace("TARGETS", str(TARGETS)) for word in words]
            trial = planned(overrides)
            again = shlex.split(command(trial.resolved, trial.trial_id), comments=True)
            assert again[:4] == ["python", "-m", "vramsweep", "sweep"]
            assert planned(again[4:]).trial_id == trial.trial_id, again


@pytest.mark.slow
@settings(max_examples=20)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists))
def test_any_value_survives_the_command_line(of: Any) -> None:
    override = OverridesParser.create().parse_override(f"x={value(of)}")
    assert OmegaConf.to_container(OmegaConf.create({"x": override.value()}), resolve=True) == {"x": of}


def test_what_a_command_alone_does_not_give_is_said() -> None:
    trial = plan.expand_trials([custom("good")], 1)[0][0]
    (digest,) = trial.resolved["fingerprints"].values()
    assert f"of SHA-256 {digest[:12]}" in command(trial.resolved, trial.trial_id)
    assert "another version" not in command(trial.resolved, trial.trial_id)
    assert "another version" in command(trial.resolved, "0" * 16)


def test_a_key_that_hydra_cannot_read_is_refused() -> None:
    assert "'a.b' of runner.options" in refusal(UserError, command, tiny(runner={"options": {"a.b": 1}}), "")
