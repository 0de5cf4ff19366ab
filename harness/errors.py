"""The one exception that means "the user can mend this": its text is printed alone, without a traceback."""


class UserError(Exception):
    """Says what was wrong, what is allowed and what to do next, in one or two lines."""


class EnvironmentFault(UserError):
    """The machine is not fit for the trial now; says nothing about the trial."""
