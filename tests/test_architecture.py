"""The import rules of the design, read off the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

OWN = ("harness", "runners", "analysis", "hydra_plugins", "vramsweep")
FILES = sorted(path for package in OWN for path in (ROOT / package).rglob("*.py"))
SHIM = "vramsweep.alias"  # what a folder's __init__ says about its short name


def imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever it does so."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    assert not {n.split(".")[0] for n in names} & {"harness", "runners", "analysis"}, f"{path}: not by its whole name"
    return {name.removeprefix("vramsweep.") for name in names if not name.startswith(SHIM)} - {"vramsweep"}


# what analysis may take of the harness
OF_HARNESS = """
    allocator check command console efficiencies errors files flags gpus inferred interpreter journal mistakes names
    others outputs parsers plain_json repeats row techniques terminal trial units
"""


def tops(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    found = tops(path)
    if package == "vramsweep":  # the front door, which alone knows both sides
        own = {file.stem for file in (ROOT / "vramsweep").glob("*.py")}
        assert not found - {"harness", "analysis", "runners", "__version__", *own} - set(sys.stdlib_module_names)
        return
    if package != "runners":
        assert not found & {"torch", "transformers", "deepspeed", "accelerate", "runners"}
    if package != "analysis":
        assert "analysis" not in found or path == ROOT / "hydra_plugins" / "vramsweep" / "adaptive.py"  # its search
        assert "plotly" not in found
    elif path.parent.name != "figures":
        assert "plotly" not in found
    of_hydra = [ROOT / "harness" / f"{name}.py" for name in ("launch", "overrides", "completion", "configurations")]
    if path not in of_hydra and package != "hydra_plugins":
        assert not found & {"hydra", "omegaconf"}
    if package in ("analysis", "runners"):
        assert not found & {"hydra", "hydra_plugins"}
    if package == "analysis":
        assert {n.split(".")[1] for n in imports(path) if n.startswith("harness.")} <= set(OF_HARNESS.split())


ROOMS = ("data", "model", "compare", "answers", "figures", "report")


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.parent == ROOT / "analysis"], ids=lambda p: p.stem)
def test_rooms_of_analysis_import_one_way(path: Path) -> None:
    used = {name.split(".")[1] for name in imports(path) if name.startswith("analysis.")}
    assert used <= set(ROOMS[: ROOMS.index(path.parent.name) + 1])


PURE = ("outcome", "row", "plan", "trial", "gpus", "links", "others", "roofline", "variables", "credentials")
PURE += ("bisection", "dominated")


@pytest.mark.parametrize("name", PURE)
def test_the_pure_core_starts_nothing(name: str) -> None:
    assert not tops(ROOT / "harness" / f"{name}.py") & {"subprocess", "os", "time", "psutil", "pynvml"}


def test_there_are_files_to_check() -> None:
    assert len(FILES) > 25


def test_a_module_has_one_copy_whatever_it_is_called() -> None:
    code = (
        "import harness.trial, analysis, runners.worker, vramsweep.harness.trial as t, vramsweep.runners.worker as w\n"
        "from harness import gpus; import vramsweep.harness.gpus as g, sys\n"
        "assert harness.trial is t and runners.worker is w and gpus is g and harness.trial.Trial is t.Trial\n"
        "assert t.__name__ == t.__spec__.name == 'vramsweep.harness.trial'\n"
        "own = [str(getattr(m, '__file__', '')) for m in set(sys.modules.values())]\n"
        "files = [file for file in own if file.startswith(sys.argv[1])]\n"
        "assert len(files) == len(set(files)) > 5, files"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_scripts_of_benchmarks_know_the_registry() -> None:
    """They run by hand, so a renamed runner or template would be noticed on the day that they are needed."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        places = [str(ROOT / "benchmarks"), str(ROOT / "tests")]
        code = f"import sys; sys.path[:0] = {places!r}; import {path.stem} as b\n"
        if path.stem == "sharded_check":
            code += "why = [b.impossible(case) for case in b.CASES]\n"
            code += "assert all(text is None or 'not installed' in text for text in why), why\n"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (path.name, done.stderr)
