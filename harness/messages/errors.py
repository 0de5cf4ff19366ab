"""The one exception that means "the user can fix this": its text is printed alone, without a traceback."""

from typing import Any

from vramsweep.harness.messages.terminal import escape_text


class UserError(Exception):
    """A mistake that the user can fix: what was wrong, what is allowed and what to do next, in one or two lines."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows of it, as a terminal would: the lines alone."""
        return [f"vramsweep: {escape_text(str(self))}"]


def describe(value: Any) -> str:
    """Describe a value from outside in a line; its text may have no end, because lists can hold one another often."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write out very long ones
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        return f"{value[:60]!r:.60}"
    return repr(value) if value is None or isinstance(value, (int, float)) else f"a {type(value).__name__}"


class EnvironmentFault(UserError):
    """A fault of the machine, which is not fit for the trial now; it says nothing about the trial."""
