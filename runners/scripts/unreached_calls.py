"""Evaluation, generation and checkpoints that a traced script has not reached when it is left.

The code of the script's own files says where they are (`ast`). Whatever evaluates enters `no_grad` or `inference_mode`,
or calls `Module.eval`; the stack at that moment says which lines were reached. A Trainer says it by its arguments.
"""

import ast
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from vramsweep.runners.measure.patches import Replacement

METHODS = {"eval": "evaluation", "evaluate": "evaluation", "predict": "evaluation", "generate": "generation"}
# Functions; those for checkpoints gather divided weights, while a plain torch.save takes no GPU memory
NAMED = dict.fromkeys(("no_grad", "inference_mode"), "evaluation") | dict.fromkeys(
    ("get_model_state_dict", "state_dict_type", "full_tensor", "GatheredParameters", "save_16bit_model"), "checkpoints"
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _calls(node: ast.AST, function: str | None) -> Iterator[tuple[str, ast.Call, str | None]]:
    """Yield calls with their codes and functions, None for code that may run without being named."""
    for child in ast.iter_child_nodes(node):
        inner = function
        if isinstance(child, _FUNCTIONS):
            inner = None if isinstance(node, ast.ClassDef) and child.name != "generate" else child.name
        if isinstance(child, ast.Call):
            name, method = _name(child.func), isinstance(child.func, ast.Attribute)
            plain = method and not (name == "eval" and child.args)  # pandas' takes an expression
            if code := NAMED.get(name) or (METHODS.get(name) if plain else None):
                yield code, child, inner
        yield from _calls(child, inner)


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


class Reached:
    """The lines of the files in a script's `folder` from which something that evaluates has run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines, self.files = folder.resolve(), set[tuple[str, int]](), dict[str, str | None]()
        self.evaluated = False  # by a Trainer

    def replacements(self) -> Iterator[Replacement]:
        """Yield what to replace of torch: owner, name, stand-in."""
        for owner in (torch.no_grad, torch.inference_mode):
            yield owner, "__enter__", self._noted(owner.__enter__)
        yield torch.nn.Module, "eval", self._noted(torch.nn.Module.eval)

    def _noted(self, call: Callable[..., Any]) -> Any:
        @functools.wraps(call)
        def noted(*args: Any) -> Any:
            frame: FrameType | None = sys._getframe(1)
            # the locals of other frames are not read, because a frame keeps alive what it has shown
            if frame is not None and frame.f_code.co_name == "decorate_context":
                decorated = inspect.unwrap(frame.f_locals["func"])
                code = getattr(decorated, "__code__", call.__code__)  # it starts at the first decorator
                body = min((n for *_, n in code.co_lines() if n and n > code.co_firstlineno), default=0)
                self.lines |= {(self._own(code.co_filename) or "", n) for n in range(code.co_firstlineno, body)}
            while frame is not None:
                if (file := self._own(frame.f_code.co_filename)) is not None:
                    self.lines.add((file, frame.f_lineno))
                self.evaluated |= frame.f_code.co_name == "evaluation_loop"
                frame = frame.f_back
            return call(*args)

        return noted

    def _own(self, name: str) -> str | None:
        """Return the path of a Python file in the folder, None for others."""
        if name not in self.files:
            path = Path(name).resolve()
            own = self.folder in path.parents and "site-packages" not in path.parts and path.suffix == ".py"
            self.files[name] = str(path) if own and path.is_file() else None
        return self.files[name]

    def find_unreached(self, end: BaseException) -> Iterator[tuple[str, str]]:
        """Yield what may still run after the exception that ended the script: codes, each with a line or argument."""
        frames = [frame for frame, _ in traceback.walk_tb(end.__traceback__)]
        main = next(filter(None, (self._own(frame.f_code.co_filename) for frame in frames)), "")
        for name, module in [*sys.modules.items()]:
            self._own("" if name.startswith("vramsweep") else str(getattr(module, "__file__", "")))
        trees = {file: ast.parse(Path(file).read_bytes()) for file in sorted({*filter(None, self.files.values())})}
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        used = {_name(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}
        defined = {node.name for node in nodes if isinstance(node, _FUNCTIONS)}
        for file, tree in trees.items():  # an imported module has run, except its functions
            for code, call, function in _calls(tree, None if file == main else "<module>"):
                ran = any((file, line) in self.lines for line in range(call.lineno, (call.end_lineno or 0) + 1))
                if not ran and _name(call.func) not in defined and (function is None or function in used):
                    yield code, f"{Path(file).name}:{call.lineno}"
        trainers = (frame.f_locals["self"].args for frame in frames if frame.f_code.co_name == "_inner_training_loop")
        for arguments in trainers:  # of transformers, which evaluate and save by their arguments
            if getattr(arguments, "eval_strategy", "no") != "no" and not self.evaluated:
                yield "evaluation", "eval_strategy"
            if arguments.save_strategy != "no" and (arguments.deepspeed or arguments.fsdp):
                yield "checkpoints", "save_strategy"
