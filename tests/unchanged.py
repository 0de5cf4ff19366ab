"""A pytest plugin that keeps results: slow tests do not run again if nothing that they depend on has changed.

A test marked `deterministic` depends only on code, data and packages: it traces, replays, compares tensors on the CPU,
or is torture with a fixed seed. tests/data/passed.json keeps, for each file of such tests, a hash of its inputs and the
tests that passed with them. The inputs are the code of the file and of the tests' helpers, the product's code, DATA,
the platform, its compiler and the installed versions. analysis/, benchmarks/ and SCREENS count only if the file or a
helper reaches them; comments and docstrings never count. `make test-all` skips tests that passed with the same inputs
and keeps those that pass now; `make test-all ALL=1` runs everything.
"""

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "tests" / "data" / "passed.json"
PRODUCT = ("harness", "runners", "vramsweep", "hydra_plugins")
ANALYSIS = ("analysis",)
BENCHMARKS = ("benchmarks",)
# Tests or the product read these at run time. Every file counts for every test.
DATA = ("conf", "results/reference", "tests/data", "tests/targets", "tests/scripts", "pyproject.toml")
SHARED = "../shared/data"  # public data that may lie next to a checkout; some tests read it if it exists
SCREENS = "tests/data/screens"  # golden screens: they change often, and only their own tests read them
UNPINNED = ("triton", "flash-attn", "gptqmodel", "peft", "bitsandbytes", "torchao", "liger-kernel")
DOORS = {"cli", "run_sweep"}  # fixtures of conftest.py that reach the whole product
LENGTH = 16  # hexadecimal digits of a hash


def parse_code(path: Path) -> ast.Module:
    """Return the file's code without docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:] or [ast.Pass()]
    return tree


@cache
def hash_file(path: Path) -> str:
    """Hash a file's bytes; for Python hash its syntax tree, without comments, docstrings and layout."""
    held = ast.dump(parse_code(path)).encode() if path.suffix == ".py" else path.read_bytes()
    return hashlib.sha256(held).hexdigest()


@cache
def hash_folders(*names: str) -> str:
    """Hash every file below these folders, with their names."""
    found = hashlib.sha256()
    for name in names:
        place = ROOT / name
        for path in sorted([place] if place.is_file() else place.rglob("*")):
            apart = path == KEPT or (name != SCREENS and path.is_relative_to(ROOT / SCREENS))
            if path.is_file() and "__pycache__" not in path.parts and not apart:
                found.update(f"{name} {path.relative_to(place)} {hash_file(path)}\n".encode())
    return found.hexdigest()


@cache
def hash_machine() -> str:
    """Hash the platform, its C++ compiler, and the versions of UNPINNED and of the packages in constraints.txt."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # as torch chooses it
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout if compiler else ""
    texts = [platform.system(), platform.machine(), *platform.python_version_tuple()[:2], version.partition("\n")[0]]
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for name in sorted({*pinned, *UNPINNED}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            texts.append(f"{name}=={importlib.metadata.version(name)}")
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@cache
def helpers() -> dict[str, Path]:
    """Return the tests' modules, files of tests included, by the name that others import."""
    return {path.stem: path for path in sorted((ROOT / "tests").rglob("*.py")) if path.name != "conftest.py"}


def find_helpers(path: Path) -> set[Path]:
    """Return the file of tests, and every helper that it reaches by imports."""
    found, new = {path}, {path}
    while new:
        names = {name for file in new for name in _imported(file)}
        new = {helpers()[name] for name in names if name in helpers()} - found
        found |= new
    return found


