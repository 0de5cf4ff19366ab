"""The parsers of the verbs that take settings. Light, to refuse wrong words before a verb's own imports.

typed_words.py reads the settings, overrides.py Hydra's options.
"""

from collections.abc import Callable
from functools import partial

from vramsweep.harness.messages import units
from vramsweep.harness.messages.argument_parser import PAGE, PICKLE, Parser, settings_parser
from vramsweep.harness.search.advice_search import MOST
from vramsweep.harness.search.memory_savings import ACCEPTED

GOALS = {"fastest": None, "longest": "seq_len", "largest-batch": "micro_batch"}  # with the axis that each maximizes
_SETTINGS = "%(prog)s [OPTION ...] [GROUP=OPTION ...] [KEY=VALUE ...]"
_TRIALS = "%(prog)s [OPTION ...] KEY=VALUE ... | results/SWEEP [TRIAL_ID ...]"


_ADVISE = """\
It recommends the changes that fit and alter the result least (same, rounding, precision, method). Among equals it
takes the fastest, with 1 % of memory to spare if possible. With --goal longest or largest-batch it takes the changes
that get furthest, in steps of 3 %; they alter more than rounding only if nothing else fits. --accept rounding leaves
out changes that alter more. Rows and traces are kept, so the same command is quick the second time."""


def _advise() -> Parser:
    parser = Parser(prog="vramsweep advise", usage=_SETTINGS, description=_ADVISE)
    parser.add_argument("--goal", choices=tuple(GOALS), default="fastest", help="what to optimize (default: fastest)")
    parser.add_argument("--accept", choices=ACCEPTED, help="how much the result may change (default: method)")
    parser.add_argument(
        "--most",
        type=int,
        default=MOST,
        metavar="N",
        help=f"combinations of changes to predict, at most (default: {MOST})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


_EXPLAIN = """\
It shows the memory of each phase by part, the largest tensors with module and operator, and the sum from weights to
GPU memory. If the run does not fit, it shows the request that failed. For a sweep's folder without TRIAL_ID it takes,
for each model and runner, the largest trial that fits and the smallest that does not. If you give settings,
device=simulated is assumed."""


def _explain() -> Parser:
    parser = Parser(prog="vramsweep explain", usage=_TRIALS, description=_EXPLAIN)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    return parser


_PREDICT = """\
It runs a sweep with device=simulated. FIRST..LAST and FIRST..LAST:STEP are ranges of whole numbers, both ends
included, also within lists (1..4,8,16). Rows, traces and report go to results/MODEL-RUNNER-predicted (name=NAME:
results/NAME); the same command resumes an interrupted sweep. Several lengths or batches give a table; up to six other
trials give a few lines each (report=true adds a report)."""


def _predict() -> Parser:
    parser = Parser(prog="vramsweep predict", usage=_SETTINGS, description=_PREDICT)
    parser.add_argument(
        "--largest",
        choices=("seq_len", "micro_batch"),
        help="find the largest length or batch that fits, for all settings and GPUs, in the given "
        "range, else up to the model's maximum (batch: 4096)",
    )
    parser.add_argument("--every", action="store_true", help="with --largest: also replay values that fit by a margin")
    parser.add_argument("--json", action="store_true", help="with --largest: print JSON")
    parser.add_argument(
        "--max-reserved", type=units.parse_size, metavar="SIZE", help="exit with status 1 if a trial reserves more"
    )
    return parser


_RUN = """\
Each combination of the settings before -- is one trial of COMMAND. A {name} in COMMAND stands for a setting (seq_len,
micro_batch, grad_accum, precision, world_size, ...) or for a name of your own given before --. {output_dir} is a folder
for the script's output, {steps} the number of steps. {name:value=TEXT:...} writes TEXT for a value, as in python
train.py {precision:bf16=--bf16:fp32=}. A setting without a placeholder is unknown in the rows.

The script needs no change. vramsweep watches its optimizer steps, forward and backward passes and the allocator's
counters from inside. It ends the script after the protocol's steps, unless runner.stop=false.
More: docs/own_script.md"""


def _run() -> Parser:
    parser = Parser(
        prog="vramsweep run",
        usage="%(prog)s [--dry-run] [GROUP=OPTION ...] [KEY=VALUE ...] -- COMMAND",
        description=_RUN,
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command of every trial and run nothing")
    return parser


_TIMELINE = """\
For a sweep's folder without TRIAL_ID, the page shows for each model and runner the largest trial that fits and the
smallest that does not. For a GPU's own recording: vramsweep replay FILE --figure OUT.html. With --snapshot
it writes no page, but all steps of one trial as torch.cuda.memory._dump_snapshot would, predicted."""


def _timeline() -> Parser:
    parser = Parser(prog="vramsweep timeline", usage=_TRIALS, description=_TIMELINE)
    parser.add_argument(
        "--out", type=PAGE, metavar="OUT.html", help="the page (default: timeline.html here or in the sweep)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of drawing a page")
    parser.add_argument(
        "--snapshot", type=PICKLE, metavar="OUT.pickle", help="write a predicted snapshot for pytorch.org/memory_viz"
    )
    parser.add_argument("--kept", action="store_true", help="use only traces that the sweep kept, and trace nothing")
    return parser


_WHY = """\
FILE is a snapshot (torch.cuda.memory._dump_snapshot), a log or several, or torchrun's error file; a folder is a
sweep's, or one of logs. With the run's settings as KEY=VALUE, changes are predicted, as by advise. Sizes from a log are
rounded as in torch's message."""


def _why() -> Parser:
    usage = "%(prog)s [OPTION ...] FILE ... [KEY=VALUE ...] | results/SWEEP [TRIAL_ID]"
    parser = Parser(prog="vramsweep why", usage=usage, description=_WHY)
    parser.add_argument("words", nargs="*", metavar="FILE", help="snapshot, log, or folder; or a setting, KEY=VALUE")
    parser.add_argument("--device", type=int, metavar="N", help="device of a snapshot (default: the first that failed)")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "sweep": partial(settings_parser, "sweep"),
    "run": _run,
    "plan": partial(settings_parser, "plan"),
    "predict": _predict,
    "advise": _advise,
    "explain": _explain,
    "timeline": _timeline,
    "why": _why,
}
