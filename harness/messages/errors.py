"""The one exception that means "the user can mend this": its text is printed alone, without a traceback."""

from __future__ import annotations

from typing import Any

from vramsweep.harness.messages.terminal import escape_text


class UserError(Exception):
    """Says what was wrong, what is allowed and what to do next, in one or two lines."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it, as a terminal would: the lines alone."""
        return [f"vramsweep: {escape_text(str(self))}"]


def describe(value: Any) -> str:
    """Say on a line what a value from outside is, whose text may have no end: lists can hold one another many times."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write out very long ones
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        return f"{value[:60]!r:.60}"
    return repr(value) if value is None or isinstance(value, (int, float)) else f"a {type(value).__name__}"


class EnvironmentFault(UserError):
    """The machine is not fit for the trial now; says nothing about the trial."""
