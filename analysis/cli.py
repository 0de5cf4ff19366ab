"""The verbs that read rows: fits, figures, tables, a report. vramsweep/verbs.py says what each is for, options.json
what each takes."""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from vramsweep.analysis.answers.answer_table import NAMES, read_question
from vramsweep.analysis.data.groups import FREE
from vramsweep.analysis.data.importers import open_rows, open_together
from vramsweep.analysis.data.load import Table, load
from vramsweep.analysis.data.metrics import HOW, LISTS, METRICS, over_ranks
from vramsweep.analysis.model.curves import PLAIN
from vramsweep.harness.files import outputs
from vramsweep.harness.files.sweep_folder import sweep_of
from vramsweep.harness.messages import suggestions, units
from vramsweep.harness.messages.argument_parser import FIGURE, PAGE, OutFile, Parser
from vramsweep.harness.messages.console import Activity
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.rows import journal

IMAGES = ("png", "svg", "pdf")
FIGURES = 12  # of fits that are drawn, at most


def main(argv: list[str]) -> int:
    """Run one verb; return 0, or the verb's own status (compare). Raises UserError for what the user can fix."""
    given = argparse.Namespace(words=argv, columns=None, settings=[])
    return _VERBS[argv[0]](parser(argv[0]).parse_args(argv[1:], given)) or 0


def parser(name: str) -> Parser:
    """Return the parser of one verb without running anything."""
    made = Parser(prog=f"vramsweep {name}")
    for option in json.loads(Path(__file__).with_name("options.json").read_text("utf-8")):
        if name in option.pop("of").split():
            named = {key: _NAMED[one] for key, one in option.items() if key in ("type", "choices")}
            made.add_argument(option.pop("name"), **option | named)
    return made


def _tokens(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"takes a number such as 1024; not {text}")
    return number


def _mapping(_: str) -> NoReturn:
    raise UserError("was removed; name a CSV's columns in order with --columns, and values of all lines with --set")


def _curves(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        suggestions.check_listed(f"--curves {name}", "kind of curve", name, PLAIN)
    return names


def _images(text: str) -> list[str]:
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in IMAGES]:
        raise UserError(suggestions.no_such_value(unknown[0], "format", unknown[0], IMAGES) + "; use none on its own")
    return names


def _sizes(text: str) -> list[float]:
    """Return sizes in GiB."""
    return [units.gib(size, f"{size or text!r}") for size in text.split(",")]


def _open(arguments: argparse.Namespace, path: Path | None = None) -> Table:
    given = arguments.columns, arguments.settings
    table, notes = open_rows(path, *given) if path else open_together(arguments.rows, arguments.names, *given)
    for note in (*notes, *table.warnings):
        print(f"note: {note}", file=sys.stderr)
    ranks = getattr(arguments, "ranks", "worst")
    if ranks != "worst" and not any(table.frame[name].notna().any() for name in LISTS.values()):
        print(f"note: --ranks {ranks} changes nothing, because no row has the memory of each rank", file=sys.stderr)
    return over_ranks(table, ranks)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _draw(arguments: argparse.Namespace) -> None:
    from vramsweep.analysis.report.page import draw

    draw(arguments.data, arguments.out)


def _fit(arguments: argparse.Namespace) -> None:
    from vramsweep.analysis.data.pairing import Beside, Chosen
    from vramsweep.analysis.model import fit_wording
    from vramsweep.analysis.model.fit import fit_table
    from vramsweep.analysis.report import own_axis

    if arguments.figure is not None:
        _refuse_inputs(arguments, arguments.figure)
    elif arguments.curves:
        raise UserError("--curves changes only the figure; add --figure FILE (the text always has both curves)")
    table = _open(arguments)
    table = table if arguments.axis in FREE else own_axis.swap(table, arguments.axis)
    axis = arguments.axis if arguments.axis in FREE else table.axis
    beside: Beside | Chosen = Beside(table)
    if arguments.prediction:
        own = None if table.axis in ("seq_len", own_axis.SAMPLES) else table.axis.strip("{}")
        known = load(arguments.prediction)
        beside = Chosen(known if table.axis == "seq_len" else own_axis.swap(known, own))
    metrics, ends = arguments.metric or tuple(METRICS), (arguments.start, arguments.stop)
    fits, notes = fit_table(table, metrics, *ends, axis=axis, beside=beside.of)
    notes = own_axis.reword(notes, table)
    if arguments.json:
        found = own_axis.reword([fit_wording.as_json(fit) for fit in fits], table)
        _print_json({"source": table.source, "notes": [*table.warnings, *notes], "fits": found})
    else:
        if fits:
            print("\n\n".join(own_axis.reword(fit_wording.text(fit), table) for fit in fits))
        for note in notes:
            print(f"note: {note}")
    if arguments.figure is not None:
        _draw_fits(arguments, table, fits)
    if not fits:
        raise UserError(
            f"{table.source}: nothing could be fitted; a curve needs finished rows at three values of {axis} or more"
        )


