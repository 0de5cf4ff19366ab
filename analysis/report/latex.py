"""LaTeX from templates (templates/*.tex.j2), in which all text is escaped unless it was made here; and tables that fit.

A table is a tuple of `Column`s. It stands in one column of a paper (3.5 in) if it fits, with text that wraps in the
rest of the width. Otherwise it spans both (`table*`, 7.25 in). Columns and lines that fit in neither are left out, and
a note says so. Nothing is shrunk. Numbers are siunitx's (version 3), with units in the head. Widths are those of
Computer Modern at 8 pt, which is wider than most other fonts.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from vramsweep.analysis.figures.layout import break_lines
from vramsweep.harness.messages.terminal import escape_text


class Tex(str):
    """Text that is LaTeX already."""


# Of signs; [ and * too, because the \\ of the line before would take them.
_WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("latex.json").read_text("utf-8"))
_COMMANDS, _ACCENTS, UNITS = _WORDS["commands"], _WORDS["accents"], _WORDS["units"]
_LIGATURES = re.compile(r"(?<=-)(?=-)|(?<=')(?=')|(?<=,)(?=,)|(?<=[?!])(?=`)")
_LINE_ENDS = re.compile(r"[\n\r\t]+")
_BREAKS = re.compile(r"(?<=[A-Za-z0-9)\]])([_/=:@+-]|[.,](?!\d))(?=[A-Za-z0-9(\[])")
LONG = 14  # most letters of a word that has nowhere to break; a longer one may break anywhere


def tex(text: object) -> Tex:
    """Return the text for LaTeX: nothing in it is a command. A sign missing in TeX's fonts is written by its number."""
    if isinstance(text, Tex):
        return text
    plain = escape_text(_LINE_ENDS.sub(" ", str(text)))
    return Tex("".join(_sign(sign) for sign in _LIGATURES.sub("\u200b", plain)))


@cache
def _sign(sign: str) -> str:
    if sign == "\u200b":  # between two signs that TeX would draw as one
        return "{}"
    if sign in _COMMANDS:
        return _COMMANDS[sign]
    if sign.isascii():
        return sign
    base, *marks = list(unicodedata.normalize("NFD", sign))
    if base.isascii() and base.isalpha() and len(marks) == 1 and marks[0] in _ACCENTS:
        return rf"\{_ACCENTS[marks[0]]}{{{base}}}"
    return f"[U+{ord(sign):04X}]"


