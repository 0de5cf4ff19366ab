"""The hook of runner=script: Python imports it at start in every process of the command, as PYTHONPATH has its folder.

The hook restores the import path and any sitecustomize that it hides. It waits until torch is imported, and lets
observer.py watch from then on; without torch nothing happens. An error here is written to a file of the attempt, and
the script must not notice it.

The script's environment may differ from ours, so only the standard library may be imported at the top here. If the
environment lacks the two small packages that the instruments need, ours stand in.
"""

from __future__ import annotations  # so that a Python that is too old comes to say so

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
LENT = "VRAMSWEEP_LENT"  # folders of our own psutil and pynvml
PROBLEM = "problem-{}.txt"  # in that folder: why the process with this id is not watched
LEAST = (3, 11)
LEAST_TORCH = (2, 6)  # the first with torch.compiler.set_stance, which flop_step.py needs


class AfterTorch(importlib.abc.MetaPathFinder):
    """A finder that finds torch as others would, and starts the observer once torch is imported."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return torch's spec with a loader that starts the observer after the import; None for any other module."""
        if name != "torch":
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        found = (find(name, path, target) for find in finders if find is not None)  # old finders have no find_spec
        spec = next(filter(None, found), None)  # also for code that only checks whether torch is there
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
    """A finder of our own psutil and pynvml, for an environment without them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of psutil or pynvml from the folders in LENT; None for any other module."""
        if name.partition(".")[0] not in ("psutil", "pynvml"):
            return None
        return importlib.machinery.PathFinder.find_spec(name, path or os.environ.get(LENT, "").split(os.pathsep))


def observe(folder: str) -> None:
    """Watch this process, which has just imported torch. Raises RuntimeError for a torch that is too old."""
    version = str(getattr(sys.modules["torch"], "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and tuple(map(int, numbers.groups())) < LEAST_TORCH:
        raise RuntimeError(f"the script's torch is {version}, but vramsweep watches {_dotted(LEAST_TORCH)} and later")
    package = os.environ[PACKAGE]
    if "vramsweep" not in sys.modules:  # by its file, so that packages next to it do not become importable
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
    """Call the function, and write any exception to a file of the attempt."""
    try:
        function(folder)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        place = os.path.join(folder, PROBLEM.format(os.getpid()))
        with contextlib.suppress(OSError), open(place, "w") as file:
            file.write(text)


def wait_for_torch(folder: str) -> None:
    """Have `observe` called once this process has imported torch. Raises RuntimeError if Python is too old."""
    if sys.version_info < LEAST:
        found = _dotted(sys.version_info[:3])
        raise RuntimeError(f"the script's Python is {found}, but vramsweep watches {_dotted(LEAST)} and later")
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
