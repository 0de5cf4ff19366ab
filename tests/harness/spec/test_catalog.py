"""The registry of techniques: it is whole, everything that follows from it does, and what cannot be says why."""

import json
import tomllib
from typing import Any

import pytest
from conftest import ROOT, Cli, cases, refusal, tiny
from omegaconf import OmegaConf
from packaging.version import Version

from vramsweep.analysis.data import groups
from vramsweep.harness.config import compose  # noqa: F401
from vramsweep.harness.rows import schema
from vramsweep.harness.spec import runner_table, trial_identity, trial_parser
from vramsweep.harness.spec import trial as trials
from vramsweep.harness.spec.shardings import SHARDINGS
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.techniques.catalog import AXES, TECHNIQUES, Package, Technique
from vramsweep.harness.spec.trial import InvalidTrial
from vramsweep.runners.rank.entry_modules import import_entry

CONFIG = OmegaConf.load(ROOT / "conf" / "config.yaml")  # whose values harness.config.compose resolves
RUNNERS = {runner.name for runner in runner_table.RUNNERS}
SETTINGS = {*trials.Trial.model_fields}
HOOKS = {"around", "construct", "pretrained", "model", "optimizer", "stepping"}


@pytest.mark.parametrize("axis", AXES, ids=lambda axis: axis.name)
def test_an_axis_is_a_field_a_column_a_setting_and_tells_groups_apart(axis: catalog.Axis) -> None:
    field = trials.Trial.model_fields[axis.name]
    assert field.annotation is axis.kind
    assert schema.BY_NAME[axis.name].type is axis.kind and schema.BY_NAME[axis.name].group == "axes"
    assert axis.name in groups.ASKED
    if axis.default is None:
        assert field.is_required()
        return
    assert field.default == axis.default == CONFIG[axis.name] == trial_identity.ID_DEFAULTS[(axis.name,)]
    if values := catalog.values(axis.name):
        assert axis.default in values
    if axis.of is not None:
        assert set(axis.of[1]) <= set(catalog.values(axis.of[0]))


@pytest.mark.parametrize("entry", TECHNIQUES, ids=str)
def test_an_entry_names_what_exists(entry: Technique) -> None:
    assert entry.axis in {axis.name for axis in AXES}
    assert len([e for e in TECHNIQUES if str(e) == str(entry)]) == 1
    assert set(entry.runners or ()) <= RUNNERS and set(entry.checked) <= {"cpu", "simulated", "gpu"}
    assert set(entry.shardings or ()) <= {sharding.name for sharding in SHARDINGS}
    for setting, values, why in entry.excludes:
        assert setting in SETTINGS and values and len(why) > 10
        known = catalog.values(setting)
        assert not known or set(values) <= set(known)
    if entry.module is not None:
        assert HOOKS & set(dir(import_entry(entry.module)))
    if catalog.DEFAULTS.get(entry.axis) != entry.name and entry.axis != "precision":
        assert entry.checked, "no test looks at it"


def test_every_precision_has_its_option() -> None:
    options = {path.stem for path in (ROOT / "conf" / "precision").glob("*.yaml")}
    assert options == set(catalog.values("precision"))


def test_one_extra_brings_what_all_techniques_need_and_no_kernel_has_to_be_built_for() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["techniques"]
    least: dict[str, str] = {}
    for package in (package for entry in TECHNIQUES for package in entry.packages):
        least[package.name] = max(package.least, least.get(package.name, "0"), key=Version)
    built = {"flash-attn", "gptqmodel", "optimum", "triton"}  # triton comes with torch's CUDA builds, and with Liger
    assert sorted(extra) == sorted(f"{name}>={version}" for name, version in least.items() if name not in built)


