"""`vramsweep predict`: a sweep of predictions, with ranges of lengths and batches, a bar, and a table of what fits.

Everything else is a sweep's: its words (run_words.py), its rows and folder (run_trials.py), how they are made
(batch_prediction.py).
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence

from vramsweep.harness.config import typed_words
from vramsweep.harness.messages import units
from vramsweep.harness.messages.argument_parser import Parser
from vramsweep.harness.messages.console import Console, make_table
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions import largest_prediction
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_label import describe_trial
from vramsweep.harness.sweep.labels import flatten
from vramsweep.harness.sweep.plan import Planned
from vramsweep.harness.sweep.session import refuse_invalid
from vramsweep.harness.verbs import run_words

MIB = 1 << 20
DETAILS = """\
It is a sweep with device=simulated. FIRST..LAST and FIRST..LAST:STEP are all whole numbers between,
both ends included, also within lists (1..4,8,16). Rows, traces and report are in
results/MODEL-RUNNER-predicted, or what name= says; the same command goes on where one was interrupted.
report=false leaves figures and report out."""

# What tells no configuration apart: where in it a trial is, and what hangs on other settings.
_WITHIN = {"seq_len", "repeat", "seed"}


def parser() -> Parser:
    """The verb's own options; its other words are settings."""
    parser = Parser(
        prog="vramsweep predict", usage="%(prog)s [OPTION ...] [GROUP=OPTION ...] [KEY=VALUE ...]", description=DETAILS
    )
    parser.add_argument(
        "--largest",
        choices=largest_prediction.AXES,
        help="the largest length or batch that fits instead of rows, for all settings and cards at once; of those in "
        "its range, else of all that the model takes",
    )
    parser.add_argument("--every", action="store_true", help="with --largest: replay also what fits by a margin")
    parser.add_argument("--json", action="store_true", help="with --largest: as JSON")
    parser.add_argument(
        "--max-reserved", type=units.parse_size, metavar="SIZE", help="exit with 1 if any reserves more, as 22GiB"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """`predict`; returns the exit status of the sweep that it is. Raises UserError for a mistake."""
    options, rest = parser().parse_settings(argv)
    most = options.max_reserved
    if options.largest is not None:
        if most is not None:
            raise UserError("--largest and --max-reserved do not go together: the first goes by the cards' memory")
        return _largest(rest, options.largest, options.every, options.json)
    if options.every or options.json:
        raise UserError("--every and --json are for --largest; rows are in the results folder")
    swept = run_words.sweep_words(words(rest), "predict", "predicted")
    rows = list(swept.rows.values())
    show(rows)
    status = beyond(rows, most)
    run_words.write_report(swept)
    return max(swept.status, status)


def _largest(argv: Sequence[str], axis: str, every: bool, as_json: bool) -> int:
    values: list[int] | None = None
    others = [word for word in argv if word.partition("=")[0] != axis]
    for word in argv:
        if word.partition("=")[0] == axis:
            values = typed_words.list_numbers(word)
    first = f"{axis}={values[0] if values else 1}"
    from vramsweep.harness.config import compose  # and Hydra, which no refusal needs

    with compose.resolve(words([*others, first]), "predict", suffix="predicted") as asked:
        if asked.settings is None:
            return 0
        refuse_invalid(p.reason for p in asked.trials)
        found = largest_prediction.predict_edges(
            asked.trials, asked.settings, asked.folder, asked.start(), axis, values, every
        )
    return show_edges(found, axis, as_json)


def show_edges(answers: Sequence[tuple[Planned, largest_prediction.Answer]], axis: str, as_json: bool) -> int:
    """Print what was found; the exit status: 1 where something asked for has no answer."""
    status = int(any(found["unanswered"] or found["reason"] is not None for _, found in answers))
    if as_json:
        print(json.dumps([{"trial_id": item.trial_id, "trial": item.resolved, **found} for item, found in answers]))
        return status
    console = Console()
    answered = [(item, found) for item, found in answers if found["reason"] is None]
    numbers = (f"every {axis} fits up to", f"largest {axis} that fits", "looked at")
    table = make_table(("configuration", *numbers, "trace"), numbers=numbers)
    for item, found in answered:
        edges = (_number(found, name) for name in ("all_up_to", "largest"))
        looked = f"{found['looked_at']:,} of {found['of']:,}"
        table.add_row(largest_prediction.label(item, axis), *edges, looked, found["trace_basis"] or "none")
    console.print(table)
    if margins := [found["margin"] for _, found in answered if found["margin"] is not None]:
        console.print(
            "Not looked at: what asks for more than there is, and so cannot fit; and what fits by at least "
            f"{min(margins):.1%}, judged by what its neighbours need (--every looks at those)."
        )
    if any(not found["complete"] for _, found in answered):
        console.print(
            "Some near an edge were not looked at, as there are many (give a shorter range, or --every) or they "
            "cannot be traced (a sweep of them says why)."
        )
    return status


def _number(found: largest_prediction.Answer, name: str) -> str:
    unknown = "unknown" if found["unanswered"] and not found["looked_at"] else "none"
    return unknown if found[name] is None else f"{found[name]:,}"


def beyond(rows: Sequence[Row], most: int | None) -> int:
    """1 if a row reserves more than `most` bytes, or it is not known how much, and says which; else 0.

    Where a row has bounds, the upper one counts.
    """
    if most is None:
        return 0
    columns = ("peak_reserved_most_bytes", "peak_reserved_bytes", "unlimited_peak_reserved_bytes")
    needs = {row["trial_id"]: (next(filter(None, map(row.get, columns)), None), row) for row in rows}
    above = [(need, row) for need, row in needs.values() if need is not None and need > most]
    unknown = [(need, row) for need, row in needs.values() if need is None]
    if not above and not unknown:
        return 0
    need, row = max(above, key=lambda one: one[0]) if above else unknown[0]
    invalid = row["outcome"] == Outcome.INVALID
    label = str(row["model"]) if invalid else describe_trial(Trial.model_validate(row["trial"]))
    told = row["reason"] if need is None else f"{need / MIB:,.0f} MiB"
    found = [f"{len(above)} of {len(needs)} reserve more than {most / MIB:,.0f} MiB"] if above else []
    found += [f"of {len(unknown)} of {len(needs)} it is not known how much they reserve"] if unknown else []
    print(f"{', '.join(found)}; {label}: {told}", file=sys.stderr)
    return 1


def words(argv: Sequence[str]) -> list[str]:
    """The same as words of `sweep`. Raises UserError for another device."""
    for word in argv:
        key, _, value = word.partition("=")
        if key == "device" and value != "simulated":
            raise UserError(
                f"{word}: predictions are made on device=simulated; leave it out, or measure: vramsweep sweep {word}"
            )
    given = {word.partition("=")[0] for word in argv}
    return ["-m", *([] if "device" in given else ["device=simulated"]), *argv]


def show(rows: Sequence[Row]) -> None:
    """Print what fits: a line for each configuration."""
    if not rows:
        return
    console = Console()
    varied, groups = configurations(rows)
    heads = ("lengths", "MiB at the shortest", "at the longest that fits", "first that does not", "rows")
    console.print(make_table((*varied, *heads), [(*values, *_line(of_one)) for values, of_one in groups.items()]))
    console.print("MiB are peak allocated / peak reserved; `vramsweep columns` says what trace_basis means.")


def _line(rows: Sequence[Row]) -> list[str]:
    lengths = sorted({row["seq_len"] for row in rows if row["seq_len"] is not None})
    fits = sorted((row for row in rows if row["outcome"] == Outcome.OK), key=lambda row: row["seq_len"])
    full = [row["seq_len"] for row in rows if row["outcome"] in (Outcome.OOM, Outcome.HOST_OOM)]
    kinds = Counter(row["trace_basis"] or row["outcome"] for row in rows)
    span = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}" if lengths else ""
    return [
        span,
        _peaks(fits[0]) if fits else "",
        _peaks(fits[-1]) if fits else "",
        f"{min(full):,}" if full else "",
        ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common()),
    ]


