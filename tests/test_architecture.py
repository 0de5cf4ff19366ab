"""The import rules of the design, read off the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import ROOT

OWN = ("harness", "runners", "analysis", "hydra_plugins")
FILES = sorted(path for package in OWN for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever it does so."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    found = tops(path)
    if package != "runners":
        assert not found & {"torch", "transformers", "deepspeed", "accelerate", "runners"}
    if package != "analysis":
        assert "analysis" not in found
        assert "plotly" not in found
    elif not path.name.startswith("figures"):
        assert "plotly" not in found
    if path not in (ROOT / "harness" / "sweep.py", *(ROOT / "hydra_plugins").rglob("*.py")):
        assert not found & {"hydra", "omegaconf"}
    if package in ("analysis", "runners"):
        assert not found & {"hydra", "hydra_plugins"}
    if package == "analysis":
        allowed = {"harness.allocator", "harness.row", "harness.journal", "harness.errors", "harness.gpus"}
        used = {".".join(n.split(".")[:2]) for n in imports(path) if n.startswith("harness.")}
        assert used <= allowed


@pytest.mark.parametrize("name", ["outcome", "row", "plan", "trial", "gpus", "roofline"])
def test_the_pure_core_starts_nothing(name: str) -> None:
    assert not tops(ROOT / "harness" / f"{name}.py") & {"subprocess", "os", "time", "psutil", "pynvml"}


def test_there_are_files_to_check() -> None:
    assert len(FILES) > 25
