"""Known differences of transformers' versions, against what small models held in a step by those versions' own code."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, custom, tiny
from conftest import cases as table
from transformers import LlamaConfig, LlamaForCausalLM, MptConfig, MptModel
from upstream_memory import CASES, CONFIGS, held

from vramsweep.harness.spec import trial, trial_parser
from vramsweep.runners.trace.version_patches import install

pytestmark = pytest.mark.deterministic

RECORDED = {
    one["transformers"]: one["held"]
    for one in map(json.loads, (ROOT / "tests" / "data" / "upstream_memory.jsonl").read_text().splitlines())
}
SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}
QUICK = {("4.48.1", "llama"), ("4.41.2", "gpt2")}
TOLERANCE = 0.008  # of the whole: sines of one row in each layer, positions and masks of booleans, in models this small
# Versions of code that nobody has modelled, and how far the step's peak is off.
OPEN = {(version, model, case): why for version, model, case, why in table("open_differences_of_transformers")}
SCORES = {"phi", "gpt_bigcode"}  # models whose own attention before 4.48 makes scores in other precisions


def cases(version: str, model: str) -> dict[str, list[int]]:
    """Return the recorded cases, without the cache of checkpointed layers, which only GPTBigCode kept."""
    return {
        name: recorded
        for name, recorded in RECORDED[version][model].items()
        if recorded is not None and (name != "cache and checkpoints" or model == "gpt_bigcode")
    }


def chosen(version: str, model: str, case: dict[str, bool]) -> trial.Trial:
    both = case.get("cache") and case.get("checkpoints")  # only versions whose Trainer left the cache on have that
    return trial_parser.parse(
        tiny(
            runner={"name": "trainer" if both else "torch"},
            model={"name": "old", "model_type": model},
            device=SIMULATED,
            precision="bf16_pure",
            versions={"transformers": version},
            padding=0.2 if case.get("padding") else 0.0,
            attention="eager" if case.get("eager") else "sdpa",
            use_cache="default" if both else "on" if case.get("cache") else "off",
            checkpointing="full" if case.get("checkpoints") else "none",
        )
    )


def test_a_difference_is_listed_once_its_code_has_run() -> None:
    with install.applied(chosen("4.40.0", "llama", {})) as applied:
        assert not applied
        net = LlamaForCausalLM(LlamaConfig(**CONFIGS["llama"]))
        assert list(applied) == ["llama_rotary_tables"]
        net.model(torch.zeros(1, 8, dtype=torch.long))
    with_forward = {"llama_rotary_tables", "llama_rotary_by_layer", "additive_mask", "repeated_heads"}
    assert set(applied) == with_forward  # fp32_logits and shifted_logits are of the loss


@pytest.mark.parametrize(
    ("version", "model"),
    [
        *sorted(QUICK),
        *(pytest.param("4.41.2", one, marks=pytest.mark.slow) for one in ("clip", "bart", "opt", "gpt_neox")),
    ],
)
def test_a_model_of_the_user_s_code_holds_what_that_version_s_own_code_held(version: str, model: str) -> None:
    """Whatever model the trial names, the differences of the one that runs take effect."""
    values: dict[str, Any] = {"device": SIMULATED, "versions": {"transformers": version}}  # its model is qwen2
    unread: list[str] = []
    with install.applied(trial_parser.parse(custom("train", **values)), lambda _, kind: unread.append(kind)):
        known = {name: then for name, then in cases(version, model).items() if (version, model, name) not in OPEN}
        found = {name: held(model, **CASES[name])[-1] for name in known}
        assert not unread
        MptModel(MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=8))
    assert found == pytest.approx({name: then[-1] for name, then in known.items()}, rel=0.002)
    assert unread == ["mpt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "model"),
    [
        pytest.param(version, model, marks=() if (version, model) in QUICK else pytest.mark.slow)
        for version, models in RECORDED.items()
        for model in models
        if cases(version, model)
    ],
)
def test_a_step_holds_what_that_version_s_own_code_held(version: str, model: str) -> None:
    off: dict[str, str] = {}
    for name, recorded in cases(version, model).items():
        if model in SCORES and (name == "eager" or version == "4.38.2"):
            continue
        with install.applied(chosen(version, model, CASES[name])) as applied:
            found = held(model, **CASES[name])
        if (found != pytest.approx(recorded, rel=TOLERANCE)) is not ((version, model, name) in OPEN):
            off[name] = f"found {found}, recorded {recorded}, by {applied}"
    assert not off


if __name__ == "__main__":  # the figures of docs/real_ranks.md: errors of the step's peak, all of them
    with_them, without = [], []
    for version, models in RECORDED.items():
        for model in models:
            for name, recorded in cases(version, model).items():
                without.append(held(model, **CASES[name])[-1] / recorded[-1] - 1)
                with install.applied(chosen(version, model, CASES[name])):
                    with_them.append(held(model, **CASES[name])[-1] / recorded[-1] - 1)
    for title, errors in (("with", np.abs(with_them)), ("without", np.abs(without))):
        within = (errors <= 0.001).sum()
        print(
            f"{title} differences: {len(errors)} peaks, median {np.median(errors):.3%}, 90th percentile "
            f"{np.quantile(errors, 0.9):.1%}, worst {errors.max():.0%}, {within} within 0.1 %"
        )
