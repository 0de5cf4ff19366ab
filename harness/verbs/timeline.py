"""`vramsweep timeline`: what a predicted step holds from event to event, of one trial or of a sweep's rows.

The figure is drawn in a process of the analysis. Not covered: where timelines come from (kept_timelines.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness.messages.argument_parser import PAGE, Parser
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import draw_page
from vramsweep.harness.questions import kept_timelines, trace_query

_USAGE = (
    "vramsweep timeline model=NAME seq_len=N device=simulated ... | vramsweep timeline results/SWEEP [TRIAL_ID ...]"
)

DETAILS = """\
Of a sweep whose trials are not named: for each model and runner the largest row that fits, and the smallest
that does not. A GPU's own recording: vramsweep replay FILE --figure OUT.html."""


def parser() -> Parser:
    """The verb's own options; its other words are settings, or a folder and trials of it."""
    usage = "%(prog)s [OPTION ...] KEY=VALUE ... | results/SWEEP [TRIAL_ID ...]"
    parser = Parser(prog="vramsweep timeline", usage=usage, description=DETAILS)
    parser.add_argument("--out", type=PAGE, metavar="OUT.html", help="the page (default: timeline.html, in the sweep)")
    parser.add_argument("--json", action="store_true", help="print the data instead of drawing it")
    parser.add_argument("--kept", action="store_true", help="only of traces that the sweep kept: trace nothing")
    return parser


def main(argv: Sequence[str]) -> int:
    """The verb; returns the exit status. Raises UserError for what the user can mend."""
    arguments, words = parser().parse_settings(argv)
    if not words:
        raise UserError(f"timeline of what? {_USAGE}")
    if trace_query.name_a_trial(words):
        if (found := trace_query.find_trial("timeline", words)) is None:
            return 0
        records, place = [kept_timelines.trace_timeline(*found)], Path()
    else:
        place = Path(words[0])
        records = kept_timelines.read_timelines(place, words[1:], trace=not arguments.kept)
        if not records and not arguments.json:
            raise UserError(
                f"{place} has no predicted row with a trace; sweep with device=simulated, or leave --kept out"
            )
    if arguments.json:
        print(json.dumps(records))
        return 0
    out = arguments.out or place / "timeline.html"
    draw_page(json.dumps(records), out)
    print(out)
    return 0
