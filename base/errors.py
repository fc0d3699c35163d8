"""Errors that a process reports to whoever started it."""


class StartupError(Exception):
    """The process cannot serve as it was configured. One line: what was expected, what was found, what to do.

    The command line prints it and exits with code 2.
    """


class ProcessFailed(Exception):
    """The process cannot go on, for a reason that a new one may not have. One line that says why.

    The command line prints it and exits with code 1.
    """
