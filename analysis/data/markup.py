"""A table as Markdown, from a frame whose cells are already text: what a name holds stays text.

Not covered: LaTeX (report/latex.py).
"""

from __future__ import annotations

import re

import pandas as pd

from vramsweep.harness.messages.terminal import escape_text

_MARKDOWN = re.compile(r"[\\|`<\[]")  # ends a cell; is code, HTML, a link or an image
_LINE_ENDS = re.compile(r"[\n\r\t]")


def markdown(frame: pd.DataFrame) -> str:
    """A Markdown table; numbers to the right."""
    names = [cell(str(name)) for name in frame.columns]
    right = [numeric(frame[name]) for name in frame.columns]
    rows = [[cell(str(one)) for one in row] for row in frame.to_numpy()]
    lines = [names, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def prose(text: str) -> str:
    """A sentence in Markdown: its code stays code, what a name holds of HTML, links and images is text."""
    return re.sub(r"[<\[]", r"\\\g<0>", escape_text(_LINE_ENDS.sub(" ", text)))


def numeric(column: pd.Series[str]) -> bool:
    """Whether a column holds numbers, which stand to the right."""
    cells = [str(cell) for cell in column if str(cell) != "–"]
    return bool(cells) and all(cell[:1].isdigit() or cell[:1] in "+-−" for cell in cells)


def cell(text: str) -> str:
    """A cell of a Markdown table, or a word in one."""
    return _MARKDOWN.sub(r"\\\g<0>", escape_text(_LINE_ENDS.sub(" ", text)))
