"""Write the screens of the verbs that answer questions, as golden files: `python tests/screens.py --write`.

A screen is what a command prints to a pipe of 100 columns, without progress. Only what varies from run to run is
masked. Look at each screen before committing it: a newcomer must understand every line.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "data" / "screens"
_LINES = (ROOT / "tests" / "data" / "tables" / "screens.tsv").read_text().splitlines()[1:]
SCREENS = dict(line.split("\t") for line in _LINES)
PROGRESS = re.compile(r"\[\d+/\d+\]|tracing |.* finished before, .* to do")


def capture_screen(name: str, folder: Path) -> str:
    """Run the screen's command in an empty folder; return its output, with what varies masked."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VRAMSWEEP")}
    environ |= {"COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-m", "vramsweep", *SCREENS[name].split()]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines() if not PROGRESS.match(line)]
    text = "\n".join([f"$ vramsweep {SCREENS[name]}", *lines]) + "\n"
    text = text.replace(str(folder), ".")
    return re.sub(r"(?<=predicting 6 trials on this machine's CPU: )[^)]*", "...", text)


def main(words: list[str]) -> int:
    """Write the named screens, or all; return 2 if the first word is not --write."""
    if words[:1] != ["--write"]:
        print(__doc__)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in words[1:] or SCREENS:
        place = Path(tempfile.mkdtemp(prefix="vramsweep-screen-"))
        (FOLDER / f"{name}.txt").write_text(capture_screen(name, place), encoding="utf-8")
        shutil.rmtree(place)
        print(f"{FOLDER / name}.txt", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
