"""Values in Hydra's grammar for overrides: writing a value, and splitting values at their commas."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from vramsweep.harness.messages.errors import UserError

KEY = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*", re.ASCII)
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_WHOLE = re.compile(rf"{QUOTED.pattern}|\([^()]*\)|\[[^\[\]]*\]|\{{[^{{}}]*\}}")


def value(of: Any) -> str:
    """Return a value in Hydra's override grammar, quoted if ambiguous. Raises UserError for a key it cannot express."""
    if of is None or isinstance(of, bool):
        return "null" if of is None else str(of).lower()
    if isinstance(of, (int, float)):
        return repr(of)
    if isinstance(of, list):
        return f"[{','.join(map(value, of))}]"
    if isinstance(of, Mapping):
        for key in of:
            if not KEY.fullmatch(str(key)):
                raise UserError(f"the key {key!r} cannot be written on the command line")
        return f"{{{','.join(f'{key}:{value(v)}' for key, v in of.items())}}}"
    text = str(of)
    if _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # otherwise it would be an interpolation
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def split_values(text: str) -> Iterator[str]:
    """Yield the texts between the commas; commas in quotes or brackets do not separate."""
    masked, changed = text, 1
    while changed:
        masked, changed = _WHOLE.subn(lambda match: "-" * len(match[0]), masked)
    at = [n for n, sign in enumerate(masked) if sign == ","]
    return (text[low + 1 : high] for low, high in pairwise([-1, *at, len(text)]))
