"""`vramsweep validate FILE...`: predictions of reference runs next to the published readings.

The result is `readings.json` in the sweep's folder, an entry for each reading. analysis/compare/validation.py makes the
tables of it. harness/questions reads the files and predicts their runs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness.files import outputs
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.argument_parser import Parser
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.questions import reference_runs
from vramsweep.harness.questions.reference_runs import OtherTools
from vramsweep.harness.spec.trial_identity import SIMULATION

READINGS = "readings.json"
PACKAGES = ("vramsweep", "torch", "transformers", "accelerate", "deepspeed")
DETAILS = """\
benchmarks/published/README.md describes the files. Settings such as timeout_s=1200, name= or results=
apply to every run. The same command resumes an interrupted one."""


def parser() -> Parser:
    """Return the parser of the verb's options and words."""
    parser = Parser(
        prog="vramsweep validate",
        usage="%(prog)s FILE ... [KEY=VALUE ...]",
        description=DETAILS,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("words", nargs="*", metavar="FILE", help="files of published runs; settings may be among them")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep validate`; return the exit status. Raises UserError if nothing can be predicted."""
    arguments = parser().parse_intermixed_args(argv)
    words = [word for word in arguments.words if "=" in word]
    if not (files := [Path(word) for word in arguments.words if "=" not in word]):
        raise UserError("validate needs files of published runs, such as benchmarks/published/*.yaml")
    runs, mistakes = reference_runs.read(files)
    estimates = OtherTools.beside(files)
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        asked, settings = reference_runs.resolve(runs, words)
        if all(one.item is None for one in asked):
            raise UserError(
                "\n".join(["none of the runs can be predicted:", *mistakes, *reference_runs.reasons(asked, {})])
            )
        folder = Path(settings.results) / (settings.name or "validation")
        rows, status = reference_runs.predict(asked, settings, folder)
    mistakes += reference_runs.reasons([one for one in asked if one.run.cannot is None], rows)
    record = {
        "made": {name: machine.version(name) for name in PACKAGES} | {"simulation": str(SIMULATION)},
        "mistakes": mistakes,
        "others": estimates.sources,
        "readings": [
            line | {"others": estimates.of(one.run)} for one in asked for line in reference_runs.lines(one, rows)
        ],
    }
    outputs.write(folder / READINGS, json.dumps(record, indent=1))
    for text in mistakes:
        print(f"left out: {text}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(record, indent=1))
    else:
        show(folder)
    return max(status, int(bool(mistakes)))


def show(folder: Path) -> None:
    """Print the tables with a process of the analysis. Raises UserError if that fails."""
    sys.stdout.flush()
    if subprocess.run(build_command("vramsweep", "errors", str(folder / READINGS)), check=False).returncode:
        raise UserError("some tables are missing for the reason above; run the same command again")
