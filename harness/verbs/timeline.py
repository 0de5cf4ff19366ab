"""`vramsweep timeline`: the memory of a predicted step from event to event, of one trial or of a sweep's rows.

A process of the analysis draws the figure. trace_query.py finds the timelines. A snapshot has every event instead.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from vramsweep.harness.allocator import config
from vramsweep.harness.allocator.snapshot import frames_of, write_snapshot
from vramsweep.harness.files.sweep_folder import kept_traces
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import draw_page
from vramsweep.harness.questions import trace_query
from vramsweep.harness.verbs.cli import read_parser

_USAGE = (
    "vramsweep timeline model=NAME seq_len=N device=simulated ... | vramsweep timeline results/SWEEP [TRIAL_ID ...]"
)


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep timeline`; return the exit status. Raises UserError for a mistake that the user can fix."""
    arguments, words = read_parser("timeline").parse_known_args(argv)
    if not words:
        raise UserError(f"timeline needs settings or a sweep's folder: {_USAGE}")
    if arguments.snapshot is not None:
        return _write_snapshot(arguments.snapshot, words)
    if trace_query.name_a_trial(words):
        if (found := trace_query.find_trial("timeline", words)) is None:
            return 0
        records, place = [trace_query.trace_timeline(*found)], Path()
    else:
        place = Path(words[0])
        records = trace_query.read_timelines(place, words[1:], trace=not arguments.kept)
        if not records and not arguments.json:
            raise UserError(
                f"{place} has no predicted row with a trace; run the sweep with device=simulated, or omit --kept"
            )
    if arguments.json:
        print(json.dumps(records))
        return 0
    out = arguments.out or place / "timeline.html"
    draw_page(json.dumps(records), out)
    print(out)
    return 0


def _write_snapshot(out: Path, words: Sequence[str]) -> int:
    """Write the predicted snapshot of one trial; return the exit status. Raises UserError."""
    if trace_query.name_a_trial(words):
        found, traces = trace_query.find_trial("timeline", words), None
        if found is None:
            return 0
    else:
        place, *ids = words
        if len(ids) != 1:
            raise UserError(f"--snapshot takes one trial: vramsweep timeline {place} TRIAL_ID --snapshot {out}")
        [row] = trace_query.finished(Path(place), ids)
        found, traces = (row["trial_id"], trace_query.read_trial("timeline", row)), kept_traces(Path(place))
    if (snapshot := trace_query.of_trial("snapshot", "timeline", *found, traces)) is None:
        raise UserError("the step allocates nothing, so it has no snapshot")
    origins = [(frames_of(maker), category) for maker, category in snapshot.pop("makers")]
    about = {"trial_id": found[0], **trace_query.describe_trial(found[1])}
    write_snapshot(out, snapshot, origins.__getitem__, "predicted by vramsweep, not measured", trial=about)
    print(*config.estimates(config.parse(found[1].allocator.conf)), out, sep="\n")
    return 0
