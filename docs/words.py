"""Words and openings of sentences that the glossary (CONTRIBUTING) bans: `python docs/words.py` lists where pages have
them, with status 1 if any has.

Headings and tables may ask questions, and code has names of its own: both are left out. tests/test_docs.py holds the
pages to this.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
BANNED = (
    r"verbs?", "mended", r"go(?:es)? on with", "gone on with", r"passing faults?", r"leftovers?", "monotone",
    "reserved beyond", "hangs? on", "moves? with", "rests? on", "what stays", "whoever", "foreign files?",
)  # fmt: skip
OPENINGS = ("What", "Where", "Of", "Who", "Whoever")
_BANNED = re.compile(rf"(?i)\b(?:{'|'.join(BANNED)})\b")


def pages() -> list[Path]:
    """Return the pages of the documentation, README, CONTRIBUTING and the page of published runs' format."""
    fixed = ("README.md", "CONTRIBUTING.md", "benchmarks/published/README.md")
    return [*(ROOT / name for name in fixed), *sorted((ROOT / "docs").glob("*.md"))]


def sentences(path: Path) -> Iterator[str]:
    """Yield the sentences of a page's paragraphs and lists, with code as `x`."""
    inside: list[str] = []
    for token in MarkdownIt("commonmark").enable("table").parse(path.read_text()):
        inside = [*inside, token.tag] if token.nesting == 1 else inside[:-1] if token.nesting == -1 else inside
        if token.type == "inline" and not {"table", "h1", "h2", "h3", "h4"} & {*inside}:
            written = {"code_inline": "x", "softbreak": " "}
            parts = (part for part in token.children or () if part.type in ("text", *written))
            text = "".join(written.get(part.type, part.content) for part in parts)
            yield from re.split(r"(?<=[.!?]) +(?=[A-Z`*])", text)


def offences(path: Path) -> list[str]:
    """Return each sentence with a banned word, or with an opening that is no question's."""
    every = list(sentences(path))
    words = [f"{found[0]}: {one}" for one in every for found in _BANNED.finditer(one)]
    return words + [one for one in every if one.split(" ")[0] in OPENINGS and "?" not in one]


if __name__ == "__main__":
    found = [f"{path.relative_to(ROOT)}: {one}" for path in pages() for one in offences(path)]
    print("\n".join(found))
    sys.exit(bool(found))
