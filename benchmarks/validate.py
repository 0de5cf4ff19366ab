"""Predictions of runs that others measured and published, next to their readings.

    python benchmarks/validate.py benchmarks/published/*.yaml [timeout_s=1200 ...] [--json]

The result is `readings.json` in the sweep's folder, an entry for each reading. published_readings.py reads the files,
reference_runs.py predicts their runs, validation.py makes the tables. Exit status: 0 done; 1 a file or run could not be
read or predicted and is not marked `cannot`; 2 an error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import reference_runs
from reference_runs import OtherTools
from validation import load
from validation_text import format_validation

from vramsweep.harness.files import outputs
from vramsweep.harness.machine import machine
from vramsweep.harness.messages.argument_parser import Parser
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec.trial_identity import SIMULATION

READINGS = "readings.json"
PACKAGES = ("vramsweep", "torch", "transformers", "accelerate", "deepspeed")
DETAILS = """\
benchmarks/published/README.md describes the files. Settings such as timeout_s=1200, name= or results=
apply to every run. The same command resumes an interrupted one."""


def parser() -> Parser:
    """Return the parser of the verb's options and words."""
    parser = Parser(
        prog="validate.py",
        usage="%(prog)s FILE ... [KEY=VALUE ...]",
        description=DETAILS,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("words", nargs="*", metavar="FILE", help="files of published runs; settings may be among them")
    return parser


def main(argv: Sequence[str]) -> int:
    """Predict the runs and print their errors; return the exit status. Raises UserError if nothing can be predicted."""
    arguments = parser().parse_intermixed_args(argv)
    words = [word for word in arguments.words if "=" in word]
    if not (files := [Path(word) for word in arguments.words if "=" not in word]):
        raise UserError("name files of published runs, such as benchmarks/published/*.yaml")
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
    print(json.dumps(record, indent=1) if arguments.json else format_validation(load(folder / READINGS)))
    return max(status, int(bool(mistakes)))


def run(words: Sequence[str]) -> int:
    """Run the command; return the exit status, 2 for a mistake that the user can fix, which is printed."""
    try:
        return main(words)
    except UserError as error:
        print(f"validate: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
