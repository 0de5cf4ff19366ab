"""Run one module of this copy of vramsweep: `python -P start.py -m MODULE [WORD ...]` (interpreter.build_command).

-P keeps this file's folder, and the current one, which may be somebody else's, out of what can be imported. The package
is the copy that this file belongs to, installed or not. Its parent folder is searched last, for hydra_plugins.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path


def main(words: list[str]) -> None:
    """Run the module that follows -m as `__main__`; `words` may hold an interpreter's options (-u) before -m."""
    if sys.flags.optimize > 1 and os.environ.get("PYTHONOPTIMIZE") != "1":  # transformers needs its docstrings
        os.environ["PYTHONOPTIMIZE"] = "1"
        os.execvp(sys.orig_argv[0], sys.orig_argv)
    package = Path(__file__).absolute().parents[2]
    spec = importlib.util.spec_from_file_location(
        "vramsweep", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["vramsweep"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["vramsweep"])
    if str(package.parent) not in sys.path:
        sys.path.append(str(package.parent))
    sys.argv = words[words.index("-m") + 1 :]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
