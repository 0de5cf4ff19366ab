"""Python imports this at its start, in every process of a command that runner=script runs: its folder is on PYTHONPATH.

It puts everything back as it was, then waits for torch to be imported, and lets observer.py watch from there. Without
torch nothing happens. Whatever goes wrong here is written to a file of the attempt; the script must not notice.

The script's environment may be another than ours: only the standard library may be imported at the top here. Of our own
packages the two small ones that the instruments need stand in where the environment lacks them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

ATTEMPT = "VRAMSWEEP_ATTEMPT"  # the attempt's folder
PACKAGE = "VRAMSWEEP_PACKAGE"  # our package's folder
LENT = "VRAMSWEEP_LENT"  # where our own psutil and pynvml are
PROBLEM = "problem-{}.txt"  # in that folder: why the process of a number is not watched
LEAST = (3, 11)
LEAST_TORCH = (2, 6)  # the first with torch.compiler.set_stance, which flop_step.py asks for


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as it would have been found, and starts the observer once it is imported."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        found = (find(name, path, target) for find in finders if find is not None)  # an old one has none
        spec = next(filter(None, found), None)  # of those who only ask whether it is there, too
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                guarded(self.folder, observe)

            loader.exec_module = exec_module
        return spec


class Lent(importlib.abc.MetaPathFinder):
    """Our own psutil and pynvml, for an environment that has none."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ("psutil", "pynvml"):
            return None
        return importlib.machinery.PathFinder.find_spec(name, path or os.environ.get(LENT, "").split(os.pathsep))


def observe(folder: str) -> None:
    """Watch this process, which has just imported torch. Raises RuntimeError for a torch that is too old."""
    version = str(getattr(sys.modules["torch"], "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < LEAST_TORCH:
        raise RuntimeError(f"the script's torch is {version}, and it can be watched from {_dotted(LEAST_TORCH)} on")
    package = os.environ[PACKAGE]
    if "vramsweep" not in sys.modules:  # by its file: what lies beside it must not become importable
        spec = importlib.util.spec_from_file_location(
            "vramsweep", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["vramsweep"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    sys.meta_path.append(Lent())
    from vramsweep.runners.scripts import observer

    observer.start(folder)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def guarded(folder: str, function: Callable[[str], None]) -> None:
    """Call the function; what it raises is written down."""
    try:
        function(folder)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        place = os.path.join(folder, PROBLEM.format(os.getpid()))
        with contextlib.suppress(OSError), open(place, "w") as file:
            file.write(text)


def wait_for_torch(folder: str) -> None:
    """Have `observe` called once this process has imported torch. Raises RuntimeError in a Python that is too old."""
    if sys.version_info < LEAST:
        found = _dotted(sys.version_info[:3])
        raise RuntimeError(f"the script's Python is {found}, and it can be watched from {_dotted(LEAST)} on")
    sys.meta_path.insert(0, AfterTorch(folder))


def make_way(here: str) -> None:
    """Import the sitecustomize that this one hides, if there is one."""
    own = sys.modules.pop(__name__)
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != here]
    try:
        importlib.import_module(__name__)
    except ModuleNotFoundError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


if ATTEMPT in os.environ and __name__ == "sitecustomize":
    guarded(os.environ[ATTEMPT], wait_for_torch)
    make_way(os.path.dirname(os.path.abspath(__file__)))
