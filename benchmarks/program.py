"""Runs a benchmark that has no subcommand of `hisparse-pd` as a program of its own."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from base.errors import StartupError


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Processes that are started here ignore Ctrl-C, which goes to all of a terminal: their parent ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(main: Callable[..., None]) -> None:
    """Read the flags that `main` takes and call it; what it cannot start with is one line and exit code 2."""
    try:
        typer.run(main)
    except StartupError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
