"""`hisparse-pd config show`, and what a command would read from its flags."""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from base.errors import StartupError
from cli.config import ServeConfig
from cli.config_file import in_force
from cli.flags import configured
from cli.panels import GroupedCommand
from cli.refusals import UsageError, refusals

app = typer.Typer(name="config", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def about() -> None:
    """Configuration files: every command takes --config FILE."""


@app.command(context_settings={"ignore_unknown_options": True})
def show(words: Annotated[list[str], typer.Argument(help="A command, such as serve, and its flags.")]) -> None:
    """Print the flags that a command would run with, as a YAML file, and where each value comes from."""
    with refusals():
        typer.echo(in_force(_context(words)))


def _context(words: Sequence[str]) -> Any:
    """The context of a command, of which the words are its name and its flags. Raises StartupError for another name."""
    from cli.main import app as all_commands

    command: Any = typer.main.get_command(all_commands)
    while not isinstance(command, GroupedCommand):
        name, *words = words or [""]
        if name not in command.commands:
            raise StartupError(f"{name or 'no command'}: expected a command, one of {', '.join(command.commands)}")
        command = command.commands[name]
    return command.make_context(command.name, list(words))


def read_serve_flags(words: Sequence[str]) -> ServeConfig:
    """The configuration that `serve` would run with. Raises StartupError if it would not."""
    try:
        with refusals():
            return configured(ServeConfig, _context(["serve", *words]).params)
    except UsageError as error:
        raise StartupError(str(error)) from error
