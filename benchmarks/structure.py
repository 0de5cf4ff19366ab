"""Count what a reader of the code meets: files per folder, lines, floors, arrows, circles, imports between rooms.

    python benchmarks/structure.py [--rooms] [--follow] [FOLDER]

An arrow is an import of one of our modules by another, at the top, in a function or under `TYPE_CHECKING`. A string
that names a module is an arrow too (`-m`, preload lists, tables of functions). A circle is a set of modules each of
which reaches the others by arrows. A floor is a step of the longest chain of arrows; each circle counts as one step. An
`__init__` with only a docstring is not counted as a module. `--follow` counts how often a reader who follows a trial
changes the module (followed.py).
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import followed

PACKAGES = ("harness", "runners", "analysis", "vramsweep", "hydra_plugins")
MODULE_IN_TEXT = re.compile(r"\bvramsweep(?:\.\w+)+")


def module_name(path: Path, root: Path) -> str:
    """Return the full name by which `path` is imported, such as `vramsweep.harness.allocator.blocks`."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] in ("vramsweep", "hydra_plugins") else ("vramsweep", *parts))


def find_modules(root: Path) -> dict[str, Path]:
    """Return every module of the product by its full name, without `__init__` files that have no code."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if not path.is_relative_to(root / package) or any(p.is_symlink() for p in path.parents):
                continue
            if path.stem != "__init__" or any(not _is_text(node) for node in ast.parse(path.read_text()).body):
                found[module_name(path, root)] = path
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def read_targets(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Return the names of `modules` that the file imports or names in a string that is not a docstring."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = (n.body[0] for n in ast.walk(tree) if isinstance(n, documented) and n.body)
    texts = {id(first.value) for first in firsts if isinstance(first, ast.Expr)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            names |= {name for name in MODULE_IN_TEXT.findall(node.value) if name.count(".") > 1}
    return {target for name in names if (target := _module_of(name, modules))}


def _module_of(name: str, modules: Mapping[str, Path]) -> str | None:
    """Return the module that `name` is or belongs to: `a.b.function` belongs to module `a.b`; None if not ours."""
    return next((m for m in (name, name.rpartition(".")[0]) if m in modules), None)


def find_circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected sets of more than one module, largest first (Tarjan 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for target in arrows.get(name, ()):
            if target not in index:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], index[target])
        if lowest[name] == index[name]:
            circle = [stack.pop()]
            while circle[-1] != name:
                circle.append(stack.pop())
            circles.append(sorted(circle))

    for name in arrows:
        if name not in index:
            visit(name)
    return sorted((c for c in circles if len(c) > 1), key=len, reverse=True)


def count_floors(arrows: Mapping[str, Iterable[str]]) -> int:
    """Return the number of modules on the longest chain of arrows; each circle counts as one."""
    one_of = {name: circle[0] for circle in find_circles(arrows) for name in circle}
    merged: dict[str, set[str]] = defaultdict(set)
    for name, targets in arrows.items():
        merged[one_of.get(name, name)] |= {one_of.get(t, t) for t in targets} - {one_of.get(name, name)}
    heights: dict[str, int] = {}

    def height(name: str) -> int:
        if name not in heights:
            heights[name] = 1 + max((height(target) for target in merged.get(name, ())), default=0)
        return heights[name]

    return max((height(name) for name in merged), default=0)


def room_of(name: str) -> str:
    """Return a module's room: package and first folder (`harness/allocator`), or its package if it has no folder."""
    parts = name.removeprefix("vramsweep.").split(".")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0] if len(parts) > 1 else "vramsweep"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--rooms", action="store_true", help="list the imports between rooms too")
    parser.add_argument("--follow", action="store_true", help="count how often a reader changes the module")
    options = parser.parse_args()
    root = options.folder.resolve()
    if options.follow:
        for name, way in followed.WAYS.items():
            stays, modules_seen, returns = followed.count(followed.cut(followed.follow(way.words, root), way))
            print(f"{name}: {stays} stays in {modules_seen} modules, {returns} returns")
        return
    modules = find_modules(root)
    arrows = {name: read_targets(path, modules) - {name} for name, path in modules.items()}
    print(f"{'folder':<34}{'files':>6}{'lines':>8}")
    for package in PACKAGES:
        folders: dict[Path, list[int]] = defaultdict(list)
        for path in (root / package).rglob("*.py"):
            if not any(p.is_symlink() for p in path.parents):
                folders[path.parent].append(len(path.read_text().splitlines()))
        for folder, lines in sorted(folders.items()):
            print(f"{folder.relative_to(root)!s:<34}{len(lines):>6}{sum(lines):>8}")
        inside = {n for n in arrows if (root / package) in modules[n].parents}
        own = {n: arrows[n] & inside for n in inside}
        print(f"  {package}: {sum(map(len, own.values()))} imports on {count_floors(own)} levels\n")
    circles = find_circles(arrows)
    total = sum(map(len, arrows.values()))
    print(f"all: {total} imports on {count_floors(arrows)} levels; cycles: {len(circles) or 'none'}")
    for circle in circles:
        print(f"  {len(circle)}: {' '.join(n.removeprefix('vramsweep.') for n in circle)}")
    if options.rooms:
        between: dict[str, set[str]] = defaultdict(set)
        for name, targets in arrows.items():
            between[room_of(name)] |= {room_of(t) for t in targets}
        for room in sorted(between):
            print(f"{room}: {' '.join(sorted(between[room] - {room}))}")


if __name__ == "__main__":
    main()
