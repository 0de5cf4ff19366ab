"""What is installed: locked*.txt have hashes for just what constraints.txt pins; the container fits pyproject.toml.

Not covered: building the container.
"""

import re
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT, refusal
from packaging.specifiers import SpecifierSet

LOCKS = ("locked.txt", "locked-built.txt", "locked-techniques.txt")
UNLOCKED = {"torch"}  # which build it is, CPU or CUDA, is the index's choice (Makefile)
PIN = re.compile(r"([\w.-]+)==([\w.!+-]+)(?: ; [^\\]+)?(?P<hashes>(?: \\\n    --hash=sha256:[0-9a-f]{64}(?![^\s]))*)\n")


def called(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(name: str) -> dict[str, str]:
    """Return the pins of a locked file; each line must be a comment, a pin, or the hash of the pin above it."""
    text = "".join(line for line in (ROOT / name).read_text().splitlines(True) if not line.startswith("#"))
    pins = list(PIN.finditer(text))
    assert "".join(pin[0] for pin in pins) == text, f"{name} holds something else"
    assert [pin[1] for pin in pins if not pin["hashes"]] == [], f"without a hash in {name}"
    return {called(pin[1]): pin[2] for pin in pins}


def test_every_pin_is_locked_and_nothing_else() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {called(name): version for name, version in pinned.items()}
    found: dict[str, str] = {}
    for name in LOCKS:
        own = locked(name)
        assert not found.keys() & own.keys(), f"locked twice: {found.keys() & own.keys()}"
        found |= own
    assert found == {name: version for name, version in pinned.items() if name not in UNLOCKED}, "see `make lock`"


def test_a_shortened_hash_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "locked-built.txt").read_text()
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "locked-built.txt").write_text(text[:-2] + "\n")
    assert "something else" in refusal(AssertionError, locked, "locked-built.txt")


def test_the_set_up_installs_them_all_by_their_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"$(LOCKED) {name}" in makefile for name in LOCKS)
    assert re.search(r"^LOCKED = .*--require-hashes", makefile, re.MULTILINE)
    assert set(LOCKS) == {path.name for path in ROOT.glob("locked*.txt")}


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