def slug(text: str) -> str:
    """Return a name for a label or file from any text: letters, digits, _ . and -."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.") or "x"


def _pieces(text: str) -> list[list[str]]:
    """Split a text into words, and each word where a line may break. A number stays with the word before it."""
    plain = re.sub(r" (?=[·\d])", "\u00a0", escape_text(_LINE_ENDS.sub(" ", text)))
    words = []
    for word in plain.split(" "):
        parts = _BREAKS.sub("\\1\0", word).split("\0")
        words.append([part[at : at + LONG] for part in parts for at in range(0, len(part), LONG)])
    return words


@cache
def _environment(**own: Any) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("vramsweep.analysis.report"), undefined=jinja2.StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, **own,
    )  # fmt: skip


def render(template: str, **values: Any) -> str:
    """Fill the LaTeX template of this name; `tex` escapes what its expressions return."""
    made = _environment(
        block_start_string=r"\BLOCK{", block_end_string="}", variable_start_string=r"\VAR{", variable_end_string="}",
        comment_start_string=r"\#{", comment_end_string="}", finalize=tex,
    )  # fmt: skip
    made.filters["plain"] = Tex  # for a name that is a `slug`
    return made.get_template(template).render(**values)


def markdown(template: str, **values: Any) -> str:
    """Fill a Markdown template with values that are Markdown already (export.py)."""
    return _environment().get_template(template).render(**values)


# --- widths, in points of 8 pt Computer Modern ---
_WIDTHS = {**dict.fromkeys("iljI.,:;'!|[]", 2.7), **dict.fromkeys("tfr()°· ", 3.4), **dict.fromkeys("mwMW@%&—±−×", 7.3)}
_SMALL, _CAPITAL = 4.4, 6.2
ONE_COLUMN, TWO_COLUMNS = 252.0, 520.0  # 3.5 in and 7.25 in, less a little
GAP = 6.0  # between columns: twice \tabcolsep
NUMBER = 4.26  # of a digit
_NARROWEST = 44.0  # least width of a column whose text wraps


def width(text: str) -> float:
    """Return the width of the text when set, in points; rather too wide than too narrow."""
    shown = "".join(code if (code := _sign(sign)).startswith("[U+") else sign for sign in text)
    return sum(_WIDTHS.get(sign, _CAPITAL if sign.isupper() else _SMALL) for sign in shown)


# --- columns ---
NONE = ("–", "")
BEYOND = "°"  # after a number: beyond what was measured
_NUMBER = r"[+−-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_QUANTITY = re.compile(rf"({_NUMBER})(?: ?([A-Za-z%][\w/%]*))?\Z")
_SPREAD = re.compile(rf"({_NUMBER}) ± ({_NUMBER})\Z")


@dataclass(frozen=True)
class Column:
    """One column: its head, its cells as text, its unit. A cell of `numbers` is `12.3`, `12.3(4)` (an uncertainty as
    siunitx writes it), `12°`, or words: –, `12 [−1, 25]`."""

    head: str
    cells: tuple[str, ...]
    unit: str = ""
    kind: str = "text"

    @property
    def heads(self) -> list[str]:
        """Return the head in lines no wider than its cells or its longest word; the unit is the last line."""
        cells = max(map(width, self.cells), default=0.0)
        room = max(min(cells, _NARROWEST) if self.kind == "text" else cells, *map(width, self.head.split()), 0.0)
        return [*break_lines(self.head, room, width), *([f"({self.unit})"] if self.unit else [])]

    @property
    def natural(self) -> float:
        """Return the width in points if nothing wraps."""
        words = [cell for cell in self.cells if self.kind == "text" or not _CELL.fullmatch(cell)]
        numbers = 0.0 if self.kind == "text" else _shape(self.cells)[1] + NUMBER * (BEYOND in "".join(self.cells))
        return max(numbers, *map(width, (*words, *self.heads)), 0.0)

    @property
    def narrowest(self) -> float:
        """Return the width in points if text wraps."""
        if self.kind != "text":
            return self.natural
        pieces = (width(piece) for cell in self.cells for word in _pieces(cell) for piece in word)
        return min(self.natural, max(_NARROWEST, *pieces, *map(width, self.heads)))


def _shape(cells: Iterable[str]) -> tuple[str, float]:
    """Return the format of a column that holds all of these numbers, as an option of siunitx, and its width in points.

    It has a sign, digits before and after the point, and digits of an uncertainty.
    """
    found = [match for cell in cells if (match := _CELL.fullmatch(cell))]
    signed = any(match[1] for match in found)
    whole = max([1, *(len(match[2]) for match in found)])
    after = max([0, *(len(match[3] or "") for match in found)])
    spread = max([0, *(len(match[4] or (match[5] or "").replace(".", "").lstrip("0")) for match in found)])
    signs = 1.6 * signed + 0.7 * (after > 0) + 1.6 * (spread > 0) + 0.4 * (whole > 4)
    ending = (f".{after}" if after else "") + (f"({spread})" if spread else "")
    return f"table-format={'+' * signed}{whole}{ending}", NUMBER * (whole + after + spread + signs)


_CELL = re.compile(rf"([+-]?)(\d+)(?:\.(\d+))?(?:\((\d+)\)| \+- ([\d.]+))?{BEYOND}?")


def number(value: float | None, digits: int = 0) -> str:
    """Return the cell of a number; – if it is unknown."""
    return "–" if value is None or pd.isna(value) else f"{float(value):.{digits}f}"


def columns(frame: pd.DataFrame) -> list[Column]:
    """Return the columns of a frame of text cells. Numbers in one unit become numbers; the unit goes into the head."""
    return [_column(str(name), [str(cell) for cell in frame[name]]) for name in frame.columns]


def _column(name: str, cells: Sequence[str]) -> Column:
    known = [cell for cell in cells if cell not in NONE]
    head, unit = split_unit(name)
    found = [_QUANTITY.match(cell) for cell in known]
    units = {match[2] or "" for match in found if match}
    spreads = [_SPREAD.match(cell) for cell in known]
    if known and all(found) and len(units) == 1 and (not unit or units == {""}):
        numbers, unit = iter(_plain(match[1]) for match in found if match), unit or units.pop()
    elif known and all(pair and float(_plain(pair[2])) < abs(float(_plain(pair[1]))) for pair in spreads):
        numbers = iter(f"{_plain(pair[1])} +- {_plain(pair[2])}" for pair in spreads if pair)
    else:
        return Column(name, tuple(cells))
    return Column(head, tuple("–" if cell in NONE else next(numbers) for cell in cells), unit, "numbers")


def split_unit(name: str) -> tuple[str, str]:
    """Split a head from the unit in brackets at its end ("" if it has none)."""
    match = re.fullmatch(r"(.*\S) \(([\w/%]+)\)", name)
    return (match[1], match[2]) if match else (name, "")


def _plain(number: str) -> str:
    return number.replace(",", "").replace("−", "-")


# --- tables ---
MOST = 44  # lines of a table that fit on a page


@dataclass(frozen=True)
class Table:
    """A table of a paper: `name` is that of its files, `notes` stand below it, space is above the rows of `groups`.
    `says` sums up its numbers in sentences."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    says: str = ""
    own: pd.DataFrame | None = field(default=None, repr=False)

    @property
    def frame(self) -> pd.DataFrame:
        """Return the whole table as text, for CSV and Markdown; `own` if the columns were made from a frame."""
        if self.own is not None:
            return self.own
        return pd.DataFrame({c.head + (f" ({c.unit})" if c.unit else ""): c.cells for c in self.columns})