def _draw_fits(arguments: argparse.Namespace, table: Table, fits: list[Any]) -> None:
    """Draw each fit to a file: the first to the named one, the others to its name with _2, _3, ..."""
    from vramsweep.analysis.figures import drawing, figure_table, memory
    from vramsweep.analysis.report import own_axis

    say = partial(print, file=sys.stderr if arguments.json else sys.stdout)
    drawn = own_axis.reword([memory.of_fit(fit, arguments.curves) for fit in fits[:FIGURES]], table)
    for number, figure in enumerate(figure_table.with_source(drawn, table.frame), 1):
        name: Path = arguments.figure
        out = name if number == 1 else name.with_stem(f"{name.stem}_{number}")
        _refuse_inputs(arguments, out)
        if number > 1 and out.exists():  # the user did not name this file
            raise UserError(f"the figure of fit {number} would replace {out}; move that file, or choose a --metric")
        drawing.write_one(figure, out)
        say(f"{figure.title}: {out}")
    if len(fits) > FIGURES:
        say(f"note: only the first {FIGURES} of {len(fits):,} fits are drawn; choose a quantity with --metric")


def _refuse_inputs(arguments: argparse.Namespace, out: Path) -> None:
    for source in filter(None, (*arguments.rows, arguments.prediction)):
        outputs.refuse_input(out, source)


def _report(arguments: argparse.Namespace) -> None:
    first: Path = arguments.rows[0]
    if len(arguments.rows) == 1 and first.is_dir() and not any(file.exists() for file in journal.files(first)):
        _index(first, arguments)
        return
    with Activity("reading rows") as activity:
        from vramsweep.analysis.report.content import Fitting
        from vramsweep.analysis.report.write import write_report

        table = _open(arguments)
        folder = arguments.out or sweep_of(arguments.rows[0])
        activity.update(f"fitting and drawing {units.format_count(len(table.frame), 'row')}")
        answer = arguments.answer or read_question(arguments.rows[0])
        command = shlex.join(["vramsweep", *(word for word in arguments.words if word != "--brief")])
        fitting = Fitting(arguments.start, arguments.stop, arguments.curves, command)
        written = write_report(table, folder, arguments.images, answer, activity.update, fitting)
    _print_written(written, arguments.json, table, arguments.brief)


def _index(place: Path, arguments: argparse.Namespace) -> None:
    """Write an index of the sweeps below a folder, and print it."""
    own = parser("report").parse_args([str(place)])
    others = {name for name, value in vars(arguments).items() if value != getattr(own, name, value)}
    if named := sorted(others - {"out", "json", "images"}):
        raise UserError(
            f"{place} holds sweeps, so report writes an index of them, which takes --out and --json, "
            f"not {', '.join('--' + {'start': 'from', 'stop': 'to', 'settings': 'set'}.get(one, one) for one in named)}"
        )
    with Activity("reading rows") as activity:
        from vramsweep.analysis.report import page

        folder = arguments.out or place
        found = page.read_index(place, folder, activity.update)
    if arguments.json:
        _print_json([asdict(one) for one in found])
    else:
        print("\n\n".join(map(page.describe_entry, found)))
    page.write_index(found, place, folder)
    if not arguments.json:
        print(f"\nindex     {folder / page.INDEX}")


def _paper(arguments: argparse.Namespace) -> None:
    with Activity("reading rows"):
        from vramsweep.analysis.report.content import Fitting
        from vramsweep.analysis.report.write import write_paper

        table = _open(arguments)
    folder = arguments.out or sweep_of(arguments.rows[0]) / "paper"
    given = [f"--ranks={arguments.ranks}"] if arguments.ranks != "worst" else []
    given += [f"--columns={arguments.columns}"] if arguments.columns else []
    given += [f"--set={one}" for one in arguments.settings]
    fitting = Fitting(arguments.start, arguments.stop, arguments.curves)
    ends = (("from", fitting.start), ("to", fitting.stop), ("curves", ",".join(fitting.curves) or None))
    given += [f"--{name}={value}" for name, value in ends if value is not None]
    with Activity(f"writing the paper folder from {len(table.frame):,} rows"):
        written = write_paper(table, folder, read_question(arguments.rows[0]), given, fitting)
    _print_written(written, arguments.json, table)


def _print_written(written: Any, as_json: bool, table: Table, brief: bool = False) -> None:
    if as_json:
        _print_json(written.as_json())
    elif brief:
        print(f"\n{written.list_places()}")
    else:
        print(written.text(said=table.warnings))


