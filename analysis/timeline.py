"""From the what-if table of a replayed recording, as JSON, to its figure."""

import json
from pathlib import Path

from vramsweep.analysis.figures_allocator import allocator_timelines
from vramsweep.harness.errors import UserError


def draw(data: Path, out: Path) -> None:
    """Draw what `vramsweep replay` wrote (WhatIf.to_json) into a self-contained page. Raises UserError."""
    try:
        figure = allocator_timelines(json.loads(data.read_text()))
        figure.write_html(out, include_plotlyjs=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
