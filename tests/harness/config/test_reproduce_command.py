"""A trial, its command, and the same trial again."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from conftest import TARGETS, custom, refusal, tiny
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from vramsweep.harness.config.conf_files import CONF
from vramsweep.harness.config.hydra_values import value
from vramsweep.harness.config.reproduce_command import command
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.sweep import plan

CONF_CUSTOM = "allocator.conf='roundup_power2_divisions:[256:1,512:2,>:8],garbage_collection_threshold:0.6'"
COMMANDS: list[list[str]] = [
    ["seq_len=96"],
    ["model=tiny", "device=cpu", "precision=fp32", "protocol=brief", "repeats=3", "seed=7", "optimizer=sgd"],
    ["device=simulated", "device.gpu=h200", "allocator=expandable", "attention=eager"],
    ["allocator=custom", CONF_CUSTOM, "record=true", "checkpointing=full"],
    ["model=hub", "model.path=\"an org/a model's name\"", "weights=pretrained",
     "data='C:\\a, b=\\${c}: {d}.txt'"],
    ["model=tiny", "model.config.hidden_size=128", "+model.config.rope={theta:1e4,on:[true,null,'x y']}"],
    ["model=tiny", "model.name=mine", "~model.config.tie_word_embeddings", "protocol.warmup_steps=9"],
    ["runner=deepspeed", "sharding=zero3", "offload_param=true", "world_size=2",
     "+runner.options.zero_optimization.stage3_prefetch_bucket_size=5e7", "+runner.options.note='1'"],
    ["runner=trainer", "+runner.options.optim=adafactor", "grad_accum=4"],
    ["runner=custom", f"runner.target={TARGETS / 'faults.py'}:good", "device=cpu", "micro_batch=2"],
    ["seq_len=0", "precision=fp16"],  # impossible, and a row all the same
]  # fmt: skip


def planned(overrides: list[str]) -> plan.Planned:
    """The last repeat's trial, as `vramsweep sweep` plans it."""
    config = OmegaConf.to_container(compose("config", overrides), resolve=True)
    assert isinstance(config, dict)
    values = {str(key): v for key, v in config.items()}
    return plan.expand_trials([values], plan.settings([values]).repeats)[0][-1]


@pytest.mark.slow
def test_the_command_of_a_trial_gives_the_same_trial() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for overrides in COMMANDS:
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