# A table's columns, the width of each that wraps (None: its natural width), and whether it spans both columns.
_Laid = tuple[tuple[Column, ...], tuple[float | None, ...], bool]


def latex(table: Table, label: str) -> str:
    """Return the table as a float. Every table gets one: what does not fit is left out, and a note says where it is."""
    laid = kept, wraps, star = _lay(table.columns)
    notes = list(table.notes)
    if gone := [column.head for column in table.columns if column not in kept]:
        notes.append(f"Columns that did not fit are in {table.name}.csv: {', '.join(gone)}.")
    tall = [_height(laid, row) for row in range(len(table.columns[0].cells))]
    rows = max(1, next((n for n in range(len(tall), 0, -1) if sum(tall[:n]) <= MOST), 1))
    if more := len(tall) - rows:
        notes.append(f"{more:,} more {'line is' if more == 1 else 'lines are'} in {table.name}.csv.")
    shown_columns = [replace(column, cells=column.cells[:rows]) for column in kept]
    heads = list(zip_longest(*(reversed(_head(column)) for column in shown_columns), fillvalue=""))
    body = [[_cell(column, column.cells[row], wrap) for column, wrap in zip(shown_columns, wraps, strict=True)]
            for row in range(rows)]  # fmt: skip
    return render(
        "table.tex.j2", star=Tex("*" if star else ""), caption=table.caption, label=Tex(label), notes=notes,
        groups=table.groups,
        spec=Tex("".join(_spec(c, w, star) for c, w in zip(shown_columns, wraps, strict=True))),
        heads=[Tex(" & ".join(line)) for line in reversed(heads)], rows=[Tex(" & ".join(row)) for row in body],
    )  # fmt: skip


def _lay(found: Sequence[Column]) -> _Laid:
    """Choose the layout that keeps most columns: in one paper column with at most 4 lines a row, else in two."""
    for count in range(len(found), 0, -1):
        kept = tuple(found[:count])
        for star, room in ((False, ONE_COLUMN), (True, TWO_COLUMNS)):
            wraps = _wraps(kept, room)
            laid = None if wraps is None else (kept, wraps, star)
            if laid and (star or max(_height(laid, row) for row in range(len(kept[0].cells))) <= 4):
                return laid
    return tuple(found[:1]), (TWO_COLUMNS if found[0].kind == "text" else None,), True


def _wraps(columns: Sequence[Column], room: float) -> tuple[float | None, ...] | None:
    """Return the widths in points of the columns that wrap, None for others; None if they do not fit in `room`."""
    room -= GAP * (len(columns) - 1)
    if sum(column.natural for column in columns) <= room:
        return (None,) * len(columns)
    if sum(column.narrowest for column in columns) > room:
        return None
    texts = [column for column in columns if column.natural > column.narrowest]
    spare = room - sum(column.narrowest for column in columns)
    wanted = sum(column.natural - column.narrowest for column in texts)
    return tuple(
        column.narrowest + spare * (column.natural - column.narrowest) / wanted if column in texts else None
        for column in columns
    )


def _height(laid: _Laid, row: int) -> int:
    """Estimate how many lines the row takes."""
    pairs = zip(*laid[:2], strict=True)
    return max((-int(-1.15 * width(c.cells[row]) // wrap) for c, wrap in pairs if wrap), default=1) or 1


def _spec(column: Column, wrap: float | None, star: bool) -> str:
    if wrap is not None:
        share = rf"{wrap / TWO_COLUMNS:.3f}\textwidth" if star else rf"{wrap / ONE_COLUMN:.3f}\columnwidth"
        return rf">{{\raggedright\arraybackslash}}p{{{share}}}"
    if column.kind == "numbers":
        beyond = r",table-space-text-post={$^{\circ}$}" if any(c.endswith(BEYOND) for c in column.cells) else ""
        return f"S[{_shape(column.cells)[0]}{beyond}]"
    return "l"


def _head(column: Column) -> list[Tex]:
    """Return the cells of a head, from top to bottom."""
    lines = [tex(line) for line in column.heads]
    if column.unit:
        lines[-1] = Tex(rf"(\unit{{{UNITS.get(column.unit, tex(column.unit))}}})")
    return [Tex(f"{{{line}}}") for line in lines]


def _cell(column: Column, cell: str, wrap: float | None) -> Tex:
    if column.kind == "text":  # with places to break a line inside long words, so that a narrow column holds them
        return Tex(" ".join(r"\allowbreak{}".join(map(tex, word)) for word in _pieces(cell))) if wrap else tex(cell)
    if not _CELL.fullmatch(cell):
        return Tex(f"{{{tex(cell)}}}")
    return Tex(cell.replace(BEYOND, r"{$^{\circ}$}"))
