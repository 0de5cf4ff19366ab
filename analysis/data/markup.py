"""Markdown tables from frames whose cells are already text; whatever a name holds stays text."""

from __future__ import annotations

import re

import pandas as pd

from vramsweep.harness.messages.terminal import escape_text

_MARKDOWN = re.compile(r"[\\|`<\[]")  # ends a cell; begins code, HTML, a link or an image
_LINE_ENDS = re.compile(r"[\n\r\t]")


def markdown(frame: pd.DataFrame) -> str:
    """Return a Markdown table, numbers to the right."""
    names = [cell(str(name)) for name in frame.columns]
    right = [numeric(frame[name]) for name in frame.columns]
    rows = [[cell(str(one)) for one in row] for row in frame.to_numpy()]
    lines = [names, ["---:" if r else "---" for r in right], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def prose(text: str) -> str:
    """Return a sentence in Markdown: its code stays code, HTML, links and images in names become text."""
    return re.sub(r"[<\[]", r"\\\g<0>", escape_text(_LINE_ENDS.sub(" ", text)))


def numeric(column: pd.Series[str]) -> bool:
    """Return whether a column holds numbers, which stand to the right."""
    cells = [str(cell) for cell in column if str(cell) != "–"]
    return bool(cells) and all(cell[:1].isdigit() or cell[:1] in "+-−" for cell in cells)


def cell(text: str) -> str:
    """Return a text as a cell of a Markdown table, or as a word in one."""
    return _MARKDOWN.sub(r"\\\g<0>", escape_text(_LINE_ENDS.sub(" ", text)))
