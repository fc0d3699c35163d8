"""Errors that a process reports to whoever started it."""


class StartupError(Exception):
    """The process cannot serve as it was configured. One line: what was expected, what was found, what to do.

    The command line prints it and exits with code 2.
    """
