"""A table as Markdown or booktabs LaTeX, from a frame whose cells are already text."""

from __future__ import annotations

import pandas as pd

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "²": r"\textsuperscript{2}", "·": r"\textperiodcentered{}",
    "°": r"\textdegree{}", "–": "--", "−": "$-$", "µ": r"\textmu{}",
}  # fmt: skip


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; numbers to the right."""
    names = [str(name) for name in frame.columns]
    right = [numeric(frame[name]) for name in frame.columns]
    rows = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in frame.to_numpy()]
    lines = [names, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def latex(frame: pd.DataFrame, caption: str, name: str) -> str:
    """A booktabs table with caption and label."""
    columns = "".join("r" if numeric(frame[column]) else "l" for column in frame.columns)
    body = [" & ".join(_tex(str(cell)) for cell in row) + r" \\" for row in frame.to_numpy()]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(caption)}}}",
            rf"\label{{tab:{name}}}",
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


def _tex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
