"""Notebook views of results: what the verb prints as text, a table and its sentences as HTML.

Names and reasons are escaped in both, by the template and by terminal.py. notebook.py makes the results.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from vramsweep.analysis.compare import verdicts_text
from vramsweep.analysis.compare.trends import Along
from vramsweep.analysis.compare.verdicts import Comparison
from vramsweep.analysis.data import export
from vramsweep.analysis.data.groups import ASKED, label
from vramsweep.analysis.data.load import Table
from vramsweep.analysis.data.metrics import METRICS
from vramsweep.analysis.figures import memory, overlay
from vramsweep.analysis.figures.layout import page
from vramsweep.analysis.figures.plots import Figure
from vramsweep.analysis.model import fit_wording, memory_frontier
from vramsweep.analysis.model.curves import PLAIN
from vramsweep.analysis.model.fit import Fit
from vramsweep.analysis.model.memory_frontier import Limit
from vramsweep.analysis.report import tables
from vramsweep.analysis.report.page import page as fill_page
from vramsweep.analysis.report.write import Written
from vramsweep.harness.messages.terminal import escape_text
from vramsweep.harness.messages.units import format_gib

MOST = 20  # lines of a table
WIDE = 30  # columns; a frame with fewer was made by the user
UNKNOWN = "–"


def html(
    title: str, table: pd.DataFrame, sentences: Sequence[str] = (), whole: str = "", notes: Sequence[str] = ()
) -> str:
    """Return HTML of a title, a table of text cells, sentences, and what is folded: the whole in words, and notes."""
    if len(table) > MOST:
        sentences = [f"{MOST} of {len(table):,} lines.", *sentences]
    names, right = list(table.columns), [export.numeric(table[name]) for name in table.columns]
    shown = {"title": title, "names": names, "right": right, "rows": table.head(MOST).to_numpy().tolist()}
    return fill_page("display", [], sentences=list(sentences), whole=whole, notes=list(notes), **shown)


class Shown:
    """A result that shows itself: `text` where only letters show, `_repr_html_` in a notebook; `frame` is its data."""

    @property
    @abstractmethod
    def text(self) -> str:
        """Text that the verb prints."""

    @property
    @abstractmethod
    def frame(self) -> pd.DataFrame:
        """Numbers as a frame, in the units of the columns."""

    @abstractmethod
    def _repr_html_(self) -> str: ...

    def __repr__(self) -> str:
        return escape_text(self.text)


class ShownFit(Fit):
    """A fit that shows itself: in a line, in words, as a figure."""

    @property
    def equation(self) -> str:
        """Equation of the chosen model, in the metric's unit."""
        return fit_wording.equations(self, self.chosen)

    @property
    def r2(self) -> float:
        """Share of the points' variance that the chosen model explains."""
        return self.chosen.r2

    def summary(self) -> str:
        """Return what `vramsweep fit` prints of it."""
        return fit_wording.text(self)

    def figure(self, curves: Sequence[str] = PLAIN) -> Any:
        """Draw points, the chosen curve with its band, the line and the parabola, and residuals, as a plotly Figure."""
        return titled(memory.of_fit(self, curves))

    def __repr__(self) -> str:
        return escape_text(f"<{fit_wording.summary([self], brief=True)}>")

    def _repr_html_(self) -> str:
        said = [*fit_wording.explain(self), *fit_wording.rests_on(self)]
        return html(f"{self.metric.label}, {self.label}", tables.of_fits([self]), said, self.summary(), self.warnings)


class Fits(Shown, tuple[ShownFit, ...]):
    """The fits that `vramsweep fit` prints, and what could not be fitted (`notes`)."""

    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, fits: Sequence[Fit], notes: Sequence[str]) -> Fits:
        """Return fits that show themselves."""
        found = cls(ShownFit(**{one.name: getattr(fit, one.name) for one in fields(fit)}) for fit in fits)
        found.notes = tuple(notes)
        return found

    @property
    def text(self) -> str:
        """Text that the verb prints."""
        fits = "\n\n".join(fit_wording.text(fit) for fit in self)
        return "\n".join([fits, *(f"note: {note}" for note in self.notes)])

    @property
    def frame(self) -> pd.DataFrame:
        """Frame with a row for each model of each fit: line, parabola, the chosen one; errors in the column's unit."""
        return fit_wording.frame(self)

    def _repr_html_(self) -> str:
        title = f"{len(self):,} fit{'s' * (len(self) != 1)}"
        said = [f"{fit.metric.label}, {fit.label}: {line}" for fit in self[:6] for line in fit_wording.explain(fit)]
        return html(title, tables.of_fits(self), said, self.text, self.notes)


class Limits(Shown, tuple[Limit, ...]):
    """Limits of what fits, as `vramsweep frontier` prints them."""

    @property
    def text(self) -> str:
        """Text that the verb prints."""
        return memory_frontier.text(self)

    @property
    def frame(self) -> pd.DataFrame:
        """Frame with a line for each group and size: lengths in tokens, batches in samples, null if not known."""
        found = pd.DataFrame([asdict(limit) for limit in self])
        whole = ("value", "low", "high", "largest_ok", "smallest_too_large", "multiples_of")
        return found.astype(dict.fromkeys(whole, "Int64"))

    def _repr_html_(self) -> str:
        what = "length" if self[0].axis == "seq_len" else "batch"
        return html(f"The largest {what} that fits", tables.of_limits(self), [memory_frontier.room(self)], self.text)