@cache
def _imported(path: Path) -> frozenset[str]:
    names = set()
    for node in ast.walk(parse_code(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def reaches_analysis(path: Path) -> bool:
    """Return whether a file of tests may run code of analysis/: by an import, a fixture or a command."""
    if DOORS & {node.arg for node in ast.walk(parse_code(path)) if isinstance(node, ast.arg)}:
        return True
    for file in find_helpers(path):
        if any(name.startswith("vramsweep.analysis") for name in _imported(file)):
            return True
        texts = [node.value for node in ast.walk(parse_code(file)) if isinstance(node, ast.Constant)]
        if any(isinstance(text, str) and (text == "vramsweep" or "analysis" in text) for text in texts):
            return True
    return False


def reaches_benchmarks(path: Path) -> bool:
    """Return whether a file of tests or its helpers name or import benchmarks/; the product reads it only if asked."""
    modules = {file.stem for file in (ROOT / "benchmarks").glob("*.py")}
    return any("benchmarks" in file.read_text() or modules & _imported(file) for file in find_helpers(path))


def reaches_screens(path: Path) -> bool:
    """Return whether a file of tests, or one of its helpers, names SCREENS or the module that writes them."""
    return any("screens" in file.read_text() for file in find_helpers(path))


def reaches_shared(path: Path) -> bool:
    """Return whether a file of tests names SHARED, itself or in a helper or benchmark that it imports."""
    found = find_helpers(path)
    names = {name for file in found for name in _imported(file)}
    found |= {file for file in (ROOT / "benchmarks").glob("*.py") if file.stem in names}
    return any(re.search(r"shared\W{1,5}data\b", file.read_text()) for file in found)


@cache
def hash_inputs(path: Path) -> str:
    """Hash everything that the results of a test file depend on."""
    found = {*find_helpers(path), ROOT / "tests" / "conftest.py"}
    parts = sorted(f"{file.relative_to(ROOT)} {hash_file(file)}" for file in found)
    parts += [
        hash_folders(*PRODUCT, *(ANALYSIS if reaches_analysis(path) else ())),
        hash_folders(*DATA, *(BENCHMARKS if reaches_benchmarks(path) else ())),
        hash_folders(*((SCREENS,) if reaches_screens(path) else ())),
        hash_machine(),
        hash_folders(*((SHARED,) if reaches_shared(path) else ())),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:LENGTH]


def read_kept() -> dict[str, dict[str, list[str]]]:
    """Return, for each file of tests and hash of its inputs, the tests that passed with them."""
    found: dict[str, dict[str, list[str]]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return found


def write_kept(passed: Iterable[str], failed: Iterable[str], inputs: Mapping[str, str]) -> None:
    """Keep the tests that passed, with the inputs of their files. Forget tests that failed, results of earlier inputs,
    and files that no longer exist."""
    kept, new = read_kept(), defaultdict[str, set[str]](set)
    for node in passed:
        new[node.partition("::")[0]].add(node.partition("::")[2])
    lost = set(failed)
    for file in {*new, *(node.partition("::")[0] for node in lost)}:
        names = {*kept.get(file, {}).get(inputs[file], ()), *new[file]}
        kept[file] = {inputs[file]: sorted(name for name in names if f"{file}::{name}" not in lost)}
    there = {file: one for file, one in sorted(kept.items()) if (ROOT / file).exists() and any(one.values())}
    KEPT.write_text(json.dumps(there, indent=0, ensure_ascii=False) + "\n")


def find_unchanged() -> set[str]:
    """Return the tests that passed with the present inputs."""
    return {
        f"{file}::{name}"
        for file, results in read_kept().items()
        if (ROOT / file).exists()
        for name in results.get(hash_inputs(ROOT / file), ())
    }


class KeptResults:
    """The plugin: it skips tests that passed with the same inputs (`unchanged`), and keeps those that pass now.

    Inputs are hashed when the session begins, so that files edited during it do not count as those that ran.
    """

    def __init__(self, unchanged: set[str]) -> None:
        self.unchanged = unchanged
        self.passed, self.failed = set[str](), set[str]()
        texts = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
        marked = [path for path, text in texts.items() if "deterministic" in text]
        self.inputs = {path.relative_to(ROOT).as_posix(): hash_inputs(path) for path in marked}

    def pytest_report_header(self) -> str:
        return f"{len(self.unchanged)} slow tests passed with the inputs of now and do not run again; ALL=1 runs all"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if is_kept(item) and item.nodeid in self.unchanged]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in set(left_out)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "kept" in dict(report.user_properties):
            if report.failed:
                self.failed.add(report.nodeid)
            elif report.when == "call" and report.passed:
                self.passed.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and (self.passed or self.failed):
            write_kept(self.passed - self.failed, self.failed, self.inputs)


def is_kept(item: pytest.Item) -> bool:
    """Return whether the test's result is kept: slow, deterministic, and without this checkout's path in its name."""
    return all(map(item.get_closest_marker, ("deterministic", "slow"))) and str(ROOT) not in item.nodeid


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option; its default keeps nothing, and `make test-all` sets it."""
    text = "skip: leave out slow deterministic tests whose inputs have not changed since they passed, and keep results"
    parser.addoption("--unchanged", choices=("run", "skip", "keep"), default="run", help=text + "; keep: run all, keep")


def note_kept(item: pytest.Item) -> None:
    """Mark in a test's report that its result is kept; call it before the test runs."""
    if is_kept(item):
        item.user_properties.append(("kept", True))


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin if the option asks for it."""
    chosen = config.getoption("--unchanged")
    if chosen != "run":
        config.pluginmanager.register(KeptResults(find_unchanged() if chosen == "skip" else set()), "kept-results")
