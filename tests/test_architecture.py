"""Rooms and what each may import, read off the source, and the ways through the code that CONTRIBUTING lists."""

import ast
import builtins
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import followed
import pytest
import structure
from conftest import ROOT, cases, parametrized

MODULES = structure.find_modules(ROOT)
VERSION = "vramsweep.version"
MOST_FILES, MOST_LINES = 25, 500

# A room, its one idea, and the rooms that it may import. The code fits the table; the table is not fitted to the code.
# What `harness` starts as a process, by name, is a room of the runners. Anyone may import the version.
_SHORT = {"h": "harness", "r": "runners", "a": "analysis"}
ROOMS: dict[str, tuple[str, str]] = {}
for _room, _idea, _imports in cases("rooms"):
    ROOMS[_room] = _idea, re.sub(r"\b([hra])/", lambda m: f"{_SHORT[m[1]]}/", _imports.strip("-"))
FILES = sorted(MODULES.values())


@cache
def arrows() -> dict[str, set[str]]:
    return {name: structure.read_targets(path, MODULES) - {name, VERSION} for name, path in MODULES.items()}


def room_path(room: str) -> Path:
    return ROOT / room


def test_a_room_imports_only_what_the_table_says() -> None:
    found = {structure.room_of(name) for name in arrows()}
    assert found == set(ROOMS), "a room is a line of the table"
    wrong = [
        f"{name} imports {target}"
        for name, targets in arrows().items()
        for target in sorted(targets)
        if (room := structure.room_of(name)) != (other := structure.room_of(target))
        and other not in ROOMS[room][1].split()
    ]
    assert not wrong, "\n".join(wrong)


def test_no_line_of_the_table_is_for_nothing() -> None:
    """The table stays as small as the code allows."""
    used = {
        (structure.room_of(name), structure.room_of(target)) for name, targets in arrows().items() for target in targets
    }
    assert not [
        (room, other) for room, (_, others) in ROOMS.items() for other in others.split() if (room, other) not in used
    ]


def test_no_circle_of_modules_and_none_of_rooms() -> None:
    """Modules that the harness starts as processes are data, not imports: `-m` leads to the runners, and not back."""
    assert structure.find_circles(arrows()) == []
    rooms = {room: set(others.split()) for room, (_, others) in ROOMS.items()}
    rooms["harness/process"] -= {"runners/worker"}
    assert structure.find_circles(rooms) == []


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_is_small_and_says_what_it_is_for(room: str) -> None:
    files = list(room_path(room).glob("*.py"))
    assert len(files) <= MOST_FILES
    if room == "vramsweep" or room.startswith("hydra_plugins"):  # the public names, and Hydra's namespace
        return
    body = ast.parse((room_path(room) / "__init__.py").read_text()).body
    assert len(body) == 1 and isinstance(body[0], ast.Expr), "a docstring and nothing else"
    said = str(ast.literal_eval(body[0].value))
    assert re.search(r"In: .*Out: .*must not ", said, re.DOTALL) and len(said.splitlines()) <= 7


def test_a_module_can_be_read_in_one_sitting() -> None:
    assert {
        str(path.relative_to(ROOT)): n for path in FILES if (n := len(path.read_text().splitlines())) > MOST_LINES
    } == {}


def imported(path: Path) -> set[str]:
    """The first part of every module that the file imports, wherever it does so."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module).split(".")[0])
    return names


HYDRA = ("config/compose", "config/overrides")
PURE = [
    *(ROOT / "harness" / "search").glob("*.py"), *(ROOT / "harness" / "hardware").glob("*.py"),
    *(ROOT / "harness" / f"{name}.py" for name in (
        "rows/outcome", "rows/schema", "sweep/plan", "spec/trial", "spec/trial_identity",
        "process/worker_environment", "files/redaction", "sweep/oom_dominance",
    )),
]  # fmt: skip


def test_libraries_stay_in_their_rooms() -> None:
    wrong = []
    for path in FILES:
        package, found = path.relative_to(ROOT).parts[0], imported(path)
        banned = {"harness", "runners", "analysis"}  # a module has one name, vramsweep.harness...
        if package != "runners":
            banned |= {"torch", "transformers", "deepspeed", "accelerate"}
        if path.parent != ROOT / "analysis" / "figures":
            banned |= {"plotly"}
        if path not in [ROOT / "harness" / f"{name}.py" for name in HYDRA] and package != "hydra_plugins":
            banned |= {"hydra", "omegaconf"}
        if path in PURE:
            banned |= {"subprocess", "os", "time", "psutil", "pynvml"}
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in sorted(found & banned)]
    assert not wrong, "\n".join(wrong)


IMPORT = re.compile(r"\bfrom (vramsweep(?:\.\w+)*) import (\w+(?:, \w+)*)")
RAISES = re.compile(r"Raises ((?:[A-Z]\w+(?:, | and | or )?)+)")
CLASSES = {name for path in FILES for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
OF_OURS = "harness|runners|analysis|verbs|version"
MODULE = re.compile(rf"\bvramsweep\.(?:{OF_OURS})\b(?:\.[a-z_]\w*)*(?:\.[A-Z]\w*)?")
FOLDERS = "harness|runners|analysis|hydra_plugins|tests|benchmarks|conf"
PATH = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/-]+\.(?:py|yaml|md)\b")
TEXTS = [
    *FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs").glob("*.py"), *(ROOT / "conf").rglob("*.yaml"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", "Makefile")),
]  # fmt: skip


def resolves(name: str) -> bool:
    """Whether a module, or a module's attribute, has this name."""
    known = set(MODULES) | {structure.module_name(p, ROOT) for p in (ROOT / "vramsweep").rglob("__init__.py")}
    packages = {name.rpartition(".")[0] for name in MODULES} | {"vramsweep", "vramsweep.conf"}
    if name in known | packages:
        return True
    module, _, attribute = name.rpartition(".")
    if module not in MODULES:
        return module.rpartition(".")[0] in MODULES and resolves(module)  # a class's or a module's own attribute
    return bool(re.search(rf"\b{attribute}\b", MODULES[module].read_text()))


