"""Functions of `import vramsweep` for notebooks: they return what the verbs print, as objects that show themselves.

    import vramsweep
    rows = vramsweep.load("results/gpt2-cpu")      # a tidy DataFrame: a row for each trial
    vramsweep.fit(rows[rows.seq_len >= 64], metric="peak_allocated_bytes")
    vramsweep.figure(rows, "memory_by_length")

Rows are what `load` or `predict` gave, filtered by pandas or not, or a path that `load` takes. Every function raises
UserError, in a line or two, for what its caller can fix.

Not covered: sweeping, which takes hours and belongs in a terminal; how results look (display.py).
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from vramsweep.analysis import display
from vramsweep.analysis.data import importers
from vramsweep.analysis.data import load as reading
from vramsweep.analysis.data.groups import FREE
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import GIB, HOW, METRICS, over_ranks
from vramsweep.analysis.display import Compared, Fits, Limits, Report, Rows
from vramsweep.harness.config import typed_words
from vramsweep.harness.files.sweep_folder import sweep_of
from vramsweep.harness.messages import suggestions
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.process.interpreter import build_command
from vramsweep.harness.rows import journal
from vramsweep.harness.rows.schema import BY_NAME

Given = str | os.PathLike[str] | pd.DataFrame


def load(
    source: Given,
    *,
    columns: str | None = None,
    settings: Mapping[str, Any] | None = None,
    ranks: str = "worst",
) -> Rows:
    """Return the rows of a results folder, a journal, a CSV or a Parquet file: one for each finished trial, typed, null
    if unknown.

    `columns` and `settings` are for imported files, as `--columns` and `--set` of the command line; `ranks` is worst,
    min, mean or max. `frame.attrs` has "units" (of each column), "source" and "notes" (what was left out or flagged).
    `units(frame)` is a table of the first. Memory is in bytes; `gib(frame)` converts it to GiB.

    >>> rows = load("results/qwen0.5b-torch-cuda")
    >>> rows.groupby("micro_batch").peak_allocated_bytes.max()
    """
    if isinstance(source, pd.DataFrame):
        return _rows(reading.from_frame(source, _source(source)))
    suggestions.check_listed(f"ranks={ranks}", "way to combine ranks", ranks, HOW)
    said = [f"{name}={value}" for name, value in (settings or {}).items()]
    table, notes = importers.open_rows(Path(source), columns, said)
    return _rows(over_ranks(table, ranks), notes)


def predict(folder: str | os.PathLike[str] | None = None, **settings: Any) -> Rows:
    """Predict memory on GPUs that need not be here, as `vramsweep predict` does, in a process of its own.

    Settings are those of the command line; `gpu` stands for device.gpu. A list or a range is tried value by value, a
    dict names settings inside a setting. With `folder`, rows and traces stay there, and the same call returns at once.

    >>> predict(model="qwen0.5b", seq_len=[512, 1024], micro_batch=range(1, 5), gpu="h100-80gb")
    >>> predict(model="gpt2", seq_len=1024, device={"gpu": ["l4-24gb", "a100-40gb"]}, checkpointing=True)

    Raises UserError for unknown settings, and if a package that predictions need is not installed.
    """
    if taken := settings.keys() & {"name", "results", "report"}:
        raise UserError(
            f"predict takes no {min(taken)}; predict(folder=...) keeps the rows, and report(rows, folder) draws them"
        )
    words = _words(settings)
    with tempfile.TemporaryDirectory(prefix="vramsweep-") as place:
        kept = Path(place) / "predicted" if folder is None else Path(folder).resolve()
        own = {"results": str(kept.parent), "name": kept.name, "report": False}
        line = build_command("vramsweep", "predict", *words, *_words(own))
        done = subprocess.run(line, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode not in (0, 1) or not kept.is_dir():  # 1: some trials have no answer; their rows say so
            told = [text for text in done.stderr.splitlines() if text.strip()] or ["predict failed without a message"]
            raise UserError("\n".join(told[-2:]).removeprefix("vramsweep: "))
        table = reading.load(kept)
        if asked := {str(one) for plan in journal.plans(kept)[-1:] for one in plan.get("trials") or []}:
            table = table.where(table.frame["trial_id"].isin(asked))
        return _rows(table)


def fit(
    rows: Given,
    *,
    metric: str | Sequence[str] | None = None,
    axis: str = "seq_len",
    start: float | None = None,
    stop: float | None = None,
    prediction: Given | None = None,
) -> Fits:
    """Fit memory and step time over `axis` (seq_len, micro_batch or tokens), as `vramsweep fit` does: a fit for each
    metric and group of equal settings.

    `metric` is a column or several (default: all that the rows have); `start` and `stop` bound x; `prediction` are
    predicted rows of the same settings, whose shape is taken.

    >>> one = fit(rows, metric="peak_allocated_bytes")[0]
    >>> one.equation, one.r2, one.figure()
    >>> one.predict(4096).new_high      # a new run's upper end, in bytes; also of a list, a Series, an array
    """
    from vramsweep.analysis.data.pairing import Beside, Chosen
    from vramsweep.analysis.model.fit import fit_table

    metrics = (metric,) if isinstance(metric, str) else tuple(metric or METRICS)
    for name in metrics:
        suggestions.check_listed(f"metric={name}", "metric", name, METRICS)
    suggestions.check_listed(f"axis={axis}", "axis", axis, [*FREE])
    table = _table(rows)
    beside: Beside | Chosen = Beside(table) if prediction is None else Chosen(_table(prediction))
    fits, notes = fit_table(table, metrics, start, stop, axis=axis, beside=beside.of)
    if not fits:
        raise UserError(
            f"{table.source}: nothing could be fitted; a curve needs finished rows at three values of {axis} or more"
        )
    return Fits.of(fits, notes)


def frontier(rows: Given, *, gib: float | Sequence[float] | None = None, axis: str = "seq_len") -> Limits:
    """Return the maximum length for each batch (axis="seq_len"), or batch for each length ("micro_batch"), in GPUs of
    `gib` GiB. By default `gib` is all sizes of listed GPUs. Rows prove the maximum first; fits tell the rest.

    >>> frontier(rows, gib=[24, 80])
    """
    from vramsweep.analysis.model import memory_frontier as model

    suggestions.check_listed(f"axis={axis}", "axis", axis, ("seq_len", "micro_batch"))
    sizes = model.SIZES if gib is None else [gib] if isinstance(gib, int | float) else list(gib)
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise UserError(f"gib={gib}: allowed are sizes above 0, such as gib=[24, 80]")
    if not (limits := model.frontier(_table(rows), sizes, axis)):
        raise UserError("no row of a GPU has peak reserved or device used memory, so nothing is known about what fits")
    return Limits(limits)


def compare(
    a: Given,
    b: Given | None = None,
    *,
    by: str | None = None,
    names: tuple[str, str] | None = None,
    axis: str | None = None,
    tolerance: float = 0.005,
) -> Compared:
    """Compare two sets of rows, paired by equal settings: verdicts on memory and speed, as of `vramsweep compare`.

    With `by`, one set is compared with itself. Memory that differs by no more than the share `tolerance` is EQUAL;
    `names` are what the sets are called; trends are along `axis`.

    >>> compare(rows, by="allocator=default,expandable")
    >>> compare("results/before", "results/after").worse
    """
    from vramsweep.analysis.compare import trends, verdicts
    from vramsweep.analysis.data import groups

    if (b is None) == (by is None):
        raise UserError('compare takes two sets of rows, or one with by="AXIS=VALUE,VALUE"')
    if not 0 <= tolerance < 1:
        raise UserError(f"tolerance={tolerance:g}: allowed is a share such as 0.001 (0.1 %), or 0")
    if axis is not None:
        suggestions.check_listed(f"axis={axis}", "axis", axis, [*FREE])
    if by is not None:
        setting, _, values = by.partition("=")
        sides = groups.split(_table(a), setting, values.split(","))
        found_names = tuple(f"{setting}={value}" for value in values.split(","))
    else:
        assert b is not None
        sides = _table(a), _table(b)
        paths = [str(one) for one in (a, b) if not isinstance(one, pd.DataFrame)]
        found_names = tuple(paths) if len(paths) == 2 else ("A", "B")
    first, second = names or found_names
    found = verdicts.compare(*sides, (first, second), tolerance)
    return Compared(found, trends.along(found, axis), sides)


def figure(rows: Given, name: str) -> Any:
    """Return a figure of the report as a plotly Figure, by its file's name there; `layout.meta` has its caption.

    >>> figure(rows, "memory_by_length").update_layout(width=700)

    Raises UserError, which lists the figures that these rows allow, if there is none of that name.
    """
    from vramsweep.analysis.report.content import collect

    drawn = {one.name: one for one in collect(_table(rows)).figures}
    if name not in drawn:
        raise UserError(f"these rows have no figure {name!r}; they have {', '.join(drawn) or 'none'}")
    return display.titled(drawn[name])


def report(rows: Given, folder: str | os.PathLike[str] | None = None, *, images: Sequence[str] = ()) -> Report:
    """Write report.html, figures and rows.csv into a folder (default: the one that the rows are from), and static
    figures too: images=["png", "svg", "pdf"].

    >>> report(rows, "report-of-gpt2")
    """
    from vramsweep.analysis.answers.answer_table import read_question
    from vramsweep.analysis.report.write import write_report

    if isinstance(images, str):
        raise UserError(f"images={images}: allowed is a list of png, svg and pdf")
    for name in images:
        suggestions.check_listed(f"images={name}", "format", name, ("png", "svg", "pdf"))
    table = _table(rows)
    source = Path(table.source)
    if folder is None and not source.is_dir():
        raise UserError(f"name the folder to write to, as report(rows, folder); the rows are from {source}")
    place = sweep_of(source) if folder is None else Path(folder)
    return Report(write_report(table, place, list(images), read_question(source)))


def gib(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with every `..._bytes` column of numbers as `..._gib`: 1 GiB is 1024³ bytes, null stays null.

    >>> gib(rows)[["seq_len", "peak_allocated_gib"]]
    """
    sizes = [name for name in map(str, frame.select_dtypes("number")) if name.endswith("_bytes")]
    wide = {name: name.removesuffix("_bytes") + "_gib" for name in sizes}
    made = frame.assign(**{name: frame[name].astype("Float64") / GIB for name in wide}).rename(columns=wide)
    known = frame.attrs.get("units", {})
    made.attrs["units"] = {wide.get(name, name): "GiB" if name in wide else unit for name, unit in known.items()}
    return made


