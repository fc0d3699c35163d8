"""Errors that end a process, with one line for its operator."""


class StartupError(Exception):
    """The process cannot serve as it was configured: what was expected, what was found, what to do. Exit code 2."""


class ProcessFailed(Exception):
    """The process cannot go on, for a reason that a new process may not have. Exit code 1."""