def test_what_a_text_names_is_there() -> None:
    """Modules, classes and functions by their whole names, and files: in strings, comments, pages and settings."""
    wrong = []
    for path in TEXTS:
        text = path.read_text()
        names = [name for name in MODULE.findall(text) if not resolves(name)]
        names += [name for name in PATH.findall(text) if not (ROOT / name).exists()]
        pairs = [(module, name) for module, found in IMPORT.findall(text) for name in found.split(", ")]
        for module, name in pairs:  # a room, which holds nothing itself, has no such name
            held = MODULES[module].read_text() if module in MODULES else ""
            if f"{module}.{name}" not in MODULES and not re.search(rf"\b{name}\b", held):
                names.append(f"{module}.{name}")
        wrong += [f"{path.relative_to(ROOT)} names {name}" for name in names]
    assert not wrong, "\n".join(wrong)


def test_what_a_docstring_raises_is_a_class() -> None:
    wrong = []
    for path in FILES:
        text = path.read_text()
        names = {name for part in RAISES.findall(text) for name in re.findall(r"[A-Z]\w+", part)}
        unknown = names - CLASSES - set(dir(builtins))
        wrong += [f"{path.relative_to(ROOT)} raises {n}" for n in unknown if len(re.findall(n, text)) < 2]
    assert not wrong, "\n".join(wrong)


def test_what_the_tables_name_is_there() -> None:
    """Modules of the runners by names that begin with a dot, those of libraries that are installed, functions."""
    from vramsweep.analysis.figures.figure_table import FIGURES
    from vramsweep.harness.spec.runner_table import RUNNERS
    from vramsweep.harness.spec.shardings import SHARDINGS
    from vramsweep.harness.spec.techniques.catalog import TECHNIQUES
    from vramsweep.harness.spec.version_differences import DIFFERENCES

    named = {name for entry in (*RUNNERS, *SHARDINGS, *TECHNIQUES) for name in (entry.module, *entry.preload) if name}
    named |= {entry.traced for entry in RUNNERS if entry.traced}
    own = {name for name in named if name.startswith(".")}
    assert len(own) > 20 and all(f"vramsweep.runners{name}" in MODULES for name in own)
    libraries = {name.split(".")[0] for name in named - own}
    optional = {package.name.replace("-", "_") for entry in TECHNIQUES for package in entry.packages}
    missing = {name for name in libraries if importlib.util.find_spec(name) is None}
    assert {"transformers", "deepspeed"} <= libraries - optional and missing <= optional
    functions = {f"vramsweep.analysis.figures.{name}" for name in FIGURES}
    functions |= {".".join(("vramsweep.runners.trace.version_patches", *one.place)) for one in DIFFERENCES}
    assert len(functions) > 20 and all(map(resolves, functions))


@pytest.mark.slow
@pytest.mark.deterministic
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


MOST = 12
COMMANDS = {
    "A measured trial": next(way for name, way in followed.WAYS.items() if name.startswith("a measured")),
    "Predicted trials": next(way for name, way in followed.WAYS.items() if "together" in name),
    "`advise`": next(way for name, way in followed.WAYS.items() if name.startswith("advise")),
}


def listed(way: str) -> list[str]:
    """The functions of a way, as CONTRIBUTING lists them."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (found,) = re.findall(rf"^  - {re.escape(way)}.*?\.\n(?=  - |- )", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"`(\w+(?:/\w+)+\.[\w.]+)`", found)


@pytest.mark.slow
@pytest.mark.parametrize("way", COMMANDS)
def test_a_way_is_as_it_is_described(way: str) -> None:
    functions = listed(way)
    assert 5 < len(functions) <= MOST
    calls = followed.follow(COMMANDS[way].words, ROOT)
    first: dict[str, int] = {}  # of each function the first call with a trial, if it has one
    for at, call in sorted(enumerate(calls), key=lambda one: not one[1].handed):
        first.setdefault(f"{call.module}.{call.function}", at)
    assert not set(functions) - set(first), "called at all"
    assert sorted(functions, key=first.__getitem__) == functions


@pytest.mark.slow
@parametrized("lengths_of_ways")
def test_a_way_is_as_straight_as_it_was(way: str, stays: int, returns: int) -> None:
    """How often whoever follows a trial changes the module, and comes back to one."""
    (found,) = (one for name, one in followed.WAYS.items() if name.startswith(way))
    changes, _, back = followed.count(followed.cut(followed.follow(found.words, ROOT), found))
    assert 3 < changes <= stays and back <= returns
