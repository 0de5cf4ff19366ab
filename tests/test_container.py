"""The container's recipe fits pyproject.toml and the tree. Not covered: building it."""

import re
import tomllib

from conftest import ROOT
from packaging.specifiers import SpecifierSet

RECIPE = (ROOT / "docs" / "container" / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_its_extra_and_its_python_are_the_project_s() -> None:
    argument = dict(re.findall(r"^ARG (\w+)=(\S+)$", RECIPE, re.MULTILINE))
    assert argument["EXTRA"] in PROJECT["optional-dependencies"]
    assert SpecifierSet(PROJECT["requires-python"]).contains(argument["PYTHON"])
    (said,) = re.findall(r"^# An extra of pyproject.toml: (.*)\.$", RECIPE, re.MULTILINE)
    for extra in re.findall(r"(\w+)(?: \([^)]*\))?(?:;|$)", said):
        assert extra in PROJECT["optional-dependencies"]


def test_what_it_installs_first_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    (names,) = re.findall(r"--constraint constraints\.txt ([a-z ]+)$", RECIPE, re.MULTILINE)
    assert set(names.split()) <= pinned
    assert RECIPE.count("--constraint constraints.txt") == RECIPE.count("pip install")


def test_what_pip_needs_reaches_the_image() -> None:
    kept = (ROOT / "docs" / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    wanted = {line[1:] for line in kept if line.startswith("!")}
    assert all((ROOT / name).exists() for name in wanted)
    linked = {link.resolve().name for link in (ROOT / "vramsweep").iterdir() if link.is_symlink()}
    assert {*linked, "vramsweep", "hydra_plugins", "pyproject.toml", "README.md", "constraints.txt"} <= wanted


def test_the_command_it_runs_is_the_project_s() -> None:
    assert '["vramsweep"]' in RECIPE and "vramsweep" in PROJECT["scripts"]
