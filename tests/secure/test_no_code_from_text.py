"""No text becomes code, read off the source: what could do that is not there, but for the places listed with a reason.

Not covered: libraries (Hydra makes the launcher and the sweeper that a configuration names; ranks of one trial tell
each other what they measured through torch.distributed, which pickles); modules that are imported by a name out of our
own registries.
"""

import ast
import builtins
from pathlib import Path

import pytest
from conftest import ROOT, cases, parametrized

OWN = ("harness", "runners", "analysis", "hydra_plugins", "vramsweep")
FILES = sorted(path for package in OWN for path in (ROOT / package).rglob("*.py"))
BUILT_IN = {"eval", "exec", "compile", "__import__"}
SHELLS = {"sh", "bash", "dash", "zsh", "/bin/sh", "/bin/bash"}
# Whole modules, by the beginning of their name: of each of them nothing is wanted.
MODULES = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code", "codeop", "pty")
NAMES = {
    *(f"builtins.{name}" for name in BUILT_IN),
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell",
    "pandas.read_pickle", "pandas.eval", "sympy.sympify", "sympy.parsing.sympy_parser.parse_expr", "torch.load",
    "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all", "yaml.Loader", "yaml.CLoader",
    "yaml.UnsafeLoader", "yaml.CUnsafeLoader", "yaml.FullLoader", "yaml.CFullLoader", "yaml.add_constructor",
    "yaml.YAMLObject",
}  # fmt: skip
SAFE = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"}
READERS = {f"yaml.{name}" for name in ("load", "load_all", "parse", "compose", "compose_all", "scan")}
EXCEPTIONS = {(file, what): reason for file, what, reason in cases("exceptions_of_code")}


class Found(ast.NodeVisitor):
    """The names above that a file uses, each with its line. Names are followed through imports."""

    def __init__(self, tree: ast.Module) -> None:
        self.imported: dict[str, str] = {}  # local names, and what they stand for
        self.loaders = set(SAFE)
        self.found: list[tuple[str, int]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for one in node.names:
                    self.imported[one.asname or one.name.partition(".")[0]] = (
                        one.name if one.asname else (one.name.partition(".")[0])
                    )
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and [self.name(base) for base in node.bases] == ["yaml.SafeLoader"]:
                self.loaders.add(node.name)
        self.visit(tree)

    def name(self, node: ast.AST) -> str | None:
        """The whole name of what an expression stands for."""
        if isinstance(node, ast.Name):
            known = f"builtins.{node.id}" if node.id in vars(builtins) else node.id
            return self.imported.get(node.id, known)
        if isinstance(node, ast.Attribute) and (owner := self.name(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    def add(self, name: str, node: ast.AST) -> None:
        self.found.append((name, getattr(node, "lineno", 0)))

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            if one.name.partition(".")[0] in MODULES:
                self.add(one.name.partition(".")[0], node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if str(node.module).partition(".")[0] in MODULES:
            self.add(str(node.module).partition(".")[0], node)
        for one in node.names:
            if (name := f"{node.module}.{one.name}") in NAMES:
                self.add(name, node)
            if node.module in ("os", "yaml", "subprocess", "builtins") and one.name == "*":
                self.add(f"{node.module}.*", node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and (name := self.name(node)) in NAMES:  # a field may be called compile
            self.add(str(name), node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (name := self.name(node)) in NAMES:
            self.add(str(name), node)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self.name(node.func)
        words = {one.arg: one.value for one in node.keywords}
        if "shell" in words and not (isinstance(words["shell"], ast.Constant) and words["shell"].value is False):
            self.add("shell=", node)
        if name in ("subprocess.run", "subprocess.Popen", "subprocess.check_output", "subprocess.check_call"):
            first = node.args[0] if node.args else words.get("args")
            if isinstance(first, (ast.JoinedStr, ast.Constant)):
                self.add("a command that is one text", node)
        if name in READERS:
            loader = self.name(words["Loader"]) if "Loader" in words else None
            if loader not in self.loaders:
                self.add(f"{name} with {loader}", node)
        pickled = words.get("allow_pickle")
        if pickled is not None and not (isinstance(pickled, ast.Constant) and pickled.value is False):
            self.add("allow_pickle=", node)
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in ("eval", "query")
            and (node.args or node.keywords)
        ):
            self.add(f".{node.func.attr}() of a frame", node)  # a module's eval() takes nothing
        self.generic_visit(node)

    def visit_List(self, node: ast.List) -> None:
        words = [one.value if isinstance(one, ast.Constant) else None for one in node.elts[:2]]
        if len(words) == 2 and words[0] in SHELLS and str(words[1]).startswith("-"):
            self.add("a shell", node)
        self.generic_visit(node)


def found(text: str) -> list[tuple[str, int]]:
    return Found(ast.parse(text)).found


def test_no_text_becomes_code() -> None:
    texts = ((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in FILES)
    every = [(file, name, line) for file, text in texts for name, line in found(text)]
    assert [one for one in every if one[:2] not in EXCEPTIONS] == []
    assert EXCEPTIONS.keys() - {one[:2] for one in every} == set()


@pytest.mark.parametrize(("text", "name"), cases("texts_that_become_code"))
def test_each_of_them_would_be_found(text: str, name: str) -> None:
    assert name in [one for one, _ in found(text.replace("\\n", "\n"))]


@parametrized("harmless_code")
def test_what_is_harmless_is_not_found(text: str) -> None:
    assert found(text) == []


def test_there_are_files_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(OWN)
    assert Path(ROOT / "harness/allocator/safe_unpickle.py") in FILES
