"""Settings of the documentation site (Sphinx): `make docs` writes build/docs/index.html. Nothing is fetched, by anyone.

The pages are plain Markdown, as a code host shows them; this file adds what only a site needs. The lists of index.md
become the menu. A link to a file that is no page (../conf/config.yaml) becomes its path, or leads to REPOSITORY if that
is set.
"""

from __future__ import annotations

import os
import posixpath
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sphinx.application import Sphinx

from vramsweep import __version__

project = "vramsweep"
author = "vramsweep"
release = version = __version__
extensions = ["myst_parser"]
exclude_patterns = ["images/**"]
html_theme = "furo"
html_title = f"vramsweep {__version__}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
suppress_warnings = ["misc.highlighting_failure"]
highlight_language = "none"
smartquotes = False  # -- begins an option

REPOSITORY = os.environ.get(
    "VRAMSWEEP_REPOSITORY", ""
)  # the address of its files: https://HOST/OWNER/vramsweep/blob/main

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]*)(#[^)]*)?\)")
_SECTION = re.compile(r"(?m)^## (.+)$")
_ENTRY = re.compile(r"(?m)^- \[([^\]]+)\]\(([a-z0-9_]+)\.md\)")


def files(text: str) -> str:
    """Replace links to files that are no pages by the path in code, or by a link into REPOSITORY."""

    def shown(found: re.Match[str]) -> str:
        name, path = found[1], posixpath.normpath(posixpath.join("docs", found[2]))
        if REPOSITORY:
            return f"[{name}]({REPOSITORY}/{path}{found[3] or ''})"
        return f"`{path}`" if name.strip("`") in (path, posixpath.basename(path)) else f"{name} (`{path}`)"

    return _OUTSIDE.sub(shown, text)


def menu(text: str) -> str:
    """Append to index.md a hidden toctree for each of its sections, so that its lists are the menu."""
    heads = list(_SECTION.finditer(text))
    trees = []
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        names = [
            f"{name} <{page}>" for name, page in _ENTRY.findall(text, head.end(), after.start() if after else len(text))
        ]
        trees.append("\n".join(["```{toctree}", f":caption: {head[1]}", ":hidden:", "", *names, "```"]))
    return "\n\n".join([text, *trees])


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = files(source[0])
    if page == "index":
        source[0] = menu(source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _read)
