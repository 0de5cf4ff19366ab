"""What a prediction did not look at: codes of the column `not_covered`, which a trace reports (Tracer.leave_out)."""

import json
from collections.abc import Iterable
from pathlib import Path

EAGER = "compiled_code"
CODES: dict[str, str] = json.loads(Path(__file__).with_name("not_covered.json").read_text("utf-8"))


def describe(code: str, details: Iterable[str] = ()) -> str:
    """Return the sentence of a code with its details; of an unknown code, which a later version wrote, the code."""
    told = ", ".join(sorted(details))
    return CODES.get(code, code) + f" ({told})" * bool(told)
