"""The one exception that means "the user can mend this": its text is printed alone, without a traceback."""

from __future__ import annotations

from vramsweep.harness.terminal import shown


class UserError(Exception):
    """Says what was wrong, what is allowed and what to do next, in one or two lines."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows of it, as a terminal would: the lines alone."""
        return [f"vramsweep: {shown(str(self))}"]


class EnvironmentFault(UserError):
    """The machine is not fit for the trial now; says nothing about the trial."""