@dataclass(frozen=True, repr=False)
class Compared(Shown):
    """The verdicts that `vramsweep compare` prints: `comparison` has the pairs of both `sides`, `along` has the changes
    along an axis."""

    comparison: Comparison
    along: Along
    sides: tuple[Table, Table]

    @property
    def worse(self) -> bool:
        """Return whether B needs more memory in any pair, or is slower over all."""
        return self.comparison.worse

    @property
    def text(self) -> str:
        """Text that the verb prints."""
        return verdicts_text.text(self.comparison, self.along)

    @property
    def frame(self) -> pd.DataFrame:
        """Frame with a line for each pair and quantity: medians in bytes, speed in tokens/s; `change` is B/A - 1."""
        lines = []
        for pair in self.comparison.pairs:
            name = label(pair.settings)
            for one in pair.memory:
                change = one.b / one.a - 1 if one.a and one.b is not None else None
                lines.append((name, one.metric, one.verdict, one.a, one.b, change, one.reason))
            speed = pair.speed
            lines.append((name, "tokens_per_s", speed.verdict, speed.a, speed.b, speed.change, speed.reason))
        columns = ["settings", "quantity", "verdict", "a", "b", "change", "reason"]
        return pd.DataFrame(lines, columns=columns).astype(dict.fromkeys(("a", "b", "change"), "Float64"))

    def figure(self) -> Any:
        """Draw both sets over each other, as a plotly Figure. Raises UserError if there is no axis to draw along."""
        return titled(overlay.figure(self.comparison, self.along, self.sides))

    def _repr_html_(self) -> str:
        c = self.comparison
        rows = [(METRICS[one.metric].label, one.verdict, verdicts_text.over_all(one, c.tolerance)) for one in c.memory]
        table = pd.DataFrame([*rows, ("speed", c.speed.verdict, c.speed.reason)], columns=["", "B is", "why"])
        said = [line for one in c.memory for line in verdicts_text.sentences(self.along, one.metric)]
        differs = [f"{name}: {a} in A, {b} in B" for name, (a, b) in c.differs.items()]
        return html(f"A {c.a}, B {c.b}: {len(c.pairs):,} pairs", table, [*differs, *said], self.text)


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The files that were written: `written.places` by name."""

    written: Written

    @property
    def path(self) -> Path:
        """Path of the page itself."""
        return self.written.places["report"]

    @property
    def text(self) -> str:
        """Text that the verb prints."""
        return self.written.text()

    @property
    def frame(self) -> pd.DataFrame:
        """Frame of name and place of all that was written."""
        lines = [(name, str(path)) for name, path in self.written.places.items()]
        return pd.DataFrame(lines, columns=["what", "where"])

    def _repr_html_(self) -> str:
        return html("Written", self.frame, whole=self.written.summary, notes=self.written.notes)


class Rows(pd.DataFrame):
    """Rows of trials: a DataFrame whose notebook view is what tells them apart, their peaks and their speed.

    Pandas filters, sorts and groups it as any other; a frame of few columns looks as pandas shows it.
    """

    @property
    def _constructor(self) -> Any:
        return Rows

    def __repr__(self) -> str:
        if not self._whole:
            return super().__repr__()
        title, table = _summary(self)
        return escape_text(f"{title}\n{table.head(MOST).to_string(index=False)}")

    def _repr_html_(self) -> str | None:  # pandas gives None if its options say so
        if not self._whole:
            return super()._repr_html_()  # type: ignore[misc, no-any-return]
        title, table = _summary(self)
        about = f"Most of the {len(self.columns)} columns are not shown; vramsweep.units(rows) explains them."
        return html(title, table, [about], notes=self.attrs.get("notes", ()))

    @property
    def _whole(self) -> bool:
        return len(self.columns) > WIDE and {"trial_id", *_SHOWN} <= set(map(str, self.columns)) and len(self) > 0


_SHOWN = ("outcome", "device", "peak_allocated_bytes", "peak_reserved_bytes", "tokens_per_s", "flags")


def _summary(rows: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return in a line what the rows are, and as text what varies, the outcome, peaks, speed and flags."""
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in rows["outcome"].value_counts().items())
    kinds = {"simulated": "predicted, not measured"}
    devices = [kinds.get(str(name), f"measured on {name}") for name in rows["device"].dropna().unique()]
    title = f"{len(rows):,} trials ({', '.join(devices) or 'of unknown device'}): {counts}"
    axes = [name for name in (*ASKED, "simulated_gpu", "gpu_name", "seq_len") if name in rows]
    shown_axes = [n for n in axes if n in ("seq_len", "micro_batch") or rows[n].nunique(dropna=False) > 1]
    table = {name: rows[name].map(_text, na_action=None) for name in (*shown_axes, "outcome")}
    for column, name in (("peak_allocated_bytes", "allocated (GiB)"), ("peak_reserved_bytes", "reserved (GiB)")):
        table[name] = rows[column].map(lambda v: UNKNOWN if pd.isna(v) else format_gib(v), na_action=None)
    table["tokens/s"] = rows["tokens_per_s"].map(lambda v: UNKNOWN if pd.isna(v) else f"{v:,.0f}", na_action=None)
    flags = [[] if v is None or v is pd.NA else list(v) for v in rows["flags"].to_numpy(object)]
    if any(flags):
        table["flags"] = pd.Series([", ".join(map(str, of_row)) for of_row in flags], index=rows.index)
    return title, pd.DataFrame(table)


def _text(value: Any) -> str:
    if pd.isna(value):
        return UNKNOWN
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def titled(figure: Figure) -> Any:
    """Return the plot as a file has it, with title and source, but as wide as there is room; `layout.meta`: caption."""
    return page(figure).update_layout(width=None, meta={"name": figure.name, "caption": figure.caption})
