"""The parsers of the verbs that take settings. Light, to refuse wrong words before a verb's own imports.

typed_words.py reads the settings, overrides.py Hydra's options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from vramsweep.harness.messages import units
from vramsweep.harness.messages.argument_parser import PAGE, Parser, settings_parser
from vramsweep.harness.search.advice_search import MOST
from vramsweep.harness.search.memory_savings import ACCEPTED

GOALS = {"fastest": None, "longest": "seq_len", "largest-batch": "micro_batch"}  # with the axis that each maximizes
_SETTINGS = "%(prog)s [OPTION ...] [GROUP=OPTION ...] [KEY=VALUE ...]"
_TRIALS = "%(prog)s [OPTION ...] KEY=VALUE ... | results/SWEEP [TRIAL_ID ...]"


_ADVISE = """\
Recommended is what changes least of the result (same, but for rounding, less precision, another training),
and of those the fastest that fits, with 1 % to spare if any has it; with --goal longest or largest-batch
what gets furthest with rounding changed at most, if that fits at all, in steps of 3 %. --accept rounding
leaves out what changes more.
Rows and traces are kept, so the same command is quick the second time."""


def _advise() -> Parser:
    parser = Parser(prog="vramsweep advise", usage=_SETTINGS, description=_ADVISE)
    parser.add_argument("--goal", choices=tuple(GOALS), default="fastest", help="what is to be best (default: fastest)")
    parser.add_argument("--accept", choices=ACCEPTED, help="the most of the result that may change")
    parser.add_argument(
        "--most",
        type=int,
        default=MOST,
        metavar="N",
        help=f"combinations to predict (default: {MOST})",
    )
    parser.add_argument("--json", action="store_true", help="print the data instead of tables")
    return parser


_EXPLAIN = """\
Its parts in each phase, the largest tensors with module and operator, and what lies between weights and
GPU. Of a run that does not fit: the request for which there was no room. Of a sweep's folder whose trials
are not named: for each model the largest that fits and the smallest that does not. Of a trial that is named
in settings device=simulated is understood."""


def _explain() -> Parser:
    parser = Parser(prog="vramsweep explain", usage=_TRIALS, description=_EXPLAIN)
    parser.add_argument("--json", action="store_true", help="print the data, in bytes")
    return parser


_PREDICT = """\
It is a sweep with device=simulated. FIRST..LAST and FIRST..LAST:STEP are all whole numbers between,
both ends included, also within lists (1..4,8,16). Rows, traces and report are in
results/MODEL-RUNNER-predicted, or what name= says; the same command resumes one that was interrupted. Several
lengths or batches give a table. Up to six other trials are answered one by one (report=true adds a report)."""


def _predict() -> Parser:
    parser = Parser(prog="vramsweep predict", usage=_SETTINGS, description=_PREDICT)
    parser.add_argument(
        "--largest",
        choices=("seq_len", "micro_batch"),
        help="the largest length or batch that fits instead of rows, for all settings and GPUs at once; of those in "
        "its range, else of all that the model takes",
    )
    parser.add_argument("--every", action="store_true", help="with --largest: replay also what fits by a margin")
    parser.add_argument("--json", action="store_true", help="with --largest: as JSON")
    parser.add_argument(
        "--max-reserved", type=units.parse_size, metavar="SIZE", help="exit with 1 if any reserves more, as 22GiB"
    )
    return parser


_RUN = """\
Every combination of the settings before -- is a trial of it. A {name} in the command is a setting
(seq_len, micro_batch, grad_accum, precision, world_size, ...), a name of your own given before --, or
{output_dir}, a folder for what the script writes, or {steps}. {name:value=TEXT:...} writes TEXT for a value,
as in python train.py {precision:bf16=--bf16:fp32=}. What the command is not told is unknown in the rows,
whatever it does.

The script needs no change. It is watched from inside: optimizer steps, forward and backward passes, the
allocator's counters. Once the protocol's steps are over it is ended, unless runner.stop=false.
More: docs/own_script.md"""


def _run() -> Parser:
    parser = Parser(
        prog="vramsweep run",
        usage="%(prog)s [--dry-run] [GROUP=OPTION ...] [KEY=VALUE ...] -- COMMAND",
        description=_RUN,
    )
    parser.add_argument("--dry-run", action="store_true", help="only show the command of every trial")
    return parser


_TIMELINE = """\
Of a sweep whose trials are not named: for each model and runner the largest row that fits, and the smallest
that does not. A GPU's own recording: vramsweep replay FILE --figure OUT.html."""


def _timeline() -> Parser:
    parser = Parser(prog="vramsweep timeline", usage=_TRIALS, description=_TIMELINE)
    parser.add_argument("--out", type=PAGE, metavar="OUT.html", help="the page (default: timeline.html, in the sweep)")
    parser.add_argument("--json", action="store_true", help="print the data instead of drawing it")
    parser.add_argument("--kept", action="store_true", help="only of traces that the sweep kept: trace nothing")
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "sweep": partial(settings_parser, "sweep"),
    "run": _run,
    "plan": partial(settings_parser, "plan"),
    "predict": _predict,
    "advise": _advise,
    "explain": _explain,
    "timeline": _timeline,
}