def entry_of(monkeypatch: pytest.MonkeyPatch, **over: Any) -> None:
    """One more optimizer."""
    values: dict[str, Any] = {"axis": "optimizer", "name": "test", "meaning": "m", **over}
    monkeypatch.setitem(catalog._BY_AXIS["optimizer"], "test", Technique(**values))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"packages": (Package("no-such-package", "1.2"),)}, "pip install 'no-such-package>=1.2'"),
        ({"packages": (Package("torch", "99.0"),)}, "at least 99.0, and "),
        ({"runners": ("deepspeed",)}, "optimizer=test needs runner=deepspeed, not torch"),
        ({"shardings": ("zero2", "zero3")}, "needs sharding=zero2 or zero3, not none"),
        ({"excludes": (("device", ("cpu",), "because; use cuda"),)}, "optimizer=test with device=cpu: because; use"),
        ({"rules": (lambda trial: [f"length {trial.seq_len}"],)}, "length 32"),
    ],
)
def test_what_an_entry_forbids_is_invalid_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, over: dict[str, Any], message: str
) -> None:
    entry_of(monkeypatch, **over)
    said = refusal(trials.InvalidTrial, trial_parser.parse, tiny(optimizer="test"))
    assert message in said and "\n" not in said


def test_a_prediction_needs_no_package_but_the_card_has_to_be_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_of(monkeypatch, packages=(Package("no-such-package", "1.2"),), capability=(8, 9))

    def on(card: str) -> trials.Trial:
        return trial_parser.parse(tiny(optimizer="test", device={"name": "simulated", "gpu": card}))

    assert on("h100-80gb").optimizer == "test"
    assert "needs compute capability 8.9, and a100-80gb has 8.0" in refusal(trials.InvalidTrial, on, "a100-80gb")


def test_a_custom_target_is_told_what_is_asked_for_and_applies_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_of(monkeypatch, packages=(Package("no-such-package", "1.2"),))
    target = f"{ROOT / 'tests' / 'targets' / 'faults.py'}:good"
    assert trial_parser.parse(tiny(optimizer="test", runner={"name": "custom", "target": target})).optimizer == "test"


def test_a_template_imports_what_the_techniques_of_its_trials_need(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_of(monkeypatch, preload=("colorsys",))
    plain, with_it = (trial_parser.parse(tiny(optimizer=name)) for name in ("default", "test"))
    assert [runner_table.fork_server_name(one) for one in (plain, with_it)] == ["torch", "torch+optimizer=test"]
    assert runner_table.preload("torch+optimizer=test") == (*runner_table.preload("torch"), "colorsys")


def test_unproven_names_what_no_card_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_of(monkeypatch)
    asked = {"optimizer": "test", "checkpointing": "full", "attention": "sdpa_math"}
    assert catalog._BY_AXIS["checkpointing"]["full"].proven
    assert not catalog._BY_AXIS["attention"]["sdpa_math"].proven
    assert catalog.unproven_techniques(trial_parser.parse(tiny(**asked))) == []  # measured on a CPU, which is no card
    of_a_card = trial_parser.parse(tiny(**asked, device={"name": "simulated", "gpu": "h100-80gb"}))
    assert catalog.unproven_techniques(of_a_card) == ["attention=sdpa_math", "optimizer=test"]


def test_the_terminal_lists_every_technique(cli: Cli) -> None:
    shown = cli.run("techniques").out
    assert all(f"  {catalog.text(entry.name)}" in shown for entry in TECHNIQUES)
    (optimizer,) = cli.json("techniques", "optimizer")
    assert [value["name"] for value in optimizer["values"]] == list(catalog.values("optimizer"))
    said = "there is no such setting; did you mean optimizer? `vramsweep techniques` lists"
    assert said in cli.refuse("techniques", "optimiser")


@pytest.mark.parametrize(("settings", "reason"), cases("impossible_techniques"))
def test_what_would_not_do_what_it_says_is_refused(monkeypatch: pytest.MonkeyPatch, settings: str, reason: str) -> None:
    """Whether or not the packages that they need are installed."""
    monkeypatch.setattr(catalog.Package, "missing", lambda package: None)
    assert reason in refusal(InvalidTrial, trial_parser.parse, tiny(**json.loads(settings)))


def test_what_is_like_it_and_possible_is_not() -> None:
    """FSDP1 with adapters, once nothing is in half precision, and under the Trainer, which says what torch needs."""
    values = tiny(
        adapter="lora",
        precision="bf16",
        device={"name": "simulated", "gpu": "a100-80gb"},
        sharding="fsdp1",
        world_size=2,
    )
    for runner in ({"name": "torch", "options": {"use_orig_params": True}}, {"name": "trainer"}):
        trial_parser.parse(values | {"runner": runner})
