"""`python -m harness VERB`."""

import sys


def _run() -> int:
    try:
        from harness.cli import main

        return main()
    except ModuleNotFoundError as error:  # an environment of the user's own (VENV=) that lacks something
        if error.name is None or error.name.split(".")[0] in ("harness", "hydra_plugins"):
            raise
        fix = f"{sys.executable} -m pip install -e . (an installed torch is kept)"
        print(f"vramsweep: {error.name} is missing in {sys.executable}; in the checkout run: {fix}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(_run())
