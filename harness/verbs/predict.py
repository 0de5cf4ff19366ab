"""`vramsweep predict`: a sweep of predictions, with ranges of lengths and batches, a bar, and a table of what fits.

All else is as in other sweeps: words (run_words.py), rows and folder (run_trials.py), predictions
(batch_prediction.py).
"""

import json
import sys
from collections.abc import Sequence

from vramsweep.harness.config import typed_words
from vramsweep.harness.messages import units
from vramsweep.harness.messages.console import Console
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.questions import largest_prediction
from vramsweep.harness.questions.fit_prediction import find_need
from vramsweep.harness.rows.schema import Outcome, Row
from vramsweep.harness.spec.fit_text import describe_trial
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.sweep.plan import Planned
from vramsweep.harness.sweep.session import refuse_invalid
from vramsweep.harness.verbs import predict_answer, run_words
from vramsweep.harness.verbs.cli import read_parser


def main(argv: Sequence[str]) -> int:
    """Run `vramsweep predict`; return the exit status of its sweep. Raises UserError for a mistake."""
    options, rest = read_parser("predict").parse_known_args(argv)
    most = options.max_reserved
    if options.largest is not None:
        if most is not None:
            raise UserError("--largest searches up to the GPU's limit, so it takes no --max-reserved; leave one out")
        return _largest(rest, options.largest, options.every, options.json)
    if options.every or options.json:
        raise UserError("--every and --json need --largest; without it, read the rows in the results folder")
    swept = run_words.sweep_words(words(rest), "predict", "predicted")
    own = swept.settings is not None and swept.settings.answer is None  # else the report answers the preset's question
    brief = own and predict_answer.show_answer(swept.trials, swept.rows, rest, swept.folder)
    status = beyond(list(swept.rows.values()), most)
    if not brief or any(word.startswith("report=") for word in rest):  # because a page takes longer than a few numbers
        run_words.write_report(swept, brief=own)
    return max(swept.status, status)


def _largest(argv: Sequence[str], axis: str, every: bool, as_json: bool) -> int:
    values: list[int] | None = None
    others = [word for word in argv if word.partition("=")[0] != axis]
    for word in argv:
        if word.partition("=")[0] == axis:
            values = typed_words.list_numbers(word)
    first = f"{axis}={values[0] if values else 1}"
    from vramsweep.harness.config import compose  # here, because it imports Hydra, which no refusal needs

    with compose.resolve(words([*others, first]), "predict", suffix="predicted") as asked:
        if asked.settings is None:
            return 0
        refuse_invalid(p.reason for p in asked.trials)
        found = largest_prediction.predict_edges(
            asked.trials, asked.settings, asked.folder, asked.start(), axis, values, every
        )
    return show_edges(found, axis, as_json, values[-1] if values else None)


def show_edges(
    answers: Sequence[tuple[Planned, largest_prediction.Answer]], axis: str, as_json: bool, last: int | None = None
) -> int:
    """Print the largest values that fit; return the exit status, 1 if a request has no answer."""
    status = int(any(found["unanswered"] or found["reason"] is not None for _, found in answers))
    if as_json:
        print(json.dumps([{"trial_id": item.trial_id, "trial": item.resolved, **found} for item, found in answers]))
        return status
    console = Console()
    answered = [(item, found) for item, found in answers if found["reason"] is None]
    for item, found in answered:
        console.print("\n".join(["", *predict_answer.describe_largest(item, found, axis, last)]), soft_wrap=True)
    if margins := [found["margin"] for _, found in answered if found["margin"] is not None]:
        console.print(
            f"\nValues that fit with more than {100 * min(margins):.1f} % to spare were judged by neighbouring values; "
            "--every replays them too."
        )
    if any(not found["complete"] for _, found in answered):
        console.print(
            "Some values near a maximum were not checked. If they are many, give a shorter range or --every. If they "
            "cannot be traced, predict them without --largest to see why."
        )
    return status


def beyond(rows: Sequence[Row], most: int | None) -> int:
    """Return 0 if every row reserves at most `most` bytes; else 1, and print how many reserve more or are unknown.

    If a row has bounds, the upper one counts.
    """
    if most is None:
        return 0
    needs = {row["trial_id"]: (find_need(row), row) for row in rows}
    above = [(need, row) for need, row in needs.values() if need is not None and need > most]
    unknown = [(need, row) for need, row in needs.values() if need is None]
    if not above and not unknown:
        return 0
    need, row = max(above, key=lambda one: one[0]) if above else unknown[0]
    invalid = row["outcome"] == Outcome.INVALID
    label = str(row["model"]) if invalid else describe_trial(Trial.model_validate(row["trial"]))
    told = row["reason"] if need is None else units.format_size(need)
    found = [f"{len(above)} of {len(needs)} trials reserve more than {units.format_size(most)}"] if above else []
    found += [f"{len(unknown)} of {len(needs)} trials reserve an unknown amount"] if unknown else []
    print(f"{', '.join(found)}; {label}: {told}", file=sys.stderr)
    return 1


def words(argv: Sequence[str]) -> list[str]:
    """Return the words for `sweep` with device=simulated. Raises UserError for another device or a price."""
    for word in argv:
        key, _, value = word.partition("=")
        if key in ("price_per_hour", "max_cost") and value != "null":
            raise UserError(
                f"predict is free and takes no {word}; vramsweep plan price_per_hour=PRICE shows the cost of measuring"
            )
        if key == "device" and value != "simulated":
            raise UserError(
                f"predict takes no {word}, because it measures nothing; leave it out, or run vramsweep sweep {word}"
            )
    given = {word.partition("=")[0] for word in argv}
    return ["-m", *([] if "device" in given else ["device=simulated"]), *argv]