def units(frame: pd.DataFrame) -> pd.DataFrame:
    """Return unit and meaning of each column of `frame` with a known value, as `vramsweep columns` lists them.

    >>> units(rows).loc["peak_reserved_bytes"]
    """
    known = [str(name) for name in frame.columns if frame[name].notna().any()]
    told = frame.attrs.get("units", {})
    lines = []
    for name in known:
        column = BY_NAME.get(name) or BY_NAME.get(name.removesuffix("_gib") + "_bytes")
        unit = told.get(name, column.unit if column else "")
        lines.append({"column": name, "unit": unit, "meaning": column.meaning if column else ""})
    return pd.DataFrame(lines, columns=["column", "unit", "meaning"]).set_index("column")


def _source(frame: pd.DataFrame) -> str:
    return str(frame.attrs.get("source", "the rows given"))


def _table(rows: Given) -> Table:
    """Return the rows as the analysis takes them. Raises UserError for a frame that has no rows of trials."""
    if not isinstance(rows, pd.DataFrame):
        return importers.open_rows(Path(rows))[0]
    if missing := {"trial_id", "outcome"} - set(rows.columns):
        raise UserError(
            f"these rows have no column {min(missing)}; filter rows, not columns: rows[rows.seq_len > 512], not "
            'rows[["seq_len", ...]]'
        )
    return reading.from_frame(
        rows.loc[:, [name for name in rows.columns if name in BY_NAME or str(name).startswith(reading.EXTRA)]],
        _source(rows),
    )


def _rows(table: Table, notes: Sequence[str] = ()) -> Rows:
    frame = Rows(table.frame)
    frame.attrs = {
        "units": {str(name): BY_NAME[str(name)].unit for name in frame.columns if str(name) in BY_NAME},
        "source": table.source,
        "notes": [*notes, *table.warnings],
    }
    return frame


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of the command line."""
    found: list[str] = []
    for name, value in settings.items():
        key = "device.gpu" if name == "gpu" else name
        plain = value.tolist() if hasattr(value, "tolist") else value  # of numpy or pandas
        if isinstance(plain, Mapping):
            found += _words({f"{key}.{inner}": of for inner, of in plain.items()})
            continue
        values = plain if isinstance(plain, list | tuple | range) else [plain]
        if not values:
            raise UserError(f"{key}: an empty list leaves nothing to predict")
        found.append(f"{key}={','.join(map(typed_words.value, values))}")
    return found
