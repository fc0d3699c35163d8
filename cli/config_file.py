"""`--config FILE`: a YAML file of flags, for every command. Flags and environment variables win over it.

A key is a flag without its dashes, as in `context-length: 65536`; a flag that may be repeated takes a list, one that
takes JSON may have a mapping. The values become click's defaults, so each is read as from the command line.
"""

import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from base.errors import StartupError
from gateway.config import API_KEYS_VARIABLE

_SECRETS = {"api_keys": API_KEYS_VARIABLE, "api_key": ""}
"""Parameters whose values are not shown, and the variables that set them, where the parameters do not say."""


def _read_defaults(ctx: typer.Context, value: str | None) -> None:
    if value is not None:
        ctx.default_map = dict(_defaults(Path(value), ctx.command))


@cache
def config_option() -> Any:
    """The flag itself, which is read before the others. Made by typer, of a command of its own."""
    option = typer.Option(
        "--config",
        metavar="<path>",
        help="YAML file of flags, such as `port: 8000`. Those on the command line win.",
        is_eager=True,
        expose_value=False,
        callback=_read_defaults,
    )

    def takes_a_file(config: Annotated[str | None, option] = None) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(takes_a_file)
    return typer.main.get_command(app).params[0]


def _defaults(path: Path, command: Any) -> Iterator[tuple[str, object]]:
    """The file's values by the command's parameters. Raises StartupError for what is not a file of its flags."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartupError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise StartupError(f"--config {path}: expected flags with their values, as in `port: 8000`")
    parameters = {name: each for each in command.params if each.expose_value for name in each.opts}
    for key, value in content.items():
        if value is None:
            continue
        name = f"--{str(key).removeprefix('--').replace('_', '-')}"
        if name not in parameters:
            near = get_close_matches(name, parameters, 1)
            hint = f"; did you mean {near[0].removeprefix('--')}?" if near else ""
            raise StartupError(f"--config {path}: {command.name} has no flag {name}{hint}")
        yield parameters[name].name, _as_written(f"--config {path}: {key}", value, parameters[name])


def _as_written(where: str, value: object, parameter: Any) -> object:
    """A value as the command line would have it. Raises StartupError for one that it cannot have."""
    if parameter.multiple:
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, list):
        raise StartupError(f"{where}: expected one value")
    if isinstance(value, bool) != bool(parameter.is_flag):
        raise StartupError(f"{where}: expected {'true or false' if parameter.is_flag else 'a value'}, found {value}")
    if isinstance(value, dict):
        return json.dumps(value)
    return value if isinstance(value, bool) else str(value)


def in_force(ctx: Any) -> str:
    """The flags of a command as a YAML file, with a comment that says where each value is from. Keys are not shown."""
    lines = []
    for parameter in ctx.command.params:
        if parameter.param_type_name != "option" or not parameter.expose_value:
            continue
        value, source = ctx.params[parameter.name], ctx.get_parameter_source(parameter.name).name
        variable = parameter.envvar or _SECRETS.get(parameter.name, "")
        if not value and parameter.name in _SECRETS and variable in os.environ:
            value, source = "***", "ENVIRONMENT"
        name = parameter.opts[0].removeprefix("--")
        hidden = bool(value) and parameter.name in _SECRETS
        shown = "***" if hidden else yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000)
        line = f"{name}: {shown.removesuffix(_END).strip()}  # {_SOURCES.get(source, source).format(variable)}"
        lines.append(f"# {line}" if hidden else line)
    return "\n".join(lines)


_END = "...\n"
"""What YAML writes after a scalar."""
_SOURCES: Mapping[str, str] = {
    "COMMANDLINE": "command line",
    "ENVIRONMENT": "environment, {}",
    "DEFAULT_MAP": "--config",
    "DEFAULT": "default",
}


def _plain(value: object) -> object:
    """The value in types of YAML."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
