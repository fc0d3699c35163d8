"""What the program itself says of its commands and endpoints, for files that use them to be held against."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from cli.main import app

REPOSITORY = Path(__file__).parent.parent.parent
DEPLOY = REPOSITORY / "deploy"

GROUP: Any = typer.main.get_command(app)
ROLES = ("gateway", "prefill", "decode")


@dataclass(frozen=True)
class CommandLine:
    """A command line of the program, as the program reads it."""

    command: str
    values: dict[str, Any]


def read(words: Sequence[str]) -> CommandLine:
    """Parse the words after `hisparse-pd` by the program's own parser. Raises what that raises, SystemExit too."""
    command, *rest = words
    context = GROUP.commands[command].make_context(command, rest)
    return CommandLine(command, dict(context.params))


def read_shell(line: str) -> CommandLine:
    """The same of a line for a shell that begins with `hisparse-pd`."""
    name, *words = shlex.split(line.replace("\\\n", " "))
    assert name.rpartition("/")[2] == "hisparse-pd", line
    return read(words)


def default(command: str, name: str) -> Any:
    """The default of a command's parameter."""
    return next(parameter.default for parameter in GROUP.commands[command].params if parameter.name == name)