def _peaks(row: Row) -> str:
    peaks = (row["peak_allocated_bytes"], row["peak_reserved_bytes"])
    return f"{row['seq_len']:,}: " + " / ".join("unknown" if size is None else f"{size / MIB:,.0f}" for size in peaks)


def configurations(rows: Sequence[Row]) -> tuple[list[str], dict[tuple[str, ...], list[Row]]]:
    """The settings that tell rows apart beside length, with card and allocator; the rows by their values of them."""
    flat = [flatten(row["trial"] or {}) for row in rows]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    varied = [key for key in keys if len({json.dumps(one.get(key), sort_keys=True) for one in flat}) > 1]
    names = {key for key in keys if key.endswith(".name") and key.count(".") == 1}  # runner.options may have one too
    named = {key.partition(".")[0] for key in varied if key in names}
    shown = [
        key
        for key in keys
        if key in ("device.gpu", "allocator.name")
        or (key in varied and key not in _WITHIN and (key in names or key.partition(".")[0] not in named))
    ]
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row, one in zip(rows, flat, strict=True):
        values = (one.get(key) for key in shown)
        groups[tuple(value if isinstance(value, str) else json.dumps(value) for value in values)].append(row)
    return [key.removesuffix(".name") for key in shown], dict(sorted(groups.items()))
