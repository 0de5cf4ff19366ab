"""Test which differences of earlier versions apply to a trial."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import cases, parametrized, tiny
from packaging.version import Version

from vramsweep.harness.spec import trial, trial_parser, version_differences
from vramsweep.harness.spec.techniques import catalog

SIMULATED = {"name": "simulated", "gpu": "a100-80gb"}


def names(**over: Any) -> set[str]:
    return {
        one.name for one in version_differences.find_differences(trial_parser.parse(tiny(device=SIMULATED, **over)))
    }


def test_ranges_end_where_upstream_s_code_did() -> None:
    before = {"sharding": "zero3", "runner": {"name": "deepspeed"}}
    assert "zero_linear_by_init" in names(versions={"deepspeed": "0.19.3"}, **before)
    assert "zero_linear_by_init" not in names(versions={"deepspeed": "0.19.4"}, **before)
    assert "zero_linear_by_init" not in names(versions={"deepspeed": "0.14.2"})  # no ZeRO-3
    assert names(versions={"transformers": "4.48.0"}) >= {"shifted_logits", "additive_mask"}
    assert not names(versions={"transformers": "4.49.0"}) & {"shifted_logits", "fp32_logits"}


@pytest.mark.parametrize(("model", "last", "first", "settings", "name"), cases("differences_of_transformers"))
def test_a_difference_of_transformers_ends_with_the_version_that_did(
    model: str, last: str, first: str, settings: str, name: str
) -> None:
    """The version that still did it, and the one that did not, as their code says."""
    over = json.loads(settings)
    mine = {"name": "old", "model_type": model}
    assert name in names(model=mine, versions={"transformers": last}, **over)
    assert name not in names(model=mine, versions={"transformers": first}, **over)


@parametrized("trials_without_a_mask")
def test_a_mask_that_nobody_needed_is_made_without_padding_and_cache_only(over: dict[str, Any]) -> None:
    assert "mask_without_padding" not in names(versions={"transformers": "4.57.3"}, **over)


def test_a_model_in_a_local_directory_is_known_by_its_description(tmp_path: Path) -> None:
    def found(model_type: str) -> set[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        mine = {"name": "mine", "path": str(tmp_path), "model_type": None, "config": {}}
        return names(versions={"transformers": "4.40.0"}, model=mine)

    assert {"llama_rotary_tables", "repeated_heads", "shifted_logits"} <= found("llama")
    gpt2 = {"gpt2_own_loss", "gpt2_mask_buffers", "gpt2_without_sdpa", "gpt2_masked_scores", "additive_mask"}
    assert found("gpt2") == gpt2
    assert found("gpt_bigcode") == {"gpt_bigcode_own_loss", "gpt_bigcode_mask_buffer", "gpt_bigcode_always_masked"}
    assert {"mistral_rotary_tables", "mistral_fp32_logits", "additive_mask"} <= found("mistral")
    assert found("mpt") == set()  # nobody has read its code


def test_the_installed_code_is_not_changed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has an old version traces its code; what is to be like it needs nothing more."""
    before: dict[str, Any] = {"sharding": "zero3", "runner": {"name": "deepspeed"}}
    installed = {"deepspeed": "0.14.2", "transformers": "5.0.0"}
    monkeypatch.setattr(version_differences.catalog, "version", installed.get)
    assert "zero_linear_by_init" not in names(**before) | names(versions={"deepspeed": "0.14.0"}, **before)
    assert "additive_mask" in names(versions={"transformers": "4.45.0.dev0"})


def test_torch_s_choice_of_attention_is_by_its_version() -> None:
    """cuDNN first on Hopper from 2.11 on, whatever the dropout until 2.12."""
    kinds = {"flash_first", "any_dropout"}
    assert names(versions={"torch": "2.10.0"}) >= kinds
    assert names(versions={"torch": "2.11.0+cu130"}) & kinds == {"any_dropout"}
    assert not names(versions={"torch": "2.12.0"}) & kinds
    assert not names(versions={"torch": "2.10.0"}, attention="eager") & kinds


def test_a_build_of_the_installed_version_is_not_a_later_one() -> None:
    """`2.13.0+cu130` sorts after `2.13.0+cpu`, and is the same code."""
    installed = Version(str(catalog.version("torch")))
    for build in ("+cu130", "+zzz", ""):
        trial_parser.parse(tiny(device=SIMULATED, versions={"torch": installed.public + build}))
    later = f"{installed.major}.{installed.minor + 1}"
    with pytest.raises(trial.InvalidTrial, match=r"is later than"):
        trial_parser.parse(tiny(device=SIMULATED, versions={"torch": later}))
