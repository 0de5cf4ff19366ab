"""A table as Markdown or booktabs LaTeX, from a frame whose cells are already text: what a name holds stays text."""

from __future__ import annotations

import re

import pandas as pd

from vramsweep.harness.terminal import shown

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "²": r"\textsuperscript{2}", "·": r"\textperiodcentered{}",
    "°": r"\textdegree{}", "–": "--", "−": "$-$", "µ": r"\textmu{}",
}  # fmt: skip
_MARKDOWN = re.compile(r"[\\|`<\[]")  # ends a cell; is code, HTML, a link or an image
_LINE_ENDS = re.compile(r"[\n\r\t]")


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; numbers to the right."""
    names = [_cell(str(name)) for name in frame.columns]
    right = [numeric(frame[name]) for name in frame.columns]
    rows = [[_cell(str(cell)) for cell in row] for row in frame.to_numpy()]
    lines = [names, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def prose(text: str) -> str:
    """A sentence in Markdown: its code stays code, what a name holds of HTML, links and images is text."""
    return re.sub(r"[<\[]", r"\\\g<0>", shown(_LINE_ENDS.sub(" ", text)))


def latex(frame: pd.DataFrame, caption: str, name: str) -> str:
    """A booktabs table with caption and label."""
    columns = "".join("r" if numeric(frame[column]) else "l" for column in frame.columns)
    body = [" & ".join(_tex(str(cell)) for cell in row) + r" \\" for row in frame.to_numpy()]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(caption)}}}",
            rf"\label{{tab:{re.sub(r'[^A-Za-z0-9_:.-]', '-', name)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(_tex(str(column)) for column in frame.columns) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def numeric(column: pd.Series[str]) -> bool:
    """Whether a column holds numbers, which stand to the right."""
    cells = [str(cell) for cell in column if str(cell) != "–"]
    return bool(cells) and all(cell[:1].isdigit() or cell[:1] in "+-−" for cell in cells)


def _cell(text: str) -> str:
    return _MARKDOWN.sub(r"\\\g<0>", shown(_LINE_ENDS.sub(" ", text)))


def _tex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in shown(_LINE_ENDS.sub(" ", text)))
