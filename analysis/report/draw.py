"""Pages of figures without a report, drawn from the JSON of `vramsweep timeline` and `vramsweep replay`."""

import json
from pathlib import Path

from vramsweep.analysis.figures.allocator import as_figure, holders
from vramsweep.analysis.figures.timeline import of_timelines
from vramsweep.analysis.report import page
from vramsweep.harness.files import outputs
from vramsweep.harness.files.bounded_reads import read_content
from vramsweep.harness.messages.errors import UserError


def draw(data: Path, out: Path) -> None:
    """Draw timelines, or the what-if table of a recording (WhatIf.to_json), into a self-contained page.

    Raises UserError if the data cannot be read, or is something else.
    """
    try:
        found = json.loads(read_content(data))
        if isinstance(found, list):
            text = page.of_figures("Memory over a step", of_timelines(found))
        else:
            text = page.of_figures("Replay of a recording", [(as_figure(found), holders(found))])
    except OSError as error:
        raise UserError(f"cannot read {data}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        raise UserError(
            f"{data} is not the output of vramsweep timeline --json; for a recording use replay FILE --figure OUT.html"
        ) from None
    outputs.write(out, text)