def _compare(arguments: argparse.Namespace) -> int:
    from vramsweep.analysis.compare import trends, verdicts, verdicts_text
    from vramsweep.analysis.data import groups

    if len(arguments.rows) != (1 if arguments.by else 2):
        raise UserError("compare takes two sets of rows, or one with --by AXIS=VALUE,VALUE")
    if not 0 <= arguments.tolerance < 1:
        raise UserError(f"--tolerance is a share such as 0.001 (0.1 %), or 0; not {arguments.tolerance:g}")
    if arguments.by:
        axis, _, values = arguments.by.partition("=")
        a, b = groups.split(_open(arguments, arguments.rows[0]), axis, values.split(","))
        names = tuple(f"{axis}={value}" for value in values.split(","))
    else:
        a, b = (_open(arguments, path) for path in arguments.rows)
        names = tuple(str(path) for path in arguments.rows)
    if arguments.names:
        names = tuple(arguments.names.split(","))
        if len(names) != 2 or not all(names):
            raise UserError(f"--names {arguments.names}: give two names, for A and for B")
    found = verdicts.compare(a, b, (names[0], names[1]), arguments.tolerance)
    along = trends.along(found, arguments.axis)
    if arguments.json:
        _print_json({**found.as_json(), "along": asdict(along)})
    else:
        print(verdicts_text.text(found, along, arguments.all))
    if arguments.report is not None:
        from vramsweep.analysis.report import compare_page

        outputs.write(arguments.report, compare_page.render(found, along, (a, b)))
    if arguments.figure is not None:
        from vramsweep.analysis.figures import overlay

        overlay.write(overlay.figure(found, along, (a, b)), arguments.figure)
    return 1 if found.worse else 0


def _calibrate(arguments: argparse.Namespace) -> None:
    from vramsweep.analysis.compare.calibrate import calibrate, calibrated, together
    from vramsweep.analysis.data import export
    from vramsweep.analysis.data.groups import groups
    from vramsweep.analysis.report import tables

    table = _open(arguments, arguments.rows)
    notes: list[str] = []
    if arguments.simulated != arguments.rows:
        table, notes = together(table, _open(arguments, arguments.simulated))
    calibrations, missing = calibrate(table)
    if not calibrations:
        raise UserError("nothing can be calibrated: " + "; ".join(missing))
    rows = calibrated(table, calibrations)
    if arguments.json:
        plain = json.loads(rows.to_json(orient="records"))
        _print_json({"calibrations": [c.as_json() for c in calibrations], "rows": plain, "notes": [*notes, *missing]})
        return
    print(export.markdown(tables.of_calibrations(calibrations)))
    simulated = [g for g in groups(table) if g.take("device")["device"].eq("simulated").all()]
    print(export.markdown(tables.of_estimates(simulated, rows)))
    print("° calibrated, outside the measured range")
    for one in calibrations:
        print(f"tokens/s of {one.gpu} in {one.precision}: {one.text()}")
    for note in (*notes, *missing):
        print(f"note: {note}")


def _frontier(arguments: argparse.Namespace) -> None:
    from vramsweep.analysis.data import parts
    from vramsweep.analysis.data.groups import groups
    from vramsweep.analysis.data.load import varying
    from vramsweep.analysis.model import memory_frontier
    from vramsweep.analysis.report import own_axis

    table = _open(arguments)
    table, axis = (table, "micro_batch") if arguments.batch else (swapped := own_axis.swap(table), swapped.axis)
    limits = memory_frontier.frontier(table, arguments.gib or memory_frontier.SIZES, axis)
    if not limits and varying(table.frame).all():
        raise UserError(
            "lengths vary in every row (data=lengths:...) and seq_len only cuts samples; see vramsweep report"
        )
    if not limits:
        raise UserError("no row of a GPU has peak reserved or device used memory, so nothing is known about what fits")
    if arguments.json:
        _print_json(own_axis.reword([asdict(limit) for limit in limits], table))
    else:
        said = own_axis.reword(memory_frontier.text(limits), table)
        print("\n".join(filter(None, [said, parts.remark(parts.jobs(groups(table)))])))


def _export(arguments: argparse.Namespace) -> None:
    from vramsweep.analysis.data import export

    writer = {".csv": export.write_csv, ".parquet": export.write_parquet}[arguments.out.suffix]
    for path in arguments.rows:
        outputs.refuse_input(arguments.out, path)
    table = _open(arguments)
    outputs.write(arguments.out, lambda place: writer(table.frame, place))
    print(f"{len(table.frame):,} rows in {arguments.out}")


_VERBS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "fit": _fit, "report": _report, "paper": _paper, "frontier": _frontier, "export": _export, "compare": _compare,
    "calibrate": _calibrate, "draw": _draw,
}  # fmt: skip
# What a type or choices of options.json stand for.
_NAMED: dict[str, Any] = {
    "path": Path, "number": float, "figure": FIGURE, "page": PAGE, "table": OutFile((".csv", ".parquet")),
    "mapping": _mapping, "tokens": _tokens, "curves": _curves, "images": _images, "sizes": _sizes,
    "metrics": list(METRICS), "axes": list(FREE), "ranks": HOW, "answers": NAMES,
}  # fmt: skip
