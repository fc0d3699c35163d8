"""Runs a benchmark that has no subcommand of `hisparse-pd` as a program of its own."""

import sys
from collections.abc import Callable

import typer

from base.errors import StartupError


def run(main: Callable[..., None]) -> None:
    """Read the flags that `main` takes and call it; what it cannot start with is one line and exit code 2."""
    try:
        typer.run(main)
    except StartupError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
